"""The tensors of a step with the time that each is alive, for the charts of a report.

Not for computing them: see predict/lifetimes.py.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

from steelyard.plans.peak_memory import LiveTensor, Timeline
from steelyard.plans.trace_span import Span

MOST_INSTANTS, MOST_LIFETIMES = 1000, 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A tensor that is alive from instant ``first`` to instant ``last`` of a timeline.

    ``last_use`` describes the operator that reads it last, and ``last_path`` that operator's
    module. Both are empty if the tensor outlives the pass that made it.
    """

    tensor: LiveTensor
    first: int
    last: int
    last_use: str = ""
    last_path: str = ""
    is_saved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHistory:
    """The level at each instant of a step, and the tensors that it consists of.

    The levels also contain kernel workspaces and the ``num_left_out`` smallest tensors, which are
    not listed.
    """

    timeline: Timeline
    lifetimes: tuple[Lifetime, ...]
    num_left_out: int = 0

    def alive_at(self, instant: int) -> tuple[Lifetime, ...]:
        """Return the listed tensors that are alive at an instant, largest first."""
        found = [one for one in self.lifetimes if one.first <= instant <= one.last]
        return tuple(sorted(found, key=lambda one: -one.tensor.nbytes))

    def thinned(
        self, instants: int = MOST_INSTANTS, lifetimes: int = MOST_LIFETIMES
    ) -> "MemoryHistory":
        """Return at most this many instants and tensors; the peak is one of the instants."""
        kept = sorted(
            self.lifetimes, key=lambda one: -one.tensor.nbytes * (one.last - one.first + 1)
        )[:lifetimes]
        short = replace(
            self,
            lifetimes=tuple(kept),
            num_left_out=self.num_left_out + len(self.lifetimes) - len(kept),
        )
        count = len(self.timeline.nbytes)
        if count <= instants:
            return short
        edges = [count * i // instants for i in range(instants + 1)]
        nbytes = self.timeline.nbytes
        chosen = [max(range(a, b), key=nbytes.__getitem__) for a, b in pairwise(edges)]
        moved = [
            replace(
                one, first=bisect_left(chosen, one.first), last=bisect_right(chosen, one.last) - 1
            )
            for one in short.lifetimes
        ]
        return replace(
            short,
            timeline=self.timeline.thinned(instants),
            # A tensor that is alive only between two chosen instants is at none of them.
            lifetimes=tuple(one for one in moved if one.first <= one.last),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetail:
    """Details of a step that a plan file does not contain: who is alive when, and the schedule.

    Each part is None or empty if it is not known.
    """

    planned: MemoryHistory | None = None
    unplanned: MemoryHistory | None = None
    spans: tuple[Span, ...] = ()
