"""How much of the batch each rank takes, where ranks are of unequal speed.

Begins where each would take as long by its speed alone, in whole units of samples, and moves on by
what the shares are then predicted to take: small ones take longer than their part. Each step is a
capture at new sizes, so few are tried. Not for how the ranks exchange: see layout_search.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

# Of whole batches shared out; from the second on they differ by little.
_TRIES = 3
# Of fewer units a rank might be half of one off, some hundredths of a step; of more, shares have
# less in common, and could be cut into fewer micro-batches.
_UNITS_OF_A_RANK = 24
# So much more than its part the largest share of ranks that are alike may be.
_EXCESS = 1.02
# Prices at other sizes are measured anew: for so little of a difference, no others are taken.
_DOUBT = 0.02
# Of a long list of speeds, what is still read.
_MOST_SAID = 3

Shares = tuple[int, ...]
# Of some shares: what the step takes, and what each rank works in it.
Timed = Callable[[Shares], tuple[float, Sequence[float]]]


def units_for(ranks: int, possible: Sequence[int]) -> int:
    """Into how many of the possible numbers of equal units the batch is cut, to be shared out."""
    enough = (units for units in possible if units >= _UNITS_OF_A_RANK * ranks)
    return next(enough, possible[-1])


def near_equal_shares(ranks: int, possible: Sequence[int]) -> Shares | None:
    """Shares of a batch that has no equal ones for as many ranks, which are equally fast: 3, 3 and
    2 of a batch of 8. In the fewest of the possible numbers of units in which the largest share is
    hardly more than its part, since batches of other sizes have to divide into them as well. None
    where there are fewer units than ranks."""
    enough = [units for units in possible if units >= ranks]
    if not enough:
        return None
    excess = {units: -(-units // ranks) * ranks / units for units in enough}
    least = min(excess.values())
    units = next(n for n in sorted(enough) if excess[n] <= max(_EXCESS, least))
    return in_whole_units(units, [1.0] * ranks)


def unequal_shares(units: int, whole_seconds: Sequence[float], timed: Timed) -> Shares | None:
    """The fastest of those tried; None where equal ones are all that the speeds ask for.
    ``whole_seconds`` is what each rank would take for the whole batch."""
    tried: dict[Shares, tuple[float, Sequence[float]]] = {}
    shares: Shares | None
    shares = best = in_whole_units(units, [1 / seconds for seconds in whole_seconds])
    if len(set(shares)) == 1:
        return None
    while shares is not None and len(tried) < _TRIES:
        tried[shares] = _put_right(units, whole_seconds, shares, *timed(shares))
        if tried[shares][0] < (1 - _DOUBT) * tried[best][0]:
            best = shares
        further = _near(units, best, tried[best][1])
        unequal = (each for each in further if len(set(each)) > 1)
        shares = next((each for each in unequal if each not in tried), None)
    return best


def in_whole_units(units: int, weights: Sequence[float]) -> Shares:
    """The nearest by largest remainders; each takes one at least."""
    assert units >= len(weights), "one for each rank"
    total = sum(weights)
    ideal = [units * weight / total for weight in weights]
    shares = [max(1, int(part)) for part in ideal]
    while (missing := units - sum(shares)) != 0:
        off = [part - share for part, share in zip(ideal, shares, strict=True)]
        able = [n for n, share in enumerate(shares) if missing > 0 or share > 1]
        chosen = max(able, key=off.__getitem__) if missing > 0 else min(able, key=off.__getitem__)
        shares[chosen] += 1 if missing > 0 else -1
    return tuple(shares)


def _put_right(
    units: int,
    whole_seconds: Sequence[float],
    shares: Shares,
    seconds: float,
    works: Sequence[float],
) -> tuple[float, list[float]]:
    """No share takes less than its part of a larger one: where prices of two sizes say so, they
    were measured while the machine was not as fast, and it is the larger price that is believed."""
    larger = 1 / units
    least = list(works)
    for n in sorted(range(len(shares)), key=lambda n: -shares[n]):
        of_unit = works[n] / whole_seconds[n] / shares[n]
        larger = max(larger, of_unit)
        least[n] *= larger / of_unit
    return seconds + max(least) - max(works), least


def _near(units: int, shares: Shares, works: Sequence[float]) -> Iterator[Shares]:
    """By what a unit was found to take on each rank; one unit from where most is worked to where
    least is; and one back."""
    yield in_whole_units(units, [n / took for n, took in zip(shares, works, strict=True)])
    longest = max(range(len(works)), key=works.__getitem__)
    shortest = min(reversed(range(len(works))), key=works.__getitem__)
    for source, target in ((longest, shortest), (shortest, longest)):
        if shares[source] > 1:
            moved = list(shares)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def speeds_said(whole_seconds: Sequence[float], ranks: Sequence[int] = ()) -> str:
    """Beside the fastest, those that are alike together; ``ranks`` are their numbers, where they
    are not the first ones."""
    names = ranks or range(len(whole_seconds))
    fastest = min(range(len(whole_seconds)), key=whole_seconds.__getitem__)
    speeds = [f"{whole_seconds[fastest] / seconds:.2f}" for seconds in whole_seconds]
    said, first = [], 0
    for speed, alike in groupby(speeds):
        last = first + len(list(alike)) - 1
        if speed != speeds[fastest]:
            some = f"rank {names[first]} computes"
            if last > first:
                some = f"ranks {names[first]} to {names[last]} compute"
            said.append(f"{some} at {speed} of rank {names[fastest]}")
        first = last + 1
    more = len(said) - _MOST_SAID
    return ", ".join(said[:_MOST_SAID]) + (f" and {more} more" if more > 0 else "")
