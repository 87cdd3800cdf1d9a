"""The inverse question: the largest batch, or the longest sequence, that fits the budget.

There are no batches of other sizes, so they are represented by shapes without values. Not for the
search at one shape: see search/.
"""

from dataclasses import replace

from steelyard.capture.batch.resizing import impossible, sizes_of
from steelyard.errors import BudgetError, CaptureRefused, Infeasible
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.planner.planner import Planner
from steelyard.planner.session import PlanningSession, PlanRequest
from steelyard.plans.budget import Maximize
from steelyard.plans.plan import Plan
from steelyard.trades import TRADES
from steelyard.units import format_bytes

# Upper limit of the sizes that are tried, as a multiple of the given size.
_MAX_MULTIPLE = 1 << 12
# Gradient accumulation is left out: any batch fits if it is split into small enough micro-batches,
# so the answer would say nothing. Lossy trades are left out because the loss drift is unknown for a
# batch without values.
IN_ONE_PIECE = tuple(
    trade for trade in TRADES if not issubclass(trade.rule, MicroBatches) and trade.is_exact
)


def largest(request: PlanRequest, maximize: Maximize) -> tuple[Planner, Plan]:
    """Return the planner of the largest step that fits, and its plan.

    The returned size was planned, and the next size was found to be infeasible; nothing is
    extrapolated.
    """
    if request.budget.memory_bytes is None:
        raise BudgetError(
            f"the search for the largest {maximize} needs a memory budget",
            expected="a bound on memory",
            remedy='add one: --memory 2GiB, or budget=Budget(memory="2 GiB") in Python',
        )
    attempts = _Attempts(request, maximize)
    low, high = attempts.bracket()
    while high - low > 1:
        middle = attempts.guess(low, high)
        low, high = (middle, high) if attempts.fits(middle) else (low, middle)
    if low == 0:
        raise attempts.nothing_fits()
    planner = Planner(attempts.fitting())
    summary = f"largest {maximize} that fits without splitting: {low} (now {attempts.now})"
    if high in attempts.why:
        summary += f"; {high} is not possible: {attempts.why[high]}"
    if request.budget.accuracy_loss:
        summary += "; no value is kept in 8 bits, because a batch without values cannot be probed"
    return planner, replace(planner.plan(request.budget), largest=summary)


class _Attempts:
    """The sizes tried so far: the least memory of each, and why a size is impossible.

    A size is impossible if it cannot be captured or run with any amount of memory. The last size
    that fits is the largest one, and only that one is planned.
    """

    def __init__(self, request: PlanRequest, maximize: Maximize) -> None:
        self._request = replace(request, trades=IN_ONE_PIECE)
        self._sizes = sizes_of(request.batch, maximize)
        self._maximize = maximize
        self._least: dict[int, int] = {}
        self.now = self._sizes.now
        self.why: dict[int, str] = {}
        self._fitting: PlanningSession | None = None

    def bracket(self) -> tuple[int, int]:
        """Return a size that fits (0 if none is known) and a larger one that does not fit."""
        if not self.fits(self.now):
            return 0, self.now
        low, high = self.now, 2 * self.now
        while high <= self.now * _MAX_MULTIPLE and self.fits(high):
            low, high = high, max(self.guess(high, high * 8), high * 2)
        return low, high

    def fitting(self) -> PlanningSession:
        """The planning session of the largest step that fits."""
        assert self._fitting is not None, "a size fits, or nothing_fits is raised"
        return self._fitting

    def nothing_fits(self) -> Infeasible:
        """Return the error that names the smallest possible size and its least memory.

        A batch of one sample may be impossible, for example with BatchNorm.
        """
        # If every size was impossible, no size has a least memory.
        size, least = min(self._least.items(), default=(self.now, None))
        smaller = max((tried for tried in self.why if tried <= size), default=None)
        impossible = "" if smaller is None else f"; {smaller} is not possible: {self.why[smaller]}"
        return Infeasible(
            f"not even a {self._maximize} of {size} fits {self._request.budget}{impossible}",
            expected=f"at least ~{format_bytes(least)} for {size}" if least else "a possible size",
            remedy="allow more memory, or use an optimizer with less state",
            least_bytes=least,
        )

    def guess(self, low: int, high: int) -> int:
        """Return the size at which the least memory reaches the budget, by linear interpolation.

        The result is between ``low`` and ``high``. If ``high`` is impossible, its memory is
        unknown and the result is the middle.
        """
        limit = self._request.budget.memory_bytes
        assert limit is not None
        known = sorted(self._least.items())
        if len(known) > 1 and high not in self.why:
            (a, at_a), (b, at_b) = known[-2:] if low >= known[-1][0] else _around(known, low)
            if at_b > at_a:
                crossing = a + int((limit - at_a) * (b - a) / (at_b - at_a))
                return min(max(crossing, low + 1), high - 1)
        return (low + high) // 2

    def fits(self, size: int) -> bool:
        limit = self._request.budget.memory_bytes
        assert limit is not None
        self._request.on_progress(f"trying {self._maximize} {size}")
        batch = self._request.batch if size == self.now else self._sizes.at(size)
        quiet = replace(self._request, batch=batch, on_progress=lambda _: None)
        try:
            session = quiet.capture_and_price()
        except CaptureRefused as refused:
            if size == self.now:
                raise
            self.why[size] = refused.happened
            return False
        reason = impossible(session.base.graph)
        if reason:
            self.why[size] = reason
            return False
        least = session.search.least_bytes(enough_bytes=limit)
        self._least[size] = least
        if least > limit:
            return False
        self._fitting = session
        return True


def _around(known: list[tuple[int, int]], low: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the known sizes just below and just above ``low``, each with its memory."""
    above = next(i for i, (size, _) in enumerate(known) if size > low)
    return (known[above - 1], known[above]) if above else (known[0], known[1])
