"""One training step of a deep model on a declared cluster, from the sections of a short capture.

The time of the micro-batches is that of the pipeline schedule (see pipeline/duration.py). Gradients
are exchanged at the end, or during the last backward pass. Not for programs that are run: see
predict/step.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.hardware.offload_memory import OFFLOAD_PIECE_BYTES
from steelyard.hardware.software_stack import SoftwareStack, StageSendMode
from steelyard.ir.model_blocks import Formats
from steelyard.ir.parallel_layout import TENSOR, ParallelLayout
from steelyard.predict.analytic.sections import Section, Sections
from steelyard.predict.collectives.algorithms import (
    Algorithm,
    CollectiveCost,
    all_gather,
    all_reduce,
    reduce_scatter,
    send,
)
from steelyard.predict.collectives.curves import collective_curves
from steelyard.predict.collectives.routes import Route, route
from steelyard.predict.cost_table import CostTable
from steelyard.predict.pipeline.duration import Passes, pipeline_seconds

_Exchange = Callable[[Route, int], tuple[CollectiveCost, ...]]
# Pieces of offloaded state on the device: one is fetched, one is updated and one is sent back.
_PIECES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak bytes on each rank of one pipeline stage."""

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
class StageBlocks:
    """The blocks of one pipeline stage: each kind of block, with the number of such blocks."""

    blocks: tuple[tuple[Section, int], ...]

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticStep:
    """The seconds of a step, and the memory of each stage.

    ``pipeline_seconds`` are those of all micro-batches, ``exposed_seconds`` those of data-parallel
    exchanges that do not overlap with computation, and ``update_seconds`` those of the optimizer.
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


def tensor_costs(cluster: Cluster, layout: ParallelLayout, *, first: int = 0) -> CostTable:
    """Return the declared costs of calls, and of exchanges in a tensor-parallel group.

    ``first`` is the first rank of the group.
    """
    found = {}
    if layout.tensor > 1:
        found = collective_curves(cluster.tree, axis=TENSOR, numbers=[layout.tensor], first=first)
    return CostTable(device=cluster.tree.device_of(first), collective_curves=found)


def analytic_step(costs: "Sequence[LayoutCost]", stages: Sequence[StageBlocks]) -> AnalyticStep:
    """Return a step, given each stage's blocks and the cost model for its device."""
    numbered = list(zip(costs, enumerate(stages), strict=True))
    return AnalyticStep(
        pipeline_seconds=_pipeline_seconds(costs, stages),
        exposed_seconds=max(on.exposed_seconds(n, s) for on, (n, s) in numbered),
        update_seconds=max(on.update_seconds(n, s.num_blocks) for on, (n, s) in numbered),
        stages=tuple(on.memory(n, s) for on, (n, s) in numbered),
    )


def _pipeline_seconds(costs: "Sequence[LayoutCost]", stages: Sequence[StageBlocks]) -> float:
    """Return the seconds of all micro-batches, including filling and draining the pipeline."""
    layout = costs[0].layout
    if layout.pipeline == 1:
        return layout.micro_batches * costs[0].stage_seconds(0, stages[0])
    return pipeline_seconds(layout, passes_by_stage(costs, stages))


def passes_by_stage(costs: "Sequence[LayoutCost]", stages: Sequence[StageBlocks]) -> list[Passes]:
    """Return the passes of each run of blocks, in the order of the model."""
    of_rank = [cost.run_passes(n, s) for n, (cost, s) in enumerate(zip(costs, stages, strict=True))]
    return [passes for run in zip(*of_rank, strict=True) for passes in run]


