"""A captured step of a few equal blocks, told apart: what one block takes, and what is around them.

A block's kept bytes are what it makes and the backward pass reads; the blocks before and after the
middle one say what it hands on. Not for a whole step of many blocks: see step.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Graph, Node, Phase, Role, Tensor
from steelyard.predict.analytic.fusion import unfused
from steelyard.predict.analytic.node_assignment import NodeAssignment, belonging
from steelyard.predict.analytic.roofline import kernel_seconds
from steelyard.predict.analytic.saved_activations import SavedActivations
from steelyard.predict.cost_table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Seconds of one micro-batch with all exchanges in them, and bytes; ``parameters`` are names
    and elements. ``again_bytes`` is what is there again, and was not kept, when what is computed
    again has been; ``peak_bytes`` the most that is there at once if both passes follow each other;
    ``far_bytes`` what is kept in the memory of the host.
    """

    forward_seconds: float
    backward_seconds: float
    again_seconds: float
    exchange_seconds: float
    exchanged_bytes: int
    flops: int
    kept_bytes: int
    again_bytes: int
    peak_bytes: int
    parameters: tuple[tuple[str, int], ...]
    far_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.again_seconds + self.backward_seconds

    @property
    def num_parameters(self) -> int:
        return sum(numel for _, numel in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """``stream_bytes`` is what one block hands to the next."""

    before: Section
    block: Section
    after: Section
    stream_bytes: int


def sections(
    graph: Graph,
    costs: CostTable,
    layout: ClusterLayout,
    *,
    blocks: str,
    first: int = 0,
    stack: SoftwareStack | None = None,
    belongs: NodeAssignment | None = None,
) -> Sections:
    """``blocks`` and ``first`` as in ``belonging``, which is found anew unless it is given: that of
    the same graph at any number of samples. Without a ``stack``, each call takes what the costs say
    of it.
    """
    belongs = belongs or belonging(graph, layout, blocks=blocks, first=first)
    work = _SplitSections(graph, costs, layout, belongs, stack)
    return Sections(
        before=work.section("before"),
        block=work.section(belongs.middle),
        after=work.section("after"),
        stream_bytes=work.stream_bytes(),
    )


class _SplitSections:
    def __init__(
        self,
        graph: Graph,
        costs: CostTable,
        layout: ClusterLayout,
        belongs: NodeAssignment,
        stack: SoftwareStack | None,
    ) -> None:
        self._graph, self._costs, self._layout = graph, costs, layout
        self._belongs, self._of = belongs, belongs.section_of
        self._given = {t.storage for node in graph.inputs() for t in node.outputs}
        kept = SavedActivations(graph, layout, belongs)
        self._maker = kept.maker
        self._kept = self._plain = kept.nbytes(self._region)
        if layout.again:
            self._plain = kept.nbytes(lambda _: "")
        self._kernel_seconds = self._priced(stack)
        self._overlaps = stack is not None and stack.overlaps_tensor

    def section(self, name: str) -> Section:
        mine = [n for n in self._graph.nodes if self._of.get(n.name) == name and not n.is_input]
        forward = [n for n in mine if n.phase is Phase.FORWARD]
        backward = [n for n in mine if n.phase is not Phase.FORWARD]
        again = [n for n in forward if self._region(n)]
        exchanged = [n.collective for n in (*mine, *again) if n.collective is not None]
        kept, plain = self._kept.get(name, 0), self._plain.get(name, 0)
        return Section(
            forward_seconds=self._seconds(forward),
            backward_seconds=self._seconds(backward) - self._hidden_seconds(backward, again),
            again_seconds=self._seconds(again),
            exchange_seconds=sum(self._costs.exchange_seconds(c).value for c in exchanged),
            exchanged_bytes=sum(c.sent_bytes for c in exchanged),
            flops=sum(n.flops for n in (*mine, *again)),
            kept_bytes=kept,
            again_bytes=max(0, plain - kept),
            peak_bytes=self._peak_bytes(mine),
            parameters=self._parameters(mine),
        )

    def stream_bytes(self) -> int:
        """What later blocks read of the middle one's in the forward pass."""
        crossing = {
            tensor.storage: tensor.nbytes
            for node in self._graph.forward()
            if self._of.get(node.name) == self._belongs.following
            for name in node.inputs
            for tensor in self._made(name, self._belongs.middle)
        }
        return sum(crossing.values())

    def _region(self, node: Node) -> str:
        """What a node of a block is computed again with: its module, or the block."""
        return self._belongs.region_of[node.name]

    def _peak_bytes(self, mine: Sequence[Node]) -> int:
        """Of what these calls make, each until the last of them has read it."""
        names = {node.name for node in mine}
        last: dict[int, int] = {}
        for place, node in enumerate(mine):
            for name in (node.name, *node.inputs):
                for storage in self._graph.storages_of(name):
                    if self._maker[storage].name in names:
                        last[storage] = place
        held, most, there = 0, 0, set[int]()
        for place, node in enumerate(mine):
            new = set(self._graph.storages_of(node.name)) & last.keys() - there
            there |= new
            held += sum(self._graph.storages[s].nbytes for s in new)
            most = max(most, held)
            gone = {s for s in there if last[s] == place}
            there -= gone
            held -= sum(self._graph.storages[s].nbytes for s in gone)
        return most

    def _made(self, value: str, section: str) -> Iterable[Tensor]:
        """What of a value a section's forward pass made."""
        for tensor in self._graph.by_name[value].outputs:
            maker = self._maker[tensor.storage]
            mine = self._of.get(maker.name) == section and maker.phase is Phase.FORWARD
            if mine and tensor.storage not in self._given:
                yield tensor

    def _parameters(self, nodes: Iterable[Node]) -> tuple[tuple[str, int], ...]:
        by_name, storages = self._graph.by_name, self._graph.storages
        read = dict.fromkeys(name for node in nodes for name in node.inputs)
        return tuple(
            (name, by_name[name].outputs[0].numel)
            for name in read
            if by_name[name].is_input
            and storages[by_name[name].outputs[0].storage].role is Role.PARAMETER
        )

    def _hidden_seconds(self, backward: Sequence[Node], again: Sequence[Node]) -> float:
        """Of exchanges: no more than what half of the products take, those of the weights."""
        if not self._overlaps:
            return 0.0
        added = [
            n for n in backward if n.collective and n.collective.kind is not Exchange.ALL_GATHER
        ]
        gathered = [
            n for n in again if n.collective and self._region(n) in self._belongs.gatherings
        ]
        found = [n.collective for n in (*added, *gathered) if n.collective is not None]
        exchanging = sum(self._costs.exchange_seconds(c).value for c in found)
        products = sum(self._kernel_seconds.get(n.name, 0.0) for n in backward if n.flops)
        return min(exchanging, products / 2)

    def _priced(self, stack: SoftwareStack | None) -> dict[str, float]:
        """By the first call of each kernel."""
        fuses = stack is not None and stack.fuses
        kernels = self._belongs.fusing.kernels(self._graph) if fuses else unfused(self._graph.nodes)
        found = {k.nodes[0].name: kernel_seconds(k, self._costs, stack) for k in kernels}
        if self._layout.draws_parts:
            # Drawn on its own it is written whole; fused with what reads it, never.
            alone = (k.nodes[0] for k in kernels if len(k.nodes) == 1)
            found |= {n.name: found[n.name] / self._layout.tensor for n in alone if n.is_random}
        return found

    def _seconds(self, nodes: Iterable[Node]) -> float:
        total = 0.0
        for node in nodes:
            total += self._kernel_seconds.get(node.name, 0.0)
            if node.collective is not None:
                total += self._costs.exchange_seconds(node.collective).value
        return total
