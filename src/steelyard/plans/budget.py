"""The limits that a user sets, and the quantity to optimize within them.

Not for searching within them: see search/.
"""

from dataclasses import dataclass
from enum import StrEnum

from steelyard.units import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
    parse_share,
)


class Maximize(StrEnum):
    """The inverse question: the largest batch or sequence that fits."""

    BATCH = "batch"
    SEQUENCE = "sequence"


class Minimize(StrEnum):
    """The other inverse question: the fewest devices on which the step fits."""

    DEVICES = "devices"


class Effort(StrEnum):
    """The effort of a search.

    ``QUICK`` does not split the batch into micro-batches if a plan fits without that. ``NORMAL``
    stops once a plan is near the lower bound. ``FULL`` explores all amounts of memory.
    """

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


@dataclass(frozen=True, slots=True, init=False)
class Budget:
    """Limits for a step on one rank; an amount without a limit (None) is minimised, step time
    first.

    ``Budget(memory="2 GiB", accuracy_loss="0.5%")`` parses amounts with units. The fields, which
    are plain numbers, can also be given as arguments.
    """

    memory_bytes: int | None
    step_seconds: float | None
    communication_seconds: float | None
    computation_seconds: float | None
    accuracy_loss: float

    def __init__(
        self,
        memory: str | int | None = None,
        step_time: str | float | None = None,
        communication: str | float | None = None,
        computation: str | float | None = None,
        accuracy_loss: str | float = 0.0,
        *,
        memory_bytes: int | None = None,
        step_seconds: float | None = None,
        communication_seconds: float | None = None,
        computation_seconds: float | None = None,
    ) -> None:
        def seconds(amount: str | float | None, plain: float | None, what: str) -> float | None:
            return plain if amount is None else parse_seconds(amount, what=what)

        def put(name: str, value: float | None) -> None:
            object.__setattr__(self, name, value)

        put("memory_bytes", memory_bytes if memory is None else parse_bytes(memory))
        put("step_seconds", seconds(step_time, step_seconds, "step_time"))
        put(
            "communication_seconds",
            seconds(communication, communication_seconds, "communication"),
        )
        put("computation_seconds", seconds(computation, computation_seconds, "computation"))
        put("accuracy_loss", parse_share(accuracy_loss))

    @property
    def bounds_time(self) -> bool:
        return any(
            bound is not None
            for bound in (self.step_seconds, self.communication_seconds, self.computation_seconds)
        )

    def __str__(self) -> str:
        bounds = []
        if self.memory_bytes is not None:
            bounds.append(f"memory <= {format_bytes(self.memory_bytes)}")
        for name, bound in (
            ("step time", self.step_seconds),
            ("communication", self.communication_seconds),
            ("computation", self.computation_seconds),
        ):
            if bound is not None:
                bounds.append(f"{name} <= {format_seconds(bound)}")
        loss = self.accuracy_loss
        bounds.append(f"accuracy loss <= {loss * 100:g} %" if loss else "accuracy loss = 0")
        return ", ".join(bounds)
