"""The sections of a captured step of a few equal blocks: one block, and the code around the blocks.

A block's saved activations are the values that it makes and the backward pass reads. The neighbours
of the middle block show what it passes on. Not for a whole step: see step.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Graph, Node, Phase, Role, Tensor
from steelyard.ir.model_blocks import SAVE_ALL, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.fusion import unfused
from steelyard.predict.analytic.node_assignment import NodeAssignment, assign_nodes
from steelyard.predict.analytic.roofline import kernel_seconds
from steelyard.predict.analytic.saved_activations import SavedActivations
from steelyard.predict.cost_table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The seconds of one micro-batch in a section, including all exchanges, and its bytes.

    ``saved_bytes`` are the saved activations. ``recompute_bytes`` are the activations that
    recomputation restores. ``peak_bytes`` is the peak if the backward pass directly follows the
    forward pass. ``offloaded_bytes`` are the saved activations in host memory. ``parameters`` are
    names and numbers of elements.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    exchange_seconds: float
    exchanged_bytes: int
    flops: int
    saved_bytes: int
    recompute_bytes: int
    peak_bytes: int
    parameters: tuple[tuple[str, int], ...]
    offloaded_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.recompute_seconds + self.backward_seconds

    @property
    def num_parameters(self) -> int:
        return sum(numel for _, numel in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """All sections of a step; ``stream_bytes`` is the size of what one block passes to the next."""

    before: Section
    block: Section
    after: Section
    stream_bytes: int


def sections(
    graph: Graph,
    costs: CostTable,
    layout: ParallelLayout,
    policy: ActivationPolicy = SAVE_ALL,
    *,
    blocks: str,
    first: int = 0,
    stack: SoftwareStack | None = None,
    assigned: NodeAssignment | None = None,
) -> Sections:
    """Return the sections of a captured step.

    ``blocks`` and ``first`` are as in ``assign_nodes``, whose result may be passed as ``assigned``,
    since it is the same for any number of samples. Without a software ``stack``, each call takes
    the time given by ``costs``.
    """
    assigned = assigned or assign_nodes(graph, layout, policy, blocks=blocks, first=first)
    work = _SplitSections(graph, costs, layout, policy, assigned, stack)
    return Sections(
        before=work.section("before"),
        block=work.section(assigned.middle),
        after=work.section("after"),
        stream_bytes=work.stream_bytes(),
    )


class _SplitSections:
    def __init__(
        self,
        graph: Graph,
        costs: CostTable,
        layout: ParallelLayout,
        policy: ActivationPolicy,
        assigned: NodeAssignment,
        stack: SoftwareStack | None,
    ) -> None:
        self._graph, self._costs, self._layout = graph, costs, layout
        self._assigned, self._section_of = assigned, assigned.section_of
        self._input_storages = {t.storage for node in graph.inputs() for t in node.outputs}
        saved = SavedActivations(graph, layout, assigned)
        self._maker = saved.maker
        self._saved_bytes = self._plain_bytes = saved.nbytes(self._region)
        if policy.recomputes:
            self._plain_bytes = saved.nbytes(lambda _: "")
        self._kernel_seconds = self._kernel_times(stack)
        self._overlaps = stack is not None and stack.overlaps_tensor

    def section(self, name: str) -> Section:
        mine = [
            n for n in self._graph.nodes if self._section_of.get(n.name) == name and not n.is_input
        ]
        forward = [n for n in mine if n.phase is Phase.FORWARD]
        backward = [n for n in mine if n.phase is not Phase.FORWARD]
        recomputed = [n for n in forward if self._region(n)]
        exchanged = [n.collective for n in (*mine, *recomputed) if n.collective is not None]
        kept, plain = self._saved_bytes.get(name, 0), self._plain_bytes.get(name, 0)
        return Section(
            forward_seconds=self._seconds(forward),
            backward_seconds=self._seconds(backward) - self._hidden_seconds(backward, recomputed),
            recompute_seconds=self._seconds(recomputed),
            exchange_seconds=sum(self._costs.exchange_seconds(c).value for c in exchanged),
            exchanged_bytes=sum(c.sent_bytes for c in exchanged),
            flops=sum(n.flops for n in (*mine, *recomputed)),
            saved_bytes=kept,
            recompute_bytes=max(0, plain - kept),
            peak_bytes=self._peak_bytes(mine),
            parameters=self._parameters(mine),
        )

    def stream_bytes(self) -> int:
        """Return the bytes of the middle block that the forward pass of the next block reads."""
        crossing = {
            tensor.storage: tensor.nbytes
            for node in self._graph.forward()
            if self._section_of.get(node.name) == self._assigned.following
            for name in node.inputs
            for tensor in self._made(name, self._assigned.middle)
        }
        return sum(crossing.values())

    def _region(self, node: Node) -> str:
        """Return the module or block together with which a node is recomputed, or an empty
        string.
        """
        return self._assigned.region_of[node.name]

    def _peak_bytes(self, mine: Sequence[Node]) -> int:
        """Return the peak bytes of these calls' results; each is freed after its last reader
        here.
        """
        names = {node.name for node in mine}
        last: dict[int, int] = {}
        for place, node in enumerate(mine):
            for name in (node.name, *node.inputs):
                for storage in self._graph.storages_of(name):
                    if self._maker[storage].name in names:
                        last[storage] = place
        nbytes, peak, live = 0, 0, set[int]()
        for place, node in enumerate(mine):
            new = set(self._graph.storages_of(node.name)) & last.keys() - live
            live |= new
            nbytes += sum(self._graph.storages[s].nbytes for s in new)
            peak = max(peak, nbytes)
            freed = {s for s in live if last[s] == place}
            live -= freed
            nbytes -= sum(self._graph.storages[s].nbytes for s in freed)
        return peak

    def _made(self, value: str, section: str) -> Iterable[Tensor]:
        """Yield the tensors of a value that the forward pass of a section made."""
        for tensor in self._graph.by_name[value].outputs:
            maker = self._maker[tensor.storage]
            mine = self._section_of.get(maker.name) == section and maker.phase is Phase.FORWARD
            if mine and tensor.storage not in self._input_storages:
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

    def _hidden_seconds(self, backward: Sequence[Node], recomputed: Sequence[Node]) -> float:
        """Return the seconds of exchanges that overlap with products of the backward pass.

        Only products for weight gradients overlap with them; these are half of all products.
        """
        if not self._overlaps:
            return 0.0
        added = [
            n for n in backward if n.collective and n.collective.kind is not Exchange.ALL_GATHER
        ]
        gathered = [
            n for n in recomputed if n.collective and self._region(n) in self._assigned.gatherings
        ]
        found = [n.collective for n in (*added, *gathered) if n.collective is not None]
        exchanging = sum(self._costs.exchange_seconds(c).value for c in found)
        products = sum(self._kernel_seconds.get(n.name, 0.0) for n in backward if n.flops)
        return min(exchanging, products / 2)

    def _kernel_times(self, stack: SoftwareStack | None) -> dict[str, float]:
        """Return the seconds of each kernel, by the name of its first call."""
        fuses = stack is not None and stack.fuses
        kernels = (
            self._assigned.fusing.kernels(self._graph) if fuses else unfused(self._graph.nodes)
        )
        found = {k.nodes[0].name: kernel_seconds(k, self._costs, stack) for k in kernels}
        if self._layout.draws_parts:
            # A random kernel writes its values only if it is not fused, and each rank draws only
            # its part.
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
