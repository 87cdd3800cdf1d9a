"""The zoo: models, losses and batches that tests and benchmarks share.

`CASES` must be captured and trained like eager PyTorch; `REFUSED` must be refused with an error
that a person can act on. `case("gpt")` finds one by name. Inside, imports are relative: the package
works as `tests.zoo` (the repository on the path) and as `zoo` (tests/ on the path).
"""

from __future__ import annotations

from . import edge, hf, own, reference
from .case import Case, Loss, Sample, Scale

OWN: tuple[Case, ...] = own.CASES
HF: tuple[Case, ...] = hf.CASES
EDGE: tuple[Case, ...] = edge.CASES
REFUSED: tuple[Case, ...] = edge.REFUSED + hf.REFUSED
CASES: tuple[Case, ...] = OWN + HF + EDGE


def case(name: str) -> Case:
    """The case of that name, refused ones included."""
    named = {entry.name: entry for entry in CASES + REFUSED}
    if name not in named:
        raise ValueError(f"no case {name!r} in the zoo; it has {', '.join(named)}")
    return named[name]


__all__ = [
    "CASES",
    "EDGE",
    "HF",
    "OWN",
    "REFUSED",
    "Case",
    "Loss",
    "Sample",
    "Scale",
    "case",
    "reference",
]
