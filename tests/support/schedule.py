"""Another file of the user, with a number that a loss reads through an imported function."""

from torch import Tensor

FACTOR = 1.0


def weighed(x: Tensor) -> Tensor:
    return x * FACTOR
