"""One training step of a deep model on a declared cluster, from the sections of a short capture.

A pipeline's ranks work for m micro-batches at the pace of the slowest, after the first has come
through: sum(T) + (m - 1) max(T), where of the sum all but the slowest is divided by the virtual
stages (Narayanan et al., SC 2021, section 2.2). Gradients follow at the end, or go on beside the
last backward pass. Not for programs that are run: see predict.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.core.cluster import Cluster
from steelyard.core.costs import Costs
from steelyard.core.deep_layout import DeepLayout, Formats
from steelyard.core.errors import BadInput
from steelyard.core.layout import TENSOR
from steelyard.core.stack import Stack
from steelyard.predict.carried import carried
from steelyard.predict.collectives import (
    Algorithm,
    Carried,
    all_gather,
    all_reduce,
    reduce_scatter,
    send,
)
from steelyard.predict.routes import Route, route
from steelyard.predict.sections import Section, Sections

_Exchange = Callable[[Route, int], tuple[Carried, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each rank of one stage of the pipeline, at its peak."""

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    workspace_bytes: int

    @property
    def nbytes(self) -> int:
        model = self.weight_bytes + self.gradient_bytes + self.state_bytes
        return model + self.activation_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepStep:
    """Seconds of the micro-batches through the pipeline, of exchanging what the data ranks share as
    far as nothing hides it, and of the optimizer; and what each stage holds.
    """

    pipeline_seconds: float
    exposed_seconds: float
    update_seconds: float
    stages: tuple[StageMemory, ...]

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.exposed_seconds + self.update_seconds

    @property
    def peak_bytes(self) -> int:
        return max(stage.nbytes for stage in self.stages)


def tensor_costs(cluster: Cluster, layout: DeepLayout) -> Costs:
    """The declared prices of calls, and of exchanges among the neighbours that share tensors."""
    found = carried(cluster.tree, axis=TENSOR, numbers=[layout.tensor]) if layout.tensor > 1 else {}
    return Costs(device=cluster.device, carried=found)


def deep_step(
    parts: Sections,
    cluster: Cluster,
    layout: DeepLayout,
    formats: Formats,
    *,
    num_blocks: int,
    stack: Stack | None = None,
) -> DeepStep:
    """``parts`` are those of one tensor rank, for one micro-batch, as ``stack`` computes them."""
    if layout.num_ranks > cluster.num_devices:
        raise BadInput(
            f"a layout of {layout.num_ranks} ranks on {cluster.num_devices} devices",
            expected="no more ranks than devices",
            remedy="declare a larger cluster, or lower a degree of the layout",
        )
    work = _Composed(parts, cluster, layout, formats, num_blocks, stack or Stack())
    seconds = [work.stage_seconds(stage) for stage in range(layout.pipeline)]
    slowest = max(seconds)
    filling = (sum(seconds) - slowest) / layout.virtual
    return DeepStep(
        pipeline_seconds=layout.micro_batches * slowest + filling,
        exposed_seconds=max(work.exposed_seconds(s) for s in range(layout.pipeline)),
        update_seconds=max(work.update_seconds(s) for s in range(layout.pipeline)),
        stages=tuple(work.memory(stage) for stage in range(layout.pipeline)),
    )


