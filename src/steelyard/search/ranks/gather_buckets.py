"""The candidates for gathering ZeRO-style sharded weights: bucket size and prefetch distance.

Not for choosing the sharded weights or pricing a gather: see layout_search.py and predict/.
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, path_matches
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import WITHIN_PEAK, CollectiveOverlap, StateSharding

_BUCKET_BYTES = tuple(2**10 * kib for kib in (64, 256, 1024, 4096, 16384, 65536))
# The number of operators by which a gather is issued early, if the memory below the peak has room
# for it.
_MAX_LEAD = 16


def with_gather_buckets(
    graph: Graph, states: Sequence[StateSharding]
) -> list[tuple[StateSharding, ...]]:
    """Return the rules of ``states`` for each bucket size that is worth trying.

    The first rules gather every weight on its own. The last ones gather all weights in one bucket,
    or as many as fit into the largest bucket.
    """
    sizes = sorted(
        node.outputs[0].nbytes
        for node in graph.inputs()
        if node.name.startswith(WEIGHT)
        and any(path_matches(node.name.removeprefix(WEIGHT), rule.parameter) for rule in states)
    )
    all_bytes, smallest_bucket = sum(sizes), sum(sizes[:2])
    partial_buckets = [nbytes for nbytes in _BUCKET_BYTES if smallest_bucket <= nbytes < all_bytes]
    full_buckets = [nbytes for nbytes in _BUCKET_BYTES if nbytes >= all_bytes][: len(sizes) > 1]
    return [
        tuple(replace(rule, bucket=nbytes) for rule in states)
        for nbytes in (0, *partial_buckets, *full_buckets)
    ]


def with_prefetch(rules: Sequence[Rule], *, has_equal_shares: bool) -> tuple[Rule, ...]:
    """Return the rules with collectives issued ahead of their readers.

    With equal shares of the batch, the prefetch stays within the peak memory. Ranks with unequal
    shares would find room at different operators, but all ranks must issue their collectives in
    the same order.
    """
    bound = WITHIN_PEAK if has_equal_shares else ""
    return tuple(
        replace(rule, ahead=_MAX_LEAD, within=bound)
        if isinstance(rule, CollectiveOverlap)
        else rule
        for rule in rules
    )