class LayoutCost:
    """The cost model of a layout's stages on one class of device.

    ``parts`` are the sections of one tensor-parallel rank for one micro-batch; a stage may have
    blocks of other kinds, which recompute more. ``place`` is the number of a stage on this class of
    device; its position determines which links are used.
    """

    def __init__(
        self,
        parts: Sections,
        cluster: Cluster,
        layout: ParallelLayout,
        formats: Formats,
        stack: SoftwareStack | None = None,
        *,
        device: Device | None = None,
        place: int = 0,
    ) -> None:
        if layout.num_ranks > cluster.num_devices:
            raise BadInput(
                f"a layout of {layout.num_ranks} ranks on {cluster.num_devices} devices",
                expected="no more ranks than devices",
                remedy="declare a larger cluster, or reduce a degree of the layout",
            )
        self._parts, self._cluster, self._layout, self._formats = parts, cluster, layout, formats
        self._stack = stack or SoftwareStack()
        device = device or cluster.device
        self._host = device.host_link
        assert self._host is not None or not layout.offloads_state, (
            "a device has no link to its host"
        )
        self._bandwidth = self._stack.bandwidth_share * device.bytes_per_second
        self._first = place * layout.data * layout.tensor

    @property
    def layout(self) -> ParallelLayout:
        return self._layout

    @property
    def block(self) -> Section:
        """The section of a block without recomputation."""
        return self._parts.block

    def stage_seconds(self, number: int, stage: StageBlocks) -> float:
        """Return a stage's seconds for one micro-batch, forward and backward, including waits."""
        blocks = sum(count * self.in_turn(block) for block, count in stage.blocks)
        return blocks + self.ends_seconds(number)

    def ends_seconds(self, number: int) -> float:
        """Return a stage's seconds for everything except its blocks."""
        ends = sum(self.in_turn(part) for part in self._around(number))
        return ends + 2 * self._layout.virtual * self._send_seconds

    def stage_passes(self, number: int, stage: StageBlocks) -> Passes:
        """Return a stage's forward and backward seconds for one micro-batch, including waits."""
        forward = backward = self._layout.virtual * self._send_seconds
        for part, count in (*stage.blocks, *((part, 1) for part in self._around(number))):
            passes = self.passes(part)
            forward, backward = forward + count * passes[0], backward + count * passes[1]
        return forward, backward

    def run_passes(self, number: int, stage: StageBlocks) -> list[Passes]:
        """Return the forward and backward seconds of each run of a stage's blocks, including
        waits.
        """
        if self._layout.virtual == 1:
            return [self.stage_passes(number, stage)]
        blocks = [self.passes(block) for block, count in stage.blocks for _ in range(count)]
        virtual, found = self._layout.virtual, []
        for run in range(virtual):
            parts = blocks[run * len(blocks) // virtual : (run + 1) * len(blocks) // virtual]
            parts += [self.passes(part) for part in self._around_run(number, run)]
            forward, backward = (sum(pair[i] for pair in parts) for i in (0, 1))
            found.append((forward + self._send_seconds, backward + self._send_seconds))
        return found

    @property
    def _send_seconds(self) -> float:
        """The seconds that a pass of one run of blocks waits for messages.

        A micro-batch arrives and is sent on, and its gradient arrives and is returned. If stages
        wait for one message after another, a stage with a single neighbour also waits while that
        neighbour communicates with its other neighbour.
        """
        if self._stack.handing is StageSendMode.BESIDE:
            return 0.0
        in_turn = self._stack.handing is StageSendMode.IN_TURN and self._layout.pipeline > 2
        return (2 if in_turn else 1) * self.message_seconds

    def exposed_seconds(self, number: int, stage: StageBlocks) -> float:
        """Return the seconds of gradient exchange that do not overlap with computation.

        Gradients are exchanged once a step. With ZeRO stage 3 they have been exchanged block by
        block.
        """
        layout = self._layout
        if layout.data == 1 or layout.state_stage == 3:
            return self._shared_table_seconds
        exchanging = sum(cost.seconds for cost in self._exchanges_per_step(number, stage))
        if layout.overlaps:
            hidden = sum(blocks * block.backward_seconds for block, blocks in stage.blocks)
            exchanging = max(0.0, exchanging - hidden)
        return exchanging + self._shared_table_seconds

    def exchanged(self, number: int, stage: StageBlocks) -> tuple[float, int]:
        """Return one rank's exchange seconds in a step, overlapped or not, and the bytes it
        sends.
        """
        layout = self._layout
        parts = [*stage.blocks, *((part, 1) for part in self._around(number))]
        inside = sum(count * part.exchange_seconds for part, count in parts)
        sent = sum(count * part.exchanged_bytes for part, count in parts)
        inside += 2 * layout.virtual * self.message_seconds
        if layout.pipeline > 1:
            sent += 2 * layout.virtual * -(-self._parts.stream_bytes // layout.tensor)
        if layout.data > 1 and layout.state_stage == 3:
            for part, count in parts:
                costs = [*self._gathers(part) * 2, *self._scatters(part)]
                inside += count * sum(cost.seconds for cost in costs)
                sent += count * sum(cost.sent_bytes for cost in costs)
        once = (
            self._exchanges_per_step(number, stage)
            if layout.data > 1 and layout.state_stage < 3
            else ()
        )
        offloaded = self._offloaded_state_bytes(number, stage.num_blocks)
        seconds = layout.micro_batches * inside + sum(cost.seconds for cost in once)
        seconds += self._shared_table_seconds + self._fetching_seconds(number, stage.num_blocks)
        nbytes = layout.micro_batches * sent + sum(cost.sent_bytes for cost in once) + 2 * offloaded
        return seconds, nbytes

    def _exchanges_per_step(self, number: int, stage: StageBlocks) -> tuple[CollectiveCost, ...]:
        """Return the exchanges that happen once per step: gradients, and weights updated in
        shards.
        """
        count = self._num_parameters(number, stage.num_blocks)
        gradients = count * self._formats.gradient_bytes
        if self._layout.state_stage == 0:
            return (all_reduce(self._data, gradients)[0],)
        gathered = all_gather(self._data, count * self._formats.weight_bytes)[0]
        return (gathered, reduce_scatter(self._data, gradients)[0])

    def computing_seconds(self, number: int, stage: StageBlocks) -> float:
        """Return one rank's computation seconds in a step, including the optimizer's update."""
        parts = [*stage.blocks, *((part, 1) for part in self._around(number))]
        once = sum(
            count * (part.seconds - part.exchange_seconds + self._copying_seconds(part))
            for part, count in parts
        )
        return self._layout.micro_batches * once + self._updating_seconds(number, stage.num_blocks)

    def flops(self, number: int, stage: StageBlocks) -> int:
        parts = [*stage.blocks, *((part, 1) for part in self._around(number))]
        return self._layout.micro_batches * sum(count * part.flops for part, count in parts)

    def update_seconds(self, number: int, num_blocks: int) -> float:
        """Return the seconds of the update.

        Offloaded state is streamed: one piece is updated while the next is fetched and the previous
        one is sent.
        """
        updating = self._updating_seconds(number, num_blocks)
        return max(updating, self._fetching_seconds(number, num_blocks))

    def offloaded_bytes(self, number: int, stage: StageBlocks) -> int:
        """Return the bytes in host memory for each device."""
        kept = sum(count * block.offloaded_bytes for block, count in stage.blocks)
        return int(self.alive(number) * kept) + self._offloaded_state_bytes(
            number, stage.num_blocks
        )

    def _fetching_seconds(self, number: int, num_blocks: int) -> float:
        """Return the seconds to fetch the state; on a full-duplex link, it is sent back at the same
        time.
        """
        nbytes = self._offloaded_state_bytes(number, num_blocks)
        return self._host.seconds(nbytes, messages=1) if self._host and nbytes else 0.0

    def _offloaded_state_bytes(self, number: int, num_blocks: int) -> int:
        return self._state_bytes(number, num_blocks) if self._layout.offloads_state else 0

    def _state_bytes(self, number: int, num_blocks: int) -> int:
        count = self._num_parameters(number, num_blocks)
        return count * self._formats.state_bytes // self._share(from_stage=1)

    def _updating_seconds(self, number: int, num_blocks: int) -> float:
        """Return the seconds of the optimizer's update, which is limited by memory bandwidth."""
        count = self._num_parameters(number, num_blocks) / self._share(from_stage=1)
        return count * self._formats.moved_by_update / self._bandwidth

    def memory(self, number: int, stage: StageBlocks) -> StageMemory:
        kept = sum(count * block.saved_bytes for block, count in stage.blocks)
        # Before its backward pass, a recomputed block has all its activations in memory. Before the
        # first backward pass, at the end of the model, the inputs of the loss are alive instead.
        recomputed = max((block.recompute_bytes for block, _ in stage.blocks), default=0)
        model = self.model_memory(number, stage.num_blocks)
        return replace(
            model,
            activation_bytes=int(self.alive(number) * kept) + self.around_bytes(number),
            workspace_bytes=model.workspace_bytes + max(recomputed, self.ending_bytes(number)),
        )

    def model_memory(self, number: int, num_blocks: int) -> StageMemory:
        """Return the memory that does not depend on recomputation."""
        count, formats = self._num_parameters(number, num_blocks), self._formats
        # Sharded weights are gathered for one block and for the next one; weights outside of the
        # blocks are gathered for the whole step.
        gathered = 2 * self._num_in_block + self._num_around(number)
        return StageMemory(
            weight_bytes=count * formats.weight_bytes // self._share(from_stage=3),
            gradient_bytes=count * formats.gradient_bytes // self._share(from_stage=2),
            state_bytes=self._resident_state_bytes(number, num_blocks),
            activation_bytes=0,
            workspace_bytes=gathered * formats.weight_bytes if self._layout.state_stage == 3 else 0,
        )

    def _resident_state_bytes(self, number: int, num_blocks: int) -> int:
        whole = self._state_bytes(number, num_blocks)
        return min(whole, _PIECES * OFFLOAD_PIECE_BYTES) if self._layout.offloads_state else whole

    def around_bytes(self, number: int) -> int:
        return sum(part.saved_bytes for part in self._around(number))

    def ending_bytes(self, number: int) -> int:
        """Return the extra bytes at the end of a stage's forward pass, which are freed right after
        it.
        """
        return sum(part.peak_bytes - part.saved_bytes for part in self._around(number)[-1:])

    def in_turn(self, part: Section) -> float:
        forward, backward = self.passes(part)
        return forward + backward

    def passes(self, part: Section) -> Passes:
        """Return the seconds of a section's forward and backward pass.

        With ZeRO stage 3, weight gathers and gradient scatters overlap with the neighbours'
        passes.
        """
        if self._layout.state_stage < 3 or self._layout.data == 1:
            return part.forward_seconds, part.recompute_seconds + part.backward_seconds
        gather = sum(cost.seconds for cost in self._gathers(part))
        scatter = sum(cost.seconds for cost in self._scatters(part))
        forward = max(part.forward_seconds, gather)
        backward = part.recompute_seconds + part.backward_seconds + self._copying_seconds(part)
        return forward, max(backward, gather + scatter)

    def _gathers(self, part: Section) -> list[CollectiveCost]:
        return self._exchanges(all_gather, part, self._formats.weight_bytes)

    def _scatters(self, part: Section) -> list[CollectiveCost]:
        return self._exchanges(reduce_scatter, part, self._formats.gradient_bytes)

    def _exchanges(
        self, exchange: _Exchange, part: Section, item_bytes: int
    ) -> list[CollectiveCost]:
        whole = (part.num_parameters,)
        sizes = whole if self._stack.flat else [numel for _, numel in part.parameters]
        return [self._fastest(exchange(self._data, n * item_bytes)) for n in sizes]

    def _fastest(self, costs: Sequence[CollectiveCost]) -> CollectiveCost:
        if not self._stack.rings_only:
            return costs[0]
        return next(cost for cost in costs if cost.algorithm is Algorithm.RING)

    def _copying_seconds(self, part: Section) -> float:
        """Return the seconds to copy sharded gradients to a flat buffer.

        The copy also casts them to the format in which they are sent, and divides them.
        """
        if not self._stack.flat or self._layout.state_stage < 3 or self._layout.data == 1:
            return 0.0
        weight, gradient = self._formats.weight_bytes, self._formats.gradient_bytes
        nbytes = part.num_parameters * (weight + gradient + 2 * gradient)
        return nbytes / self._bandwidth

    def alive(self, number: int) -> float:
        """Return the number of micro-batches whose saved activations are alive at the first
        backward pass.
        """
        layout = self._layout
        if layout.virtual == 1:
            return min(layout.micro_batches, layout.pipeline - number)
        ahead = 2 * (layout.pipeline - number - 1) + (layout.virtual - 1) * layout.pipeline + 1
        return min(layout.micro_batches * layout.virtual, ahead) / layout.virtual

    def _around_run(self, number: int, run: int) -> list[Section]:
        """Return the sections outside of the blocks that belong to one run of blocks of a stage."""
        before, after = self._parts.before, self._parts.after
        first, last = (0, 0), (self._layout.pipeline - 1, self._layout.virtual - 1)
        found = [before] if (number, run) == first else []
        return [*found, after] if (number, run) == last else found

    def _around(self, number: int) -> list[Section]:
        ends = [self._parts.before] if number == 0 else []
        return [*ends, self._parts.after] if number == self._layout.pipeline - 1 else ends

    def _num_parameters(self, number: int, num_blocks: int) -> int:
        return num_blocks * self._num_in_block + self._num_around(number)

    @cached_property
    def _num_in_block(self) -> int:
        return self._parts.block.num_parameters

    def _num_around(self, number: int) -> int:
        """Return the parameters of a stage that are outside of its blocks.

        A parameter that both ends of the model read counts once if both are in one stage.
        """
        around = dict(p for part in self._around(number) for p in part.parameters)
        return sum(around.values())

    def _share(self, *, from_stage: int) -> int:
        return self._layout.data if self._layout.state_stage >= from_stage else 1

    @cached_property
    def _data(self) -> Route:
        layout, first = self._layout, self._first
        return self._route(range(first, first + layout.data * layout.tensor, layout.tensor))

    @cached_property
    def message_seconds(self) -> float:
        """The seconds to send a micro-batch to the next stage.

        Each tensor-parallel rank sends its part. The next stage gathers the parts, unless it works
        on parts too (SC 2021, section 4.1).
        """
        layout = self._layout
        if layout.pipeline == 1:
            return 0.0
        # The link is that from this stage to the next one. The last stage sends only gradients,
        # backwards.
        width = layout.tensor * layout.data
        step = width if self._first + width < width * layout.pipeline else -width
        link = self._route(sorted((self._first, self._first + step)))
        sent = send(link, -(-self._parts.stream_bytes // layout.tensor))[0].seconds
        if layout.tensor == 1 or layout.regathers_activations:
            return sent
        tensor_ranks = route(self._cluster.tree, range(self._first, self._first + layout.tensor))
        return sent + all_gather(tensor_ranks, self._parts.stream_bytes)[0].seconds

    @cached_property
    def _shared_table_seconds(self) -> float:
        """The seconds to all-reduce the gradient of a table shared by both ends of the pipeline."""
        layout = self._layout
        first, last = dict(self._parts.before.parameters), dict(self._parts.after.parameters)
        shared = sum(numel for name, numel in first.items() if name in last)
        if layout.pipeline == 1 or not shared:
            return 0.0
        ends = self._route((0, layout.tensor * layout.data * (layout.pipeline - 1)))
        return all_reduce(ends, shared * self._formats.gradient_bytes)[0].seconds

    def _route(self, ranks: Sequence[int]) -> Route:
        # Each tensor-parallel rank exchanges with its counterparts in other groups, all at the same
        # time.
        return route(self._cluster.tree, ranks, at_once=self._layout.tensor)