class _Composed:
    def __init__(
        self,
        parts: Sections,
        cluster: Cluster,
        layout: DeepLayout,
        formats: Formats,
        blocks: int,
        stack: Stack,
    ) -> None:
        self._parts, self._cluster, self._layout, self._formats = parts, cluster, layout, formats
        self._stack = stack
        self._bandwidth = stack.bandwidth_share * cluster.device.bytes_per_second
        self._blocks = [layout.blocks_of_stage(blocks, s) for s in range(layout.pipeline)]
        self._data = self._route(range(0, layout.data * layout.tensor, layout.tensor))
        self._hand_on_seconds = self._handing_seconds()

    def stage_seconds(self, stage: int) -> float:
        """One micro-batch, forward and back, with what it waits for its neighbours."""
        ends = sum(self._in_turn(part) for part in self._around(stage))
        return (
            self._blocks[stage] * self._in_turn(self._parts.block)
            + ends
            + 2 * self._layout.virtual * self._hand_on_seconds
        )

    def exposed_seconds(self, stage: int) -> float:
        """Gradients go once a step; with parts of the weights, they went block by block."""
        layout = self._layout
        if layout.data == 1 or layout.state_stage == 3:
            return self._shared_table_seconds()
        gradients = self._num_parameters(stage) * self._formats.gradient_bytes
        if layout.state_stage == 0:
            taken = all_reduce(self._data, gradients)[0].seconds
        else:
            weights = self._num_parameters(stage) * self._formats.weight_bytes
            taken = reduce_scatter(self._data, gradients)[0].seconds
            taken += all_gather(self._data, weights)[0].seconds
        if layout.overlaps:
            taken = max(0.0, taken - self._blocks[stage] * self._parts.block.backward_seconds)
        return taken + self._shared_table_seconds()

    def update_seconds(self, stage: int) -> float:
        """Gradients and weights once, state there and back, at the pace of the memory."""
        formats = self._formats
        each = formats.gradient_bytes + formats.weight_bytes + 2 * formats.state_bytes
        count = self._num_parameters(stage) / self._share(from_stage=1)
        return count * each / self._bandwidth

    def memory(self, stage: int) -> StageMemory:
        count, formats, block = self._num_parameters(stage), self._formats, self._parts.block
        around = sum(part.kept_bytes for part in self._around(stage))
        # Before its backward pass, a block that is computed again is there as it would have been;
        # before that, at the end of the model, what the loss is made of.
        again = max(0, block.plain_kept_bytes - block.kept_bytes) if self._layout.again else 0
        ending = sum(part.peak_bytes - part.kept_bytes for part in self._around(stage)[-1:])
        # Weights in parts are gathered for one block and for the one that follows it; those of
        # the ends for the whole step.
        gathered = 2 * block.num_parameters + self._num_around(stage)
        return StageMemory(
            weight_bytes=count * formats.weight_bytes // self._share(from_stage=3),
            gradient_bytes=count * formats.gradient_bytes // self._share(from_stage=2),
            state_bytes=count * formats.state_bytes // self._share(from_stage=1),
            activation_bytes=self._runs_alive(stage) * self._run_bytes(stage) + around,
            workspace_bytes=max(again, ending)
            + (gathered * formats.weight_bytes if self._layout.state_stage == 3 else 0),
        )

    def _in_turn(self, part: Section) -> float:
        """With weights in parts, they come and gradients go while the neighbours are computed."""
        if self._layout.state_stage < 3 or self._layout.data == 1:
            return part.seconds
        gather = self._exchanged_seconds(all_gather, part, self._formats.weight_bytes)
        scatter = self._exchanged_seconds(reduce_scatter, part, self._formats.gradient_bytes)
        forward = max(part.forward_seconds, gather)
        backward = part.again_seconds + part.backward_seconds + self._copying_seconds(part)
        return forward + max(backward, gather + scatter)

    def _exchanged_seconds(self, exchange: _Exchange, part: Section, item_bytes: int) -> float:
        whole = (part.num_parameters,)
        sizes = whole if self._stack.flat else [numel for _, numel in part.parameters]
        return sum(self._quickest(exchange(self._data, n * item_bytes)).seconds for n in sizes)

    def _quickest(self, ways: Sequence[Carried]) -> Carried:
        if not self._stack.rings_only:
            return ways[0]
        return next(way for way in ways if way.algorithm is Algorithm.RING)

    def _copying_seconds(self, part: Section) -> float:
        """Gradients are copied to one place, in the format in which they go, and divided there."""
        if not self._stack.flat:
            return 0.0
        weight, gradient = self._formats.weight_bytes, self._formats.gradient_bytes
        nbytes = part.num_parameters * (weight + gradient + 2 * gradient)
        return nbytes / self._bandwidth

    def _runs_alive(self, stage: int) -> int:
        """Of blocks, whose backward pass is to come, when the first one begins."""
        layout = self._layout
        if layout.virtual == 1:
            return min(layout.micro_batches, layout.pipeline - stage)
        ahead = 2 * (layout.pipeline - stage - 1) + (layout.virtual - 1) * layout.pipeline + 1
        return min(layout.micro_batches * layout.virtual, ahead)

    def _run_bytes(self, stage: int) -> int:
        return self._blocks[stage] * self._parts.block.kept_bytes // self._layout.virtual

    def _around(self, stage: int) -> list[Section]:
        ends = [self._parts.before] if stage == 0 else []
        return [*ends, self._parts.after] if stage == self._layout.pipeline - 1 else ends

    def _num_parameters(self, stage: int) -> int:
        return self._blocks[stage] * self._parts.block.num_parameters + self._num_around(stage)

    def _num_around(self, stage: int) -> int:
        """What both ends read is held once where they are one stage."""
        around = dict(p for part in self._around(stage) for p in part.parameters)
        return sum(around.values())

    def _share(self, *, from_stage: int) -> int:
        return self._layout.data if self._layout.state_stage >= from_stage else 1

    def _handing_seconds(self) -> float:
        """To the next stage, by each tensor rank its part (SC 2021, section 4.1)."""
        layout = self._layout
        if layout.pipeline == 1:
            return 0.0
        way = self._route((0, layout.tensor * layout.data))
        return send(way, -(-self._parts.stream_bytes // layout.tensor))[0].seconds

    def _shared_table_seconds(self) -> float:
        """A table at both ends of a pipeline has a gradient at each."""
        layout = self._layout
        first, last = dict(self._parts.before.parameters), dict(self._parts.after.parameters)
        shared = sum(numel for name, numel in first.items() if name in last)
        if layout.pipeline == 1 or not shared:
            return 0.0
        way = self._route((0, layout.tensor * layout.data * (layout.pipeline - 1)))
        return all_reduce(way, shared * self._formats.gradient_bytes)[0].seconds

    def _route(self, ranks: Sequence[int]) -> Route:
        # Each of the tensor ranks exchanges with those in its place, at the same time.
        return route(self._cluster.tree, ranks, at_once=self._layout.tensor)
