"""Prices a whole program: seconds, bytes sent, peak memory and the tensors alive at that peak.

Peak = resident + the larger of the forward/backward pass and the optimizer's step. Not for liveness
line by line (see liveness.py) or for the time at which each line begins (see timeline.py).
"""

from dataclasses import dataclass, replace

from steelyard.hardware.cluster import OFFLOAD_PIECE_BYTES
from steelyard.ir.collective import SLOTS
from steelyard.ir.graph import Phase, Role
from steelyard.ir.message_slots import rounds_of
from steelyard.ir.metrics import EXACT, UNKNOWN, Estimate, Metrics
from steelyard.ir.parallel_layout import PIPELINE
from steelyard.ir.program import Program
from steelyard.plans.peak_memory import PIECES, LiveTensor, PeakMemory, Timeline
from steelyard.plans.plan import Prediction
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import Liveness, alive_at, liveness
from steelyard.predict.pipeline.step import pipelined
from steelyard.predict.timeline import Durations, play
from steelyard.predict.unequal_ranks import combined_durations, rank_classes

# Relative error of a predicted peak; the memory benchmark asserts it for generated Python code.
PEAK_SHARE = 0.01


def predict(program: Program, costs: CostTable) -> Prediction:
    costs = costs.on(program.layout.num_ranks)
    if program.pipeline is not None:
        return pipelined(program, program.pipeline, costs).prediction()
    # If ranks take unequal shares of the batch, the peak is that of the rank that needs most.
    fullest, passes = max(
        ((one, passes_of(one, costs)) for one in (program, *program.sibling_programs)),
        key=lambda found: max(p.nbytes for p in found[1]),
    )
    worst = max(passes, key=lambda p: p.nbytes)
    timing = _durations(program, costs)
    metrics = Metrics(
        accuracy_loss=UNKNOWN if program.is_lossy else EXACT,
        memory_bytes=Estimate.within(worst.nbytes, share=PEAK_SHARE),
        communication_bytes=Estimate.exactly(program.wire_bytes),
        communication_seconds=timing.communication,
        exposed_communication_seconds=timing.exposed,
        computation_seconds=timing.computation,
        step_seconds=timing.step,
    )
    return Prediction(
        metrics=metrics,
        peak=_peak_memory(worst, fullest, costs),
        flops=program.flops,
        timeline=timeline_of(costs, passes),
    )


def peak_bytes(program: Program, costs: CostTable) -> int:
    """Return the predicted peak memory alone.

    This skips the timing that ``predict`` includes, because a search needs the peak thousands of
    times.
    """
    if program.pipeline is not None:
        on_ranks = costs.on(program.layout.num_ranks)
        return pipelined(program, program.pipeline, on_ranks).peak_bytes
    return max(_nbytes(one, costs) for one in (program, *program.sibling_programs))


def rank_peak_bytes(program: Program, costs: CostTable) -> tuple[int, ...]:
    """Return the peak bytes of each rank of the layout."""
    layout = program.layout
    costs = costs.on(layout.num_ranks)
    if program.pipeline is not None:
        priced = pipelined(program, program.pipeline, costs).rank_peak_bytes
        return tuple(priced[layout.place(r, PIPELINE)] for r in range(layout.num_ranks))
    of_share = {one.share: _nbytes(one, costs) for one in (program, *program.sibling_programs)}
    return tuple(of_share[layout.share_of(rank)] for rank in range(layout.num_ranks))


def kept_gradients_bytes(program: Program, costs: CostTable) -> int:
    """Return by how much the peak rises if gradients are added to those of earlier steps."""
    planned = passes_of(program, costs)
    if program.earlier is not program:
        # The sums are stored separately during the passes, and added to the gradients afterwards.
        accumulated = program.graph.resident_bytes(Role.GRADIENT)
        in_passes = max(p.nbytes for p in planned if p.program is not program.update)
        return max(0, in_passes + accumulated - max(p.nbytes for p in planned))
    later = liveness(program, costs, accumulating=True).peak_bytes
    base = planned[0].base_bytes + planned[0].liveness.left_bytes
    return max(0, base + later - max(p.nbytes for p in planned))


