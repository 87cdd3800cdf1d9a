"""How else a step that runs could send its gradients: what stays as it is, and what is fastest.

Ranks hold what they hold; only in which codes gradients go, how many at once and how late they are
waited for may change. Not for whether it is worth it: see api/adapting.py.
"""

from collections.abc import Collection, Iterator, Sequence

from steelyard.core.codec import CODE_TRADES, Codec
from steelyard.core.layout import ALONE, Layout
from steelyard.core.rules import Rule
from steelyard.search.coded import Weighing
from steelyard.search.layouts import Layouts
from steelyard.search.ways import Way

_SENT = frozenset({"shard_batch", "overlap", "sparse_gradients", *CODE_TRADES})
_STATES = "shard_states"


def why_not_otherwise(rules: Sequence[Rule]) -> str:
    """Empty where another way to send gradients can take this one's place."""
    layout = Layout.of(rules)
    if layout == ALONE:
        return "one rank has nobody to send gradients to"
    is_shared = layout == Layout(batch=layout.batch, shares=layout.shares)
    if not is_shared or any(rule.trade == _STATES for rule in rules):
        return "ranks hold parts of the model"
    return ""


def otherwise(
    layouts: Layouts, rules: Sequence[Rule], codecs: Collection[Codec], *, most_bytes: float
) -> tuple[Way, list[Way]]:
    """The step as it is, and what is faster, the fastest first."""
    layout = Layout.of(rules)
    layouts.layouts = [layout]
    kept = tuple(rule for rule in rules if rule.trade not in _SENT)
    now = layouts.ways.counted(tuple(sorted(rules)))
    ways = (layouts.ways.counted(tuple(sorted((*own, *kept)))) for own in _sent(layouts, codecs))
    faster = (way for way in ways if way.seconds < now.seconds and way.nbytes <= most_bytes)
    return now, sorted(faster, key=lambda way: (way.seconds, way.nbytes))


def _sent(layouts: Layouts, codecs: Collection[Codec]) -> Iterator[tuple[Rule, ...]]:
    (layout,) = layouts.layouts
    for way in layouts.ways.of(layout):
        if not any(rule.trade == _STATES for rule in way.rules):
            yield way.rules
    coded, _ = Weighing(layouts=layouts, codecs=codecs).fastest(thoroughly=False)
    yield from (way.rules for way in coded)
