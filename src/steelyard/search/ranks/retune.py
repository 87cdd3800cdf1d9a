"""Alternative layouts for a running step whose links have changed speed.

Either all ranks continue with other gradient communication, or a subset that includes rank 0
continues without gradient compression. Every rank holds the whole model in either case. Not for
deciding to switch: see api/replan.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.hardware.link import Link
from steelyard.ir.gradient_codec import Codec
from steelyard.ir.parallel_layout import ALONE, DATA, TENSOR, ParallelLayout
from steelyard.ir.rule import BETWEEN_RANKS, Rule, of_kind
from steelyard.ir.rule_kinds import BatchSharding, GradientCompression, StateSharding
from steelyard.search.ranks.gradient_compression import Weighing
from steelyard.search.ranks.layout_candidates import LayoutCandidate
from steelyard.search.ranks.layout_search import LayoutSearch

# Minimum gain for a switch, and minimum gain of a lossy alternative over every lossless one.
LEAST_GAIN = 0.10
# Ranks that return receive the weights and the optimizer state. The gain must repay this transfer
# within this many steps.
_MAX_REPAY_STEPS = 100
# With more hosts than this, not every number of hosts is tried, because each needs a capture.
_FEW_HOSTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout with which to continue, on the ranks that take part."""

    candidate: LayoutCandidate
    ranks: tuple[int, ...]

    @property
    def is_lossy(self) -> bool:
        return bool(of_kind(self.candidate.rules, GradientCompression))


def why_no_alternative(rules: Sequence[Rule]) -> str:
    """Return why the gradient communication cannot be changed, or '' if it can."""
    layout = ParallelLayout.of(rules)
    if layout == ALONE:
        return "a single rank sends no gradients"
    is_shared = layout == ParallelLayout(data=layout.data, shares=layout.shares)
    if not is_shared or of_kind(rules, StateSharding):
        return "ranks hold shards of the model"
    return ""


def compressed_alternatives(
    layouts: LayoutSearch, rules: Sequence[Rule], codecs: Collection[Codec]
) -> tuple[tuple[Rule, ...], ...]:
    """Return the rules of the fastest step of this layout for each gradient codec."""
    layouts.layouts = [ParallelLayout.of(rules)]
    compressed, _ = Weighing(layouts=layouts, codecs=codecs).fastest(thoroughly=False)
    return tuple(candidate.rules for candidate in compressed)


def alternatives(
    layouts: LayoutSearch, rules: Sequence[Rule], compressed: Sequence[tuple[Rule, ...]]
) -> Iterator[LayoutCandidate]:
    """Yield every gradient communication for the layout of ``rules``, with all other rules applied.

    The rules in ``compressed`` are the compressed alternatives.
    """
    other_rules = _other_rules(rules)
    plain = (
        candidate.rules
        for candidate in layouts.candidates.of(ParallelLayout.of(rules))
        if not of_kind(candidate.rules, StateSharding)
    )
    for own_rules in (*plain, *compressed):
        yield layouts.candidates.counted(at_once((*own_rules, *other_rules)))


def at_once(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules with gradient compression from the first step on, without a warm-up.

    Uncompressed steps would be the slowest of the run.
    """
    from_first_step = (
        replace(rule, warm_up=0) if isinstance(rule, GradientCompression) else rule
        for rule in rules
    )
    return tuple(sorted(from_first_step))


def on_fewer(layouts: LayoutSearch, rules: Sequence[Rule], ranks: int) -> Iterator[LayoutCandidate]:
    """Yield the candidates on ``ranks`` ranks, with equal shares and uncompressed gradients."""
    other_rules = _other_rules(rules)
    for candidate in layouts.candidates.of(ParallelLayout(data=ranks)):
        if not of_kind(candidate.rules, StateSharding):
            yield layouts.candidates.counted(tuple(sorted((*candidate.rules, *other_rules))))


def same_on_fewer(layouts: LayoutSearch, rules: Sequence[Rule], ranks: int) -> LayoutCandidate:
    """Return the same layout on ``ranks`` ranks, with equal shares and uncompressed gradients."""
    own_rules = _other_rules(rules)
    if ranks > 1:
        exact = (rule for rule in rules if not isinstance(rule, GradientCompression))
        own_rules = tuple(
            replace(rule, ranks=ranks, shares=()) if isinstance(rule, BatchSharding) else rule
            for rule in exact
        )
    return layouts.candidates.counted(tuple(sorted(own_rules)))


def numbers_of_hosts(hosts: int) -> tuple[int, ...]:
    """Return the host counts below ``hosts`` with which a step may continue."""
    if hosts <= _FEW_HOSTS:
        return tuple(range(1, hosts))
    return tuple(sorted({1, hosts // 2, hosts - 1}))


def best_hosts(rates: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the first host and the ``count - 1`` hosts with the fastest links to it.

    ``rates`` are the link rates of the other hosts, in their order.
    """
    order = sorted(range(1, len(rates) + 1), key=lambda host: (-rates[host - 1], host))
    return tuple(sorted((0, *order[: count - 1])))


def link_among(link: Link, rates: Sequence[float], members: Sequence[int]) -> Link:
    """Return the link among some of the hosts.

    Its bandwidth is that of the link of all hosts, times the slowest rate among ``members`` divided
    by the slowest rate of all.
    """
    own_rates = [rates[host - 1] for host in members if host]
    if not own_rates:
        return link
    return replace(link, bytes_per_second=link.bytes_per_second * min(own_rates) / min(rates))


def over(links: Mapping[str, Link], link: Link) -> dict[str, Link]:
    """Return the links, with ``link`` for the data and tensor axes."""
    return {**links, DATA: link, TENSOR: link}


def worth_trying(
    now_seconds: float,
    choices: Sequence[Alternative],
    *,
    most_bytes: float,
    coming_back_seconds: float = 0.0,
    num_ranks: int = 0,
) -> list[Alternative]:
    """Return the choices that gain enough over the running step, fastest first.

    The list ends with the fastest lossless choice. ``num_ranks`` ranks take part now. A choice with
    more ranks must also repay ``coming_back_seconds``, the time to transfer the state to returning
    ranks.
    """
    found = []
    for choice in sorted(choices, key=lambda c: (c.candidate.seconds, c.candidate.nbytes)):
        min_now_seconds = (1 + LEAST_GAIN) * choice.candidate.seconds
        if len(choice.ranks) > num_ranks:
            min_now_seconds += coming_back_seconds / _MAX_REPAY_STEPS
        if now_seconds >= min_now_seconds and choice.candidate.nbytes <= most_bytes:
            found.append(choice)
            if not choice.is_lossy:
                break
    if found and not found[-1].is_lossy:
        exact = found[-1].candidate.seconds
        found = [
            c for c in found if not c.is_lossy or exact >= (1 + LEAST_GAIN) * c.candidate.seconds
        ]
    return found


def _other_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.stage not in BETWEEN_RANKS)