def step_seconds(program: Program, costs: CostTable) -> Estimate:
    costs = costs.on(program.layout.num_ranks)
    if program.pipeline is not None:
        return pipelined(program, program.pipeline, costs).step
    return _durations(program, costs).step


def micro_batch_overhead(program: Program, costs: CostTable) -> float:
    """Return the declared seconds that each further micro-batch adds to a step.

    It launches all operators once more, and adds its gradients to those of the earlier ones. These
    sums are not among the program's operators; a calibration includes them.
    """
    nodes = program.graph.by_name
    num_calls = sum(not nodes[i.node].is_free for i in program.instructions if i.sink is None)
    moved_bytes = 3 * program.graph.gradient_bytes  # a sum reads two tensors and writes one
    device = costs.device
    return num_calls * device.call_seconds + moved_bytes / device.bytes_per_second


def least_possible_bytes(program: Program, costs: CostTable) -> int:
    """Return a lower bound on peak memory, which no recomputation can go below.

    It is the resident bytes plus the needs of the single most demanding line, or the optimizer's
    update if that needs more.
    """
    graph, resident = program.graph, _resident_bytes(program, costs)
    inputs = {t.storage for node in graph.inputs() for t in node.outputs}
    largest_line = 0
    for instruction in program.instructions:
        node = graph.by_name[instruction.node]
        if instruction.sink is not None or node.is_free:
            continue
        names = (node.name, *node.inputs)
        needed = {s for name in names for s in graph.storages_of(name)} - inputs
        nbytes = sum(graph.storages[s].nbytes for s in needed)
        largest_line = max(largest_line, nbytes + costs.workspace_bytes(node))
    update = _update_pass(program, costs, resident)
    return max(resident + largest_line, update.nbytes if update else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPass:
    """One part of the step: the first micro-batch, the last one, or the optimizer's update."""

    program: Program
    liveness: Liveness
    base_bytes: int
    base: tuple[LiveTensor, ...]
    accumulating: bool = False

    @property
    def nbytes(self) -> int:
        return self.base_bytes + self.liveness.peak_bytes


def _nbytes(program: Program, costs: CostTable) -> int:
    return max(p.nbytes for p in passes_of(program, costs))


def passes_of(program: Program, costs: CostTable) -> list[StepPass]:
    resident = _resident_bytes(program, costs)
    first_pass = program.passes[0]
    first = liveness(first_pass, costs)
    passes = [StepPass(program=first_pass, liveness=first, base_bytes=resident, base=())]
    gradients = first.left_bytes
    if program.repeats > 1:
        passes.append(
            StepPass(
                program=program,
                liveness=liveness(program, costs, accumulating=True),
                base_bytes=resident + gradients,
                base=(LiveTensor.of(gradients, "accumulated gradients", Role.GRADIENT),),
                accumulating=True,
            )
        )
    update = _update_pass(program, costs, resident + gradients)
    if update is not None:
        base = LiveTensor.of(gradients, "gradients", Role.GRADIENT)
        passes.append(replace(update, base=(base,)))
    return passes


def _update_pass(program: Program, costs: CostTable, base_bytes: int) -> StepPass | None:
    if program.update is None:
        return None
    alive = liveness(program.update, costs)
    return StepPass(program=program.update, liveness=alive, base_bytes=base_bytes, base=())


def _resident_bytes(program: Program, costs: CostTable) -> int:
    graph = program.graph
    resident = graph.resident_bytes(Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.TANGENT)
    resident += graph.resident_bytes(Role.STATE)  # error feedback of compressed gradients
    # The global batch stays allocated while its micro-batches are processed.
    resident += program.batch_bytes
    if program.update is not None:
        resident += program.update.graph.resident_bytes(Role.STATE)
    return resident + _pieces_bytes(program) + _slots_bytes(program, costs)


def _pieces_bytes(program: Program) -> int:
    """Return the bytes of the staging buffers for transfers to and from offload memory."""
    return 2 * OFFLOAD_PIECE_BYTES if program.is_moving else 0


def _slots_bytes(program: Program, costs: CostTable) -> int:
    """Return the bytes of the message slots into which other ranks write.

    If the ranks are on different hosts, the sender needs slots of its own too.
    """
    own_bytes = sum(rounds.held_bytes for rounds in rounds_of(program.graph).values())
    slots = costs.links.get(SLOTS)
    return 2 * own_bytes if slots is not None and slots.is_remote else own_bytes


def _durations(program: Program, costs: CostTable) -> Durations:
    """Return the durations of the whole step.

    Each micro-batch waits for its own exchanges before the next begins.
    """
    classes = rank_classes(program, costs)
    return combined_durations(classes) if len(classes) > 1 else classes[0].uniform_durations


def _peak_memory(worst: StepPass, program: Program, costs: CostTable) -> PeakMemory:
    alive = worst.liveness
    resident = _resident_bytes(program, costs)
    if not worst.program.instructions:
        return PeakMemory(
            nbytes=worst.nbytes, resident_bytes=resident, workspace_bytes=0, at="", path="",
            line="", phase=Phase.UPDATE, alive=(*resident_tensors(program, costs), *worst.base),
        )  # fmt: skip
    instruction = worst.program.instructions[alive.peak_index]
    node = worst.program.graph.by_name[instruction.node]
    live = alive_at(worst.program, alive.peak_index, accumulating=worst.accumulating)
    workspace = alive.peak_bytes - sum(h.nbytes for h in live)
    everything = [*resident_tensors(program, costs), *worst.base, *live]
    return PeakMemory(
        nbytes=worst.nbytes,
        resident_bytes=resident,
        workspace_bytes=workspace,
        at=node.op,
        path=node.path,
        line=node.line,
        phase=instruction.phase,
        alive=tuple(sorted((h for h in everything if h.nbytes), key=lambda h: -h.nbytes)),
    )


def resident_tensors(program: Program, costs: CostTable) -> list[LiveTensor]:
    graph = program.graph
    tensors = [
        LiveTensor.of(graph.resident_bytes(Role.PARAMETER), "parameters", Role.PARAMETER),
        LiveTensor.of(graph.resident_bytes(Role.BUFFER), "buffers", Role.BUFFER),
        LiveTensor.of(program.batch_bytes, "the batch", Role.BATCH),
        LiveTensor.of(graph.resident_bytes(Role.CONSTANT), "constants", Role.CONSTANT),
        LiveTensor.of(graph.resident_bytes(Role.TANGENT), "the gradient of the loss", Role.TANGENT),
    ]
    if lost := graph.resident_bytes(Role.STATE):
        tensors.append(LiveTensor.of(lost, "error feedback of compressed gradients", Role.STATE))
    if slots := _slots_bytes(program, costs):
        tensors.append(
            LiveTensor.of(slots, "receive slots for messages of other ranks", Role.BUFFER)
        )
    if pieces := _pieces_bytes(program):
        tensors.append(LiveTensor.of(pieces, PIECES, Role.BUFFER))
    if program.update is not None:
        state = program.update.graph.resident_bytes(Role.STATE)
        tensors.append(LiveTensor.of(state, "optimizer state", Role.STATE))
    return tensors


def timeline_of(costs: CostTable, passes: list[StepPass]) -> Timeline:
    """Concatenate the timelines of the first micro-batch, the last one and the update."""
    clock = 0.0
    begins: list[float] = []
    nbytes: list[int] = []
    phases: list[Phase] = []
    for one in passes:
        played = play(one.program, costs)
        begins += [clock + begin for begin in played.begins]
        nbytes += [one.base_bytes + above for above in one.liveness.bytes_at]
        phases += [instruction.phase for instruction in one.program.instructions]
        clock += played.seconds
    return Timeline(seconds=tuple(begins), nbytes=tuple(nbytes), phases=tuple(phases))
