"""What of a block is worth computing again: sets of its calls, from the least kept to the fastest.

A minimum cut at each of many prices of a byte, through three blocks that all choose alike; read off
the middle one. Not for how many blocks choose which: see policy_mixture.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from steelyard.ir.cluster_layout import Blocks
from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, spot_of
from steelyard.predict.analytic.node_assignment import MIDDLE
from steelyard.predict.cost_table import CostTable
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.min_cut import MinCut

# Of a second for each byte, from where nothing is worth it to where everything is.
_PRICES = np.geomspace(1e-14, 1e-8, 25)


def recompute_sets(
    graph: Graph, costs: CostTable, blocks: Blocks, *, values: Iterable[str]
) -> tuple[tuple[CallSite, ...], ...]:
    """By modules inside a block, as `again` of a layout takes them; none first. ``values`` are
    what can be computed again of the graph."""
    if not blocks.count:
        return ((),)
    program = Program.plain(graph)
    tally = FastEstimator(program, costs, values)
    found: dict[tuple[CallSite, ...], None] = {(): None}
    if tally.unit_of:
        cut = MinCut(tally)
        nbytes = np.array([tally.nbytes[s] for s in cut.kept], dtype=np.float64)
        for price in _PRICES:
            again = cut.solve(nbytes * price).again
            found[tuple(sorted(_inside(graph, tally, blocks, again), key=str))] = None
    return tuple(found)


def _inside(
    graph: Graph, tally: FastEstimator, blocks: Blocks, again: frozenset[int]
) -> Iterator[CallSite]:
    """But for what the block hands on: made again, it would need the block before it made again,
    and so on to the first."""
    head = f"{blocks.path}.{blocks.first + MIDDLE}"
    handed_on = {
        storage
        for node in graph.nodes
        if node.path != head and not node.path.startswith(f"{head}.")
        for name in node.inputs
        for storage in graph.storages_of(name)
    }
    for storage in again - handed_on:
        spot = spot_of(graph, graph.by_name[tally.value_on[storage]])
        if spot is not None and (spot.module == head or spot.module.startswith(f"{head}.")):
            yield replace(spot, module=spot.module[len(head) + 1 :])
