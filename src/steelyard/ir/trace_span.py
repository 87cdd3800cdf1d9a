"""When something goes on in a predicted step, and on which stream of which rank.

Not for predicting it (predict/trace.py), nor for drawing it (report/perfetto.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``chunk`` is what is busy meanwhile: the device, a link, or nothing at all (it waits)."""

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
