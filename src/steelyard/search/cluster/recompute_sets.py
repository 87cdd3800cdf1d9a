"""Finds the sets of calls in a block that are worth recomputing, from least memory to fastest step.

For each of many prices per byte, it solves a minimum cut through three blocks that make the same
choice, and takes the set of the middle block. Not for the number of blocks that use each set: see
policy_mixture.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import Blocks
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, spot_of
from steelyard.predict.analytic.node_assignment import MIDDLE
from steelyard.predict.cost_table import CostTable
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.min_cut import MinCut

# Seconds per byte; from the price at which nothing is recomputed to the price at which everything
# is.
_PRICES = np.geomspace(1e-14, 1e-8, 25)


def recompute_sets(
    graph: Graph, costs: CostTable, blocks: Blocks, *, values: Iterable[str]
) -> tuple[tuple[CallSite, ...], ...]:
    """Return the recompute sets, the empty one first, as module paths inside a block.

    ``values`` are the recomputable values of the graph.
    """
    if not blocks.count:
        return ((),)
    program = Program.plain(graph)
    estimator = FastEstimator(program, costs, values)
    found: dict[tuple[CallSite, ...], None] = {(): None}
    if estimator.unit_of:
        cut = MinCut(estimator)
        nbytes = np.array([estimator.nbytes[s] for s in cut.kept], dtype=np.float64)
        for price in _PRICES:
            recomputed = cut.solve(nbytes * price).recomputed
            found[tuple(sorted(_inside(graph, estimator, blocks, recomputed), key=str))] = None
    return tuple(found)


def _inside(
    graph: Graph, estimator: FastEstimator, blocks: Blocks, recomputed: frozenset[int]
) -> Iterator[CallSite]:
    """Yield the recomputed calls of the middle block, except the one that makes its output.

    Recomputing a block's output would require recomputing the previous block, and so on to the
    first one.
    """
    block_path = f"{blocks.path}.{blocks.first + MIDDLE}"
    outputs = {
        storage
        for node in graph.nodes
        if node.path != block_path and not node.path.startswith(f"{block_path}.")
        for name in node.inputs
        for storage in graph.storages_of(name)
    }
    for storage in recomputed - outputs:
        site = spot_of(graph, graph.by_name[estimator.value_on[storage]])
        if site is not None and (
            site.module == block_path or site.module.startswith(f"{block_path}.")
        ):
            yield replace(site, module=site.module[len(block_path) + 1 :])
