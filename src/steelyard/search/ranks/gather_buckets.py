"""How weights that lie in shares may be gathered: so many bytes of them at once, and how far ahead.

Not for which lie in shares, nor for what it costs: see layout_search.py and predict/.
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, path_matches
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.rule import WITHIN_PEAK, Rule

_BUCKETS = tuple(2**10 * kib for kib in (64, 256, 1024, 4096, 16384, 65536))
# So many operators, where what is there anyway leaves room.
_AHEAD = 16


def together(graph: Graph, states: Sequence[Rule]) -> list[tuple[Rule, ...]]:
    """Each weight by itself, and with more and more of them at once, up to all or as much as is
    held for one exchange."""
    sizes = sorted(
        node.outputs[0].nbytes
        for node in graph.inputs()
        if node.name.startswith(WEIGHT)
        and any(path_matches(node.name.removeprefix(WEIGHT), rule.module) for rule in states)
    )
    whole, two = sum(sizes), sum(sizes[:2])
    within = [nbytes for nbytes in _BUCKETS if two <= nbytes < whole]
    enough = [nbytes for nbytes in _BUCKETS if nbytes >= whole][: len(sizes) > 1]
    return [
        tuple(replace(rule, bucket_bytes=nbytes) for rule in states)
        for nbytes in (0, *within, *enough)
    ]


def ahead(rules: Sequence[Rule], *, is_alike: bool) -> tuple[Rule, ...]:
    """Sent ahead. Ranks that hold unequally much would find room in different places, and have to
    exchange in the same order."""
    within = WITHIN_PEAK if is_alike else ""
    return tuple(
        replace(rule, lead=_AHEAD, op=within) if rule.trade == "overlap" else rule for rule in rules
    )
