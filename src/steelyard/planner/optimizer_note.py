"""The memory that an optimizer would add to a plan that was made without one.

Not for an optimizer that the plan knows: its step is captured (capture/tracing/optimizer.py).
"""

from collections.abc import Iterator

from steelyard.ir.graph import Graph, OutputKind
from steelyard.ir.program import Program
from steelyard.plans.plan import Prediction
from steelyard.units import format_bytes

# What torch 2.13 keeps of each parameter: tensors like it, and numbers of 4 bytes beside them.
_ADAM, _MOMENTUM = (2, 4), (1, 0)


def note_on_state(
    program: Program, predicted: Prediction, *, limit_bytes: int | None, is_known: bool
) -> Iterator[str]:
    """A note of what AdamW and SGD would add, and whether the budget would still be kept."""
    trained = [] if is_known else _trained_bytes(program.graph)
    if not trained:
        return
    adam, momentum = (_state_bytes(trained, kept) for kept in (_ADAM, _MOMENTUM))
    said = (
        f"the plan holds no optimizer state: AdamW would add {format_bytes(adam)} (2 tensors like "
        f"each of the {format_bytes(sum(trained))} of trained parameters), SGD with momentum "
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
            said += f"; {least}, within the budget"
        else:
            said += f"; {least} and does not fit {format_bytes(limit_bytes)}"
            fits = "fits" if fitting else "does not fit either"
            said += f", SGD with momentum {fits}"
    yield f"{said}; optimizer= plans for it"


def _trained_bytes(graph: Graph) -> list[int]:
    """The bytes of each parameter that gets a gradient: others have no state."""
    trained = {o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT}
    return [node.outputs[0].nbytes for node in graph.inputs() if node.name in trained]


def _state_bytes(trained: list[int], kept: tuple[int, int]) -> int:
    tensors, beside = kept
    return sum(tensors * nbytes + beside for nbytes in trained)
