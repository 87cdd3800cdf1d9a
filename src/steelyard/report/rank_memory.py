"""Predicted and measured memory per rank: all ranks if they are few, else the worst and a range.

Not for the rank with the highest predicted peak, which the main table shows: see amounts_table.py.
"""

from collections.abc import Sequence

from steelyard.plans.receipt import RankMemory
from steelyard.units import format_bytes, format_share

# Up to _MOST ranks are shown one by one; if there are more, only the _FEW with the largest misses
# are shown.
_MOST, _FEW = 8, 3


def lines_of(ranks: Sequence[RankMemory]) -> tuple[str, ...]:
    """Return one line for each rank that is shown, and one for the others."""
    shown = shown_of(ranks)
    rest = [one for one in ranks if one not in shown]
    return (*map(_line, shown), *([_range(rest)] if rest else []))


def shown_of(ranks: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    if len(ranks) <= _MOST:
        return tuple(ranks)
    worst = sorted(ranks, key=lambda one: (-abs(one.miss or 0.0), one.rank))[:_FEW]
    return tuple(sorted(worst, key=lambda one: one.rank))


def _line(one: RankMemory) -> str:
    predicted = f"~{format_bytes(one.predicted_bytes)}"
    if one.measured_bytes is None:
        return f"rank {one.rank} not measured, predicted {predicted}"
    miss = "" if one.miss is None else f", {format_share(one.miss)}"
    return (
        f"rank {one.rank} measured {format_bytes(one.measured_bytes)}, predicted {predicted}{miss}"
    )


def _range(rest: Sequence[RankMemory]) -> str:
    measured = [one.measured_bytes for one in rest if one.measured_bytes is not None]
    predicted = f"predicted {_between([one.predicted_bytes for one in rest], '~')}"
    head = f"{len(rest)} more ranks"
    if not measured:
        return f"{head} not measured, {predicted}"
    some = f" ({len(measured)} of them)" if len(measured) < len(rest) else ""
    misses = [one.miss for one in rest if one.miss is not None]
    miss = f", {format_share(min(misses))} to {format_share(max(misses))}" if misses else ""
    return f"{head} measured{some} {_between(measured, '')}, {predicted}{miss}"


def _between(nbytes: Sequence[int], mark: str) -> str:
    low, high = (f"{mark}{format_bytes(n)}" for n in (min(nbytes), max(nbytes)))
    return low if low == high else f"{low} to {high}"
