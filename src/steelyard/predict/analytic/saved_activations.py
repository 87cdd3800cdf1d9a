"""What the forward pass of a captured step of a few equal blocks makes and the backward pass reads.

Not for what else a section takes: see sections.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.ir.graph import Graph, Node, Phase, Tensor
from steelyard.ir.rule import CallSite, spot_of
from steelyard.predict.analytic.node_assignment import NodeAssignment, belonging


class SavedActivations:
    def __init__(self, graph: Graph, layout: ClusterLayout, belongs: NodeAssignment) -> None:
        self._graph, self._layout, self._belongs = graph, layout, belongs
        self._given = {t.storage for node in graph.inputs() for t in node.outputs}
        self.maker: dict[int, Node] = {}
        for node in graph.nodes:
            for tensor in node.outputs:
                self.maker.setdefault(tensor.storage, node)

    def nbytes(self, region: Callable[[Node], str]) -> dict[str, int]:
        """Of each section, where what is made within a region is there again for that."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for tensor, maker in self._read_later(region):
            whole = self._graph.storages[tensor.storage].nbytes
            nbytes = min(whole, tensor.nbytes) if self._layout.draws_parts else whole
            mine = found[self._belongs.section_of[maker.name]]
            mine[tensor.storage] = max(mine.get(tensor.storage, 0), nbytes)
        return {name: sum(each.values()) for name, each in found.items()}

    def calls(self, section: str) -> Iterator[CallSite]:
        """That make what a section keeps, as the layout says what is made again."""
        storages = {
            tensor.storage
            for tensor, maker in self._read_later(lambda node: self._belongs.region_of[node.name])
            if self._belongs.section_of[maker.name] == section
        }
        for node in self._graph.forward():
            spot = spot_of(self._graph, node)
            mine = {tensor.storage for tensor in node.outputs} & storages
            if spot is not None and mine:
                storages -= mine
                yield spot

    def _read_later(self, region: Callable[[Node], str]) -> Iterator[tuple[Tensor, Node]]:
        """Each tensor that has to stay, and what made it."""
        for node in self._graph.nodes:
            if node.is_input or node.is_free:
                continue
            within = region(node)
            # In the forward pass only what is computed again reads what has to stay.
            if node.phase is Phase.FORWARD and not within:
                continue
            for tensor, maker in self._made_forward(node):
                made_within = region(maker)
                if made_within and made_within == within:
                    continue
                # Made anew for the backward pass of its own block; others find what it handed on.
                of_block = (
                    self._belongs.section_of[node.name] == (self._belongs.section_of[maker.name])
                )
                if made_within in self._belongs.calls and of_block:
                    continue
                # Gathered anew for whatever reads it then.
                if made_within in self._belongs.gatherings and node.phase is not Phase.FORWARD:
                    continue
                yield tensor, maker

    def _made_forward(self, node: Node) -> Iterator[tuple[Tensor, Node]]:
        """What of its inputs some call of the forward pass made, and which."""
        for source in node.inputs:
            for tensor in self._graph.by_name[source].outputs:
                maker = self.maker[tensor.storage]
                if maker.phase is Phase.FORWARD and tensor.storage not in self._given:
                    yield tensor, maker


def kept_calls(
    graph: Graph, layout: ClusterLayout, *, blocks: str, first: int
) -> tuple[CallSite, ...]:
    """Of the middle block, by modules of the model; ``blocks`` and ``first`` as in belonging."""
    belongs = belonging(graph, layout, blocks=blocks, first=first)
    return tuple(SavedActivations(graph, layout, belongs).calls(belongs.middle))
