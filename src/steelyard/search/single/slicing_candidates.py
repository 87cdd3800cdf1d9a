"""Which values are worth reading in slices: those that, whole, are near where most must be.

A product that has room enough in every plan gains nothing, and each way for a value to go makes the
search look at more. Not for how many slices: see trades/.
"""

from collections.abc import Mapping

from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.lower_bound import surely_held

# Of what some line holds in every plan; a line that must hold less has room where others have none.
_SHARE = 0.9


def worth_slicing(tally: FastEstimator, slices: Mapping[str, int]) -> dict[str, int]:
    """Of these values, those read where at least so much is held whatever is made again or moved:
    with all gradients near, or with none."""
    found: dict[str, int] = {}
    for staying in (tally.staying, tally.staying - tally.gradients):
        held = surely_held(tally, staying)
        enough = _SHARE * float(held.max(initial=0.0))
        for value in slices.keys() - found.keys():
            (storage,) = tally.storages_of([value])
            late = held[tally.late_first[storage] : tally.late_last[storage] + 1]
            if late.max(initial=0.0) >= enough:
                found[value] = slices[value]
    return found
