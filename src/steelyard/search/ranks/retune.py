"""How else a step that runs could lie: what stays as it is, and what is fastest over other links.

All ranks may go on, with gradients sent otherwise; or some of them, the first among these, with
nothing in codes. What a rank holds of the model is all of it in any case. Not for whether it is
worth it: see api/replan.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.hardware.link import Link
from steelyard.ir.gradient_codec import CODE_TRADES, Codec
from steelyard.ir.parallel_layout import ALONE, DATA, LAYOUT_TRADES, TENSOR, ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.search.ranks.gradient_compression import Weighing
from steelyard.search.ranks.layout_candidates import LayoutCandidate
from steelyard.search.ranks.layout_search import LayoutSearch

_STATES, _BATCH = "shard_states", "shard_batch"
# What is not faster by so much is left alone; and so much faster than all that lose nothing is what
# loses accuracy, or it is not worth any.
LEAST_GAIN = 0.10
# Ranks that come back are sent the model and what the optimizer keeps; in so many steps that has
# to be won.
_PAID_BACK_IN = 100
# Of more hosts not every number of them is a candidate: each is a capture.
_FEW_HOSTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way to go on; ``ranks`` are those that take part."""

    way: LayoutCandidate
    ranks: tuple[int, ...]

    @property
    def is_lossy(self) -> bool:
        return any(rule.trade in CODE_TRADES for rule in self.way.rules)


def why_no_alternative(rules: Sequence[Rule]) -> str:
    """Empty where another way to send gradients can take this one's place."""
    layout = ParallelLayout.of(rules)
    if layout == ALONE:
        return "one rank has nobody to send gradients to"
    is_shared = layout == ParallelLayout(batch=layout.batch, shares=layout.shares)
    if not is_shared or any(rule.trade == _STATES for rule in rules):
        return "ranks hold parts of the model"
    return ""


def compressed_alternatives(
    layouts: LayoutSearch, rules: Sequence[Rule], codecs: Collection[Codec]
) -> tuple[tuple[Rule, ...], ...]:
    """Return the rules of the fastest step of this layout for each gradient code."""
    layouts.layouts = [ParallelLayout.of(rules)]
    coded, _ = Weighing(layouts=layouts, codecs=codecs).fastest(thoroughly=False)
    return tuple(way.rules for way in coded)


def alternatives(
    layouts: LayoutSearch, rules: Sequence[Rule], coded: Sequence[tuple[Rule, ...]]
) -> Iterator[LayoutCandidate]:
    """Every way in which the ranks of this layout could send gradients, without codes or as
    ``coded``, what else the rules say being done."""
    kept = _kept(rules)
    plain = (
        way.rules
        for way in layouts.ways.of(ParallelLayout.of(rules))
        if not any(rule.trade == _STATES for rule in way.rules)
    )
    for own in (*plain, *coded):
        yield layouts.ways.counted(at_once((*own, *kept)))


def at_once(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules with gradient codes from the first step on, without a warm-up: exact steps
    would be the slowest."""
    begun = (replace(rule, lead=0) if rule.trade in CODE_TRADES else rule for rule in rules)
    return tuple(sorted(begun))


def on_fewer(layouts: LayoutSearch, rules: Sequence[Rule], ranks: int) -> Iterator[LayoutCandidate]:
    """The same on so many ranks, in equal shares and with gradients as they are."""
    kept = _kept(rules)
    for way in layouts.ways.of(ParallelLayout(batch=ranks)):
        if not any(rule.trade == _STATES for rule in way.rules):
            yield layouts.ways.counted(tuple(sorted((*way.rules, *kept))))


def same_on_fewer(layouts: LayoutSearch, rules: Sequence[Rule], ranks: int) -> LayoutCandidate:
    """The step as it lies, on so many ranks in equal shares, with gradients as they are."""
    own = _kept(rules)
    if ranks > 1:
        exact = (rule for rule in rules if rule.trade not in CODE_TRADES)
        own = tuple(
            replace(rule, degree=ranks, shares=()) if rule.trade == _BATCH else rule
            for rule in exact
        )
    return layouts.ways.counted(tuple(sorted(own)))


def numbers_of_hosts(hosts: int) -> tuple[int, ...]:
    """On how many hosts a step that runs on ``hosts`` may go on, all of them apart."""
    if hosts <= _FEW_HOSTS:
        return tuple(range(1, hosts))
    return tuple(sorted({1, hosts // 2, hosts - 1}))


def best_hosts(rates: Sequence[float], count: int) -> tuple[int, ...]:
    """The first host, and those joined to it best; ``rates`` are of the others in their order."""
    order = sorted(range(1, len(rates) + 1), key=lambda host: (-rates[host - 1], host))
    return tuple(sorted((0, *order[: count - 1])))


def link_among(link: Link, rates: Sequence[float], members: Sequence[int]) -> Link:
    """What joins some of the hosts: as much faster than what joins all as the slowest of these is
    than the slowest of all."""
    own = [rates[host - 1] for host in members if host]
    if not own:
        return link
    return replace(link, bytes_per_second=link.bytes_per_second * min(own) / min(rates))


def over(links: Mapping[str, Link], link: Link) -> dict[str, Link]:
    """Where another link joins the ranks that share the batch."""
    return {**links, DATA: link, TENSOR: link}


def worth_trying(
    now_seconds: float,
    choices: Sequence[Alternative],
    *,
    most_bytes: float,
    coming_back_seconds: float = 0.0,
    num_ranks: int = 0,
) -> list[Alternative]:
    """The choices that gain enough beside what runs, the fastest first; none after the fastest that
    loses no accuracy. ``num_ranks`` take part now: with more of them, those that come back are
    brought up to date, and that is to be won back too."""
    found = []
    for choice in sorted(choices, key=lambda c: (c.way.seconds, c.way.nbytes)):
        least = (1 + LEAST_GAIN) * choice.way.seconds
        if len(choice.ranks) > num_ranks:
            least += coming_back_seconds / _PAID_BACK_IN
        if now_seconds >= least and choice.way.nbytes <= most_bytes:
            found.append(choice)
            if not choice.is_lossy:
                break
    if found and not found[-1].is_lossy:
        exact = found[-1].way.seconds
        found = [c for c in found if not c.is_lossy or exact >= (1 + LEAST_GAIN) * c.way.seconds]
    return found


def _kept(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.trade not in LAYOUT_TRADES)
