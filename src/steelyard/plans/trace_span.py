"""A time span of a predicted step, on a stream of a rank.

Not for predicting it (see predict/trace.py) or for drawing it (see report/perfetto.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span; ``chunk`` is the resource in use: the device, a link, or none (waiting)."""

    rank: int
    stream: str
    name: str
    where: str
    begin_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        return self.begin_seconds + self.seconds


DEVICE, WAITING = "device", "waiting"
