"""Notes on a plan: on its batch and rounding, and on its memory beside eager PyTorch.

Not for deciding how the batch is sharded: the plan does that. Not for the comparison with a budget:
report/document.py prints that with the plan.
"""

from collections.abc import Iterator, Sequence
from math import prod

from steelyard.capture.batch.splitting import computes_in_half
from steelyard.hardware.cluster import Cluster
from steelyard.ir.graph import Graph, OutputKind, Role
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import BatchSharding, MicroBatches
from steelyard.plans.budget import Effort
from steelyard.plans.plan import Prediction
from steelyard.search import SearchResult
from steelyard.units import format_bytes

_MAX_LISTED = 3
# These roles are resident for the whole step, in eager PyTorch too.
_RESIDENT_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.BATCH, Role.CONSTANT, Role.STATE})
# Optimizer state for each parameter in torch 2.13: tensors of its shape, and bytes of scalars (4
# for a step count).
_ADAM, _MOMENTUM = (2, 4), (1, 0)
# Scaling of the learning rate for a larger batch: Goyal et al. (2017), Malladi et al. (2022).
GROWN = (
    "a larger batch changes training: the learning rate is usually scaled linearly with the batch "
    "for SGD (Goyal et al., 2017), and with its square root for Adam (Malladi et al., 2022)"
)


def half_precision_note(rules: Sequence[Rule], graph: Graph) -> Iterator[str]:
    """Yield a note if the step computes in half precision and splits its batch."""
    parts = prod(
        [
            *(rule.micro_batches for rule in of_kind(rules, MicroBatches)),
            *(rule.ranks for rule in of_kind(rules, BatchSharding)),
        ]
    )
    if parts > 1 and computes_in_half(graph):
        yield (
            f"the step computes in half precision, and the gradients of each of {parts} parts of "
            "the batch are rounded to it: training differs from that on the whole batch by "
            "rounding, and is as accurate (docs/models.md)"
        )


def effort_note(effort: Effort, found: SearchResult) -> Iterator[str]:
    """Yield a note if the search was stopped, or was quick and did not need micro-batches."""
    if found.is_stopped:
        yield "the search was stopped at the best plan so far; a faster one may exist"
    elif effort is Effort.QUICK and found.micro_batches == 1:
        yield "a quick search: plans in micro-batches, which may be faster, were not considered"


def host_memory_note(cluster: Cluster) -> Iterator[str]:
    """Yield a note on the memory that a plan for one declared device may offload to."""
    if cluster.is_here or cluster.num_devices > 1:
        return
    memory, device = cluster.offload_memory, cluster.device
    if memory is not None and memory.is_host:
        assert device.host_link is not None
        yield (
            f"{device.kind} may offload to {format_bytes(memory.size_bytes)} of its host's memory, "
            f"over {device.host_link.kind} at its declared {format_bytes(memory.bytes_per_second)}"
            "/s each way"
        )
    elif memory is None and cluster.host_memory is not None:
        yield "nothing is offloaded to the host's memory in a plan with a budget of accuracy loss"
    elif memory is None and device.host_link is None:
        yield f"nothing is offloaded: no link of {device.kind} to its host is declared"
    elif memory is None:
        yield (
            f"nothing is offloaded: the memory of the host of {device.kind} is not known; give it "
            "with --host-memory 64GiB (host_memory= of sy.Cluster.gpu, or of a cluster file)"
        )


def batch_size_note(layout: ParallelLayout, samples: int) -> Iterator[str]:
    """Yield a note on the batch size of each rank, if ranks share the batch."""
    if layout.data == 1:
        return
    each = f"{samples * layout.share_of(0) // layout.units} on each"
    if layout.shares:
        each = f"{spelled(layout.shares)} on ranks 0 to {layout.data - 1}"
    groups = " group" if layout.num_ranks > layout.data else ""
    yield (
        f"the global batch stays {samples} samples a step, {each}{groups}; the learning rate stays "
        "the same"
    )


def note_beyond_eager(before: Prediction, predicted: Prediction) -> Iterator[str]:
    """Yield a note if the peak of the plan is above that of eager PyTorch, ``before``."""
    peak, eager_bytes = predicted.peak, before.peak.nbytes
    if peak.nbytes <= eager_bytes:
        return
    largest = [holding for holding in peak.alive if holding.role not in _RESIDENT_ROLES][
        :_MAX_LISTED
    ]
    listed = ", ".join(f"{holding.what} {format_bytes(holding.nbytes)}" for holding in largest)
    at = f" at {peak.at} in {peak.path or 'the loss'}, {peak.phase.value} pass" if peak.at else ""
    yield (
        f"the plan needs ~{format_bytes(peak.nbytes - eager_bytes)} more than eager PyTorch: its "
        f"peak is{at}"
        + (f", where the largest are {listed}" if listed else "")
        + f"; a budget of {format_bytes(eager_bytes)} would allow no more than eager PyTorch takes"
    )


def note_on_state(
    program: Program, predicted: Prediction, *, limit_bytes: int | None, is_known: bool
) -> Iterator[str]:
    """Yield a note on the state of AdamW and SGD, and on whether the budget would still be met."""
    trained = [] if is_known else _trained_bytes(program.graph)
    if not trained:
        return
    adam, momentum = (_state_bytes(trained, state) for state in (_ADAM, _MOMENTUM))
    note = (
        f"the plan includes no optimizer state: AdamW would add {format_bytes(adam)} (2 tensors "
        f"like each of the {format_bytes(sum(trained))} of trained parameters), SGD with momentum "
        f"{format_bytes(momentum)}, SGD without momentum none"
    )
    if limit_bytes is not None:
        needs = {
            name: predicted.peak.nbytes + nbytes
            for name, nbytes in (("AdamW", adam), ("SGD with momentum", momentum))
        }
        fitting = [name for name, nbytes in needs.items() if nbytes <= limit_bytes]
        least = f"with AdamW it needs at least ~{format_bytes(needs['AdamW'])}"
        if "AdamW" in fitting:
            note += f"; {least}, within the budget"
        else:
            note += f"; {least} and does not fit {format_bytes(limit_bytes)}"
            fits = "fits" if fitting else "does not fit either"
            note += f", SGD with momentum {fits}"
    yield f"{note}; give optimizer= to include it"


def _trained_bytes(graph: Graph) -> list[int]:
    """Return the bytes of each parameter that gets a gradient; others have no optimizer state."""
    trained = {o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT}
    return [node.outputs[0].nbytes for node in graph.inputs() if node.name in trained]


def _state_bytes(trained: list[int], state: tuple[int, int]) -> int:
    tensors, scalar_bytes = state
    return sum(tensors * nbytes + scalar_bytes for nbytes in trained)
