"""The tables that repeat the charts of the HTML page as text. Not for the charts: see charts.js."""

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.ir.graph import Role
from steelyard.plans.lifetimes import Lifetime, MemoryHistory
from steelyard.plans.peak_memory import LiveTensor, Timeline
from steelyard.plans.trace_span import Span
from steelyard.report.page.schedule import MOST_RANKS, ModuleTime, times_of
from steelyard.report.peak_groups import short_op, starred_path
from steelyard.report.perfetto import RankRow, by_rank
from steelyard.units import format_bytes, format_seconds

_INSTANTS, _LIFETIMES, _TIMES = 24, 100, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The memory at one instant of a step."""

    when: str
    phase: str
    nbytes: int
    largest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeRow:
    """A tensor with the time from its birth to its last use."""

    nbytes: int
    where: str
    line: str
    what: str
    first: str
    last: str
    why: str


def instants_of(timeline: Timeline | None, history: MemoryHistory | None) -> tuple[Instant, ...]:
    """Return a few instants, each the highest of its interval; the peak is among them."""
    if history is not None:
        history = history.thinned(_INSTANTS, len(history.lifetimes))
        timeline = history.timeline
    if timeline is None:
        return ()
    few = timeline.thinned(_INSTANTS)
    return tuple(
        Instant(
            when=f"~{format_seconds(few.seconds[i])}",
            phase=few.phases[i].value,
            nbytes=few.nbytes[i],
            largest=", ".join(
                f"{where_of(one.tensor)} ~{format_bytes(one.tensor.nbytes)}"
                for one in (history.alive_at(i)[:3] if history is not None else ())
            ),
        )
        for i in range(len(few.nbytes))
    )


def lifetimes_of(history: MemoryHistory) -> tuple[LifetimeRow, ...]:
    """Return the largest tensors with their lifetimes."""
    largest = sorted(history.lifetimes, key=lambda one: (-one.tensor.nbytes, one.first))
    seconds = history.timeline.seconds
    return tuple(
        LifetimeRow(
            nbytes=one.tensor.nbytes,
            where=where_of(one.tensor),
            line=one.tensor.line,
            what=short_op(one.tensor.what),
            first=f"~{format_seconds(seconds[one.first])}",
            last=f"~{format_seconds(seconds[one.last])}",
            why=reason_of(one),
        )
        for one in largest[:_LIFETIMES]
    )


def ranks_of(spans: Sequence[Span]) -> tuple[list[RankRow], int]:
    """Return the ranks that are drawn, and how many are not."""
    rows = by_rank(spans)
    return rows[:MOST_RANKS], max(0, len(rows) - MOST_RANKS)


def module_times_of(spans: Sequence[Span]) -> tuple[ModuleTime, ...]:
    """Return the largest times by module, of the ranks that are drawn."""
    found = [time for time in times_of(spans) if time.rank < MOST_RANKS]
    longest = sorted(found, key=lambda time: -time.seconds)[:_TIMES]
    return tuple(time for time in found if time in longest)


def where_of(tensor: LiveTensor) -> str:
    """Return the module of a tensor, or its role in parentheses, as in the table of the peak."""
    if tensor.path:
        return tensor.path
    return "(the loss)" if tensor.line else f"({tensor.role.value})"


def reason_of(one: Lifetime) -> str:
    """Explain why a tensor is alive."""
    role = one.tensor.role
    if role is not Role.ACTIVATION:
        return _REASONS[role]
    if not one.last_use:
        return "is read after this pass, such as a gradient or the loss"
    where = f" in {starred_path(one.last_path)}" if one.last_path else ""
    use = f"{short_op(one.last_use)}{where}"
    return (
        f"saved for the backward pass: last read by {use}"
        if one.is_saved
        else f"last read by {use}"
    )


_REASONS = {
    Role.PARAMETER: "the weights stay for the whole step",
    Role.BUFFER: "stays for the whole step",
    Role.BATCH: "the batch stays for the whole step",
    Role.CONSTANT: "a constant of the graph",
    Role.TANGENT: "the gradient of the loss with respect to itself",
    Role.GRADIENT: "gradients stay until the optimizer has used them",
    Role.STATE: "the optimizer keeps it from step to step",
}
