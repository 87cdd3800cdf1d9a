"""Selects values worth reading in slices: those that would be alive near the peak as a whole.

If a product has enough memory in every plan, it gains nothing from slices, and each additional mode
of a value makes the search larger. Not for the number of slices: see trades/.
"""

from collections.abc import Mapping

from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.lower_bound import unavoidable_bytes

# A share of the maximum over all lines. If the unavoidable bytes of a line are fewer, it has free
# memory when the peak line has none.
_THRESHOLD_SHARE = 0.9


def worth_slicing(estimator: FastEstimator, slices: Mapping[str, int]) -> dict[str, int]:
    """Return the values read at a line where every plan holds nearly the maximum.

    This is checked once with all gradients on the device, and once with none.
    """
    found: dict[str, int] = {}
    for persistent in (estimator.persistent, estimator.persistent - estimator.gradients):
        nbytes = unavoidable_bytes(estimator, persistent)
        threshold = _THRESHOLD_SHARE * float(nbytes.max(initial=0.0))
        for value in slices.keys() - found.keys():
            (storage,) = estimator.storages_of([value])
            in_backward = nbytes[
                estimator.backward_first[storage] : estimator.backward_last[storage] + 1
            ]
            if in_backward.max(initial=0.0) >= threshold:
                found[value] = slices[value]
    return found
