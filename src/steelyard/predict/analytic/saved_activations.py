"""Saved activations of a captured step of a few equal blocks.

These are values that the forward pass makes and the backward pass reads. Not for the other costs
of a section: see sections.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from steelyard.ir.graph import Graph, Node, Phase, Tensor
from steelyard.ir.model_blocks import ActivationPolicy
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.rule import CallSite, spot_of
from steelyard.predict.analytic.node_assignment import NodeAssignment, assign_nodes


class SavedActivations:
    def __init__(self, graph: Graph, layout: ParallelLayout, assigned: NodeAssignment) -> None:
        self._graph, self._layout, self._assigned = graph, layout, assigned
        self._input_storages = {t.storage for node in graph.inputs() for t in node.outputs}
        self.maker: dict[int, Node] = {}
        for node in graph.nodes:
            for tensor in node.outputs:
                self.maker.setdefault(tensor.storage, node)

    def nbytes(self, region: Callable[[Node], str]) -> dict[str, int]:
        """Return the bytes of saved activations of each section.

        Values made within a region are recomputed for readers in the same region.
        """
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for tensor, maker in self._read_later(region):
            whole = self._graph.storages[tensor.storage].nbytes
            nbytes = min(whole, tensor.nbytes) if self._layout.draws_parts else whole
            mine = found[self._assigned.section_of[maker.name]]
            mine[tensor.storage] = max(mine.get(tensor.storage, 0), nbytes)
        return {name: sum(each.values()) for name, each in found.items()}

    def calls(self, section: str) -> Iterator[CallSite]:
        """Yield the calls that make the saved activations of a section.

        The assignment's recomputed calls are left out.
        """
        storages = {
            tensor.storage
            for tensor, maker in self._read_later(lambda node: self._assigned.region_of[node.name])
            if self._assigned.section_of[maker.name] == section
        }
        for node in self._graph.forward():
            spot = spot_of(self._graph, node)
            mine = {tensor.storage for tensor in node.outputs} & storages
            if spot is not None and mine:
                storages -= mine
                yield spot

    def _read_later(self, region: Callable[[Node], str]) -> Iterator[tuple[Tensor, Node]]:
        """Yield each saved tensor, with the node that made it."""
        for node in self._graph.nodes:
            if node.is_input or node.is_free:
                continue
            within = region(node)
            # In the forward pass, only nodes that are recomputed read saved values.
            if node.phase is Phase.FORWARD and not within:
                continue
            for tensor, maker in self._made_forward(node):
                made_within = region(maker)
                if made_within and made_within == within:
                    continue
                # It is recomputed for the backward pass of its own block, and saved only for other
                # blocks.
                of_block = (
                    self._assigned.section_of[node.name] == (self._assigned.section_of[maker.name])
                )
                if made_within in self._assigned.calls and of_block:
                    continue
                # It is gathered again for any reader in the backward pass.
                if made_within in self._assigned.gatherings and node.phase is not Phase.FORWARD:
                    continue
                yield tensor, maker

    def _made_forward(self, node: Node) -> Iterator[tuple[Tensor, Node]]:
        """Yield the inputs of ``node`` that the forward pass made, with the nodes that made
        them.
        """
        for source in node.inputs:
            for tensor in self._graph.by_name[source].outputs:
                maker = self.maker[tensor.storage]
                if maker.phase is Phase.FORWARD and tensor.storage not in self._input_storages:
                    yield tensor, maker


def saved_calls(
    graph: Graph, policy: ActivationPolicy, *, blocks: str, first: int
) -> tuple[CallSite, ...]:
    """Return the calls whose results the middle block saves, by module of the model.

    ``blocks`` and ``first`` are as in ``assign_nodes``.
    """
    assigned = assign_nodes(graph, ALONE, policy, blocks=blocks, first=first)
    return tuple(SavedActivations(graph, ALONE, assigned).calls(assigned.middle))
