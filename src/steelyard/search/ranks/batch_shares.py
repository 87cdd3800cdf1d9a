"""The split of the batch over ranks of unequal speed.

The search starts from shares in proportion to the speed of each rank, in whole units of samples. It
then corrects them by the predicted times, because a small share takes longer than its proportion.
Every trial captures the step at new sizes, so few are made. Not for how ranks communicate: see
layout_search.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

# The largest number of splits that are priced. After the first, they differ by little.
_MAX_TRIES = 3
# With fewer units, rounding a share by half a unit would cost some hundredths of a step. With more,
# the shares have smaller common divisors and can be cut into fewer numbers of micro-batches.
_UNITS_PER_RANK = 24
# The maximum ratio of the largest share to an equal share, on equally fast ranks.
_MAX_EXCESS = 1.02
# Prices at other sizes are measured separately, so a predicted gain below this share may be noise.
_MIN_GAIN = 0.02
# Maximum number of speeds in a message.
_MAX_DESCRIBED = 3

Shares = tuple[int, ...]
# Maps shares to the seconds of the step and the busy seconds of each rank.
Timed = Callable[[Shares], tuple[float, Sequence[float]]]


def units_for(ranks: int, possible: Sequence[int]) -> int:
    """Return the number of equal units to split the batch into, chosen from ``possible``."""
    enough = (units for units in possible if units >= _UNITS_PER_RANK * ranks)
    return next(enough, possible[-1])


def near_equal_shares(ranks: int, possible: Sequence[int]) -> Shares | None:
    """Return nearly equal shares for equally fast ranks whose number does not divide the batch.

    A batch of 8 on three ranks becomes 3, 3 and 2. The shares use the smallest possible number of
    units for which the largest share hardly exceeds an equal share, because batches of other sizes
    must also divide into these units. None is returned if there are fewer units than ranks.
    """
    enough = [units for units in possible if units >= ranks]
    if not enough:
        return None
    excess = {units: -(-units // ranks) * ranks / units for units in enough}
    least = min(excess.values())
    units = next(n for n in sorted(enough) if excess[n] <= max(_MAX_EXCESS, least))
    return in_whole_units(units, [1.0] * ranks)


def unequal_shares(units: int, whole_seconds: Sequence[float], timed: Timed) -> Shares | None:
    """Return the fastest shares found, or None if the ranks should have equal shares.

    ``whole_seconds`` is the time that each rank would need for the whole batch.
    """
    tried: dict[Shares, tuple[float, Sequence[float]]] = {}
    shares: Shares | None
    shares = best = in_whole_units(units, [1 / seconds for seconds in whole_seconds])
    if len(set(shares)) == 1:
        return None
    while shares is not None and len(tried) < _MAX_TRIES:
        tried[shares] = _with_consistent_prices(units, whole_seconds, shares, *timed(shares))
        if tried[shares][0] < (1 - _MIN_GAIN) * tried[best][0]:
            best = shares
        neighbors = _neighbors(units, best, tried[best][1])
        unequal = (each for each in neighbors if len(set(each)) > 1)
        shares = next((each for each in unequal if each not in tried), None)
    return best


def in_whole_units(units: int, weights: Sequence[float]) -> Shares:
    """Round ``weights`` to shares of ``units`` by largest remainder, with at least one unit
    each.
    """
    assert units >= len(weights), "one for each rank"
    total = sum(weights)
    exact_shares = [units * weight / total for weight in weights]
    shares = [max(1, int(exact)) for exact in exact_shares]
    while (missing := units - sum(shares)) != 0:
        shortfalls = [exact - share for exact, share in zip(exact_shares, shares, strict=True)]
        adjustable = [n for n, share in enumerate(shares) if missing > 0 or share > 1]
        chosen = (
            max(adjustable, key=shortfalls.__getitem__)
            if missing > 0
            else min(adjustable, key=shortfalls.__getitem__)
        )
        shares[chosen] += 1 if missing > 0 else -1
    return tuple(shares)


def _with_consistent_prices(
    units: int,
    whole_seconds: Sequence[float],
    shares: Shares,
    seconds: float,
    works: Sequence[float],
) -> tuple[float, list[float]]:
    """Raise predicted times for which a small share would cost less per unit than a larger one.

    Such times come from measurements at moments when the machine ran at different speeds. The
    higher time per unit is used.
    """
    most_per_unit = 1 / units
    seconds_of = list(works)
    for n in sorted(range(len(shares)), key=lambda n: -shares[n]):
        of_unit = works[n] / whole_seconds[n] / shares[n]
        most_per_unit = max(most_per_unit, of_unit)
        seconds_of[n] *= most_per_unit / of_unit
    return seconds + max(seconds_of) - max(works), seconds_of


def _neighbors(units: int, shares: Shares, works: Sequence[float]) -> Iterator[Shares]:
    """Yield shares close to these, the most promising first.

    The first candidate is proportional to the units per second found for each rank. The others
    move one unit from the busiest rank to the least busy one, and one unit in the opposite
    direction.
    """
    yield in_whole_units(units, [n / took for n, took in zip(shares, works, strict=True)])
    longest = max(range(len(works)), key=works.__getitem__)
    shortest = min(reversed(range(len(works))), key=works.__getitem__)
    for source, target in ((longest, shortest), (shortest, longest)):
        if shares[source] > 1:
            moved = list(shares)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def describe_speeds(whole_seconds: Sequence[float], ranks: Sequence[int] = ()) -> str:
    """Describe the ranks slower than the fastest, with runs of equally fast ranks combined.

    ``ranks`` are the rank numbers if these are not the first ranks.
    """
    names = ranks or range(len(whole_seconds))
    fastest = min(range(len(whole_seconds)), key=whole_seconds.__getitem__)
    speeds = [f"{whole_seconds[fastest] / seconds:.2f}" for seconds in whole_seconds]
    parts, first = [], 0
    for speed, equal in groupby(speeds):
        last = first + len(list(equal)) - 1
        if speed != speeds[fastest]:
            some = f"rank {names[first]} computes"
            if last > first:
                some = f"ranks {names[first]} to {names[last]} compute"
            parts.append(f"{some} at {speed} times the speed of rank {names[fastest]}")
        first = last + 1
    more = len(parts) - _MAX_DESCRIBED
    return ", ".join(parts[:_MAX_DESCRIBED]) + (f" and {more} more" if more > 0 else "")
