"""Prediction errors for a device class on published steps, and the cases for which they are valid.

The figures are in preset/calibration.toml, which benchmarks/published/presets.py writes. Not for
the fitted values: see efficiency.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

# The largest of n exchangeable errors bounds a new one with probability n / (n + 1). Fewer errors
# than this therefore cannot bound nine cases of ten (split conformal prediction, Vovk et al.,
# "Algorithmic Learning in a Random World", 2005).
ENOUGH_ROWS = 9
COVERED = 0.9
# A declared rate may be wrong by half, up or down. Published steps of another precision give no
# better bound.
DECLARED_DOUBT = 0.5


class Parallelism(StrEnum):
    """The kind of parallelism of a layout, which prediction accuracy depends on."""

    DATA = "data parallel"
    TENSOR = "tensor parallel"
    PIPELINE = "pipeline parallel"
    BOTH = "tensor and pipeline parallel"

    @classmethod
    def of(cls, *, tensor: int, pipeline: int) -> "Parallelism":
        """Return the kind of a layout of these degrees."""
        if pipeline > 1:
            return cls.BOTH if tensor > 1 else cls.PIPELINE
        return cls.TENSOR if tensor > 1 else cls.DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCase:
    """One step, described by the properties that decide whether a calibration covers it."""

    kind: Parallelism
    precision: str
    parameters: int
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A set of published steps. ``parameters`` and ``devices`` are (least, most)."""

    rows: int
    software: tuple[str, ...]
    models: tuple[str, ...]
    kinds: tuple[str, ...]
    precisions: tuple[str, ...]
    parameters: tuple[int, int]
    devices: tuple[int, int]

    def outside(self, case: CalibrationCase) -> Iterator[str]:
        """Yield, in words, each property in which a case differs from all of these steps."""
        if case.kind.value not in self.kinds:
            yield case.kind.value
        if case.precision not in self.precisions:
            yield f"products in {case.precision}"
        if not _is_within(case.parameters, self.parameters):
            yield f"{_count(case.parameters)} parameters"
        if not _is_within(case.devices, self.devices):
            yield f"{case.devices:,} devices"

    @property
    def said(self) -> str:
        models = _join(self.models)
        devices = _range(self.devices)
        layouts, precisions = _join(self.kinds), _join(self.precisions)
        steps = f"{self.rows} published step{'s' if self.rows > 1 else ''}"
        return f"{steps} ({models}; {_join(self.software)}; {layouts}; {precisions}; {devices})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Prediction errors on steps that nothing was fitted on.

    ``inside``: the steps resemble the fitted ones and used the same software. ``kind`` is empty for
    several kinds. ``median_error`` and ``high_error`` (90th percentile) are errors of predicted
    relative to measured times, without sign; ``bias`` is the median with its sign. ``doubt`` bounds
    the relative difference of nine of ten such steps; None for too few of them. ``worst_software``
    is the software whose median error exceeds ``doubt`` most, and ``worst_error`` that error; empty
    if none exceeds it.
    """

    kind: str
    inside: bool
    domain: Domain
    median_error: float
    high_error: float
    bias: float
    doubt: float | None
    worst_software: str = ""
    worst_error: float = 0.0

    @property
    def said(self) -> str:
        worst = f", {percent(self.high_error)} at the 90th percentile" if self.doubt else ""
        sign = "long" if self.bias > 0 else "short"
        bias = f", {percent(abs(self.bias))} too {sign} at the median"
        odd = ""
        if self.worst_software:
            odd = f", those of {self.worst_software} by a median of {percent(self.worst_error)}"
        return f"missed by a median of {percent(self.median_error)}{worst}{bias}{odd}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Errors of the predicted ratio of two steps with the same software stack.

    ``high_error`` is the 90th percentile over ``count`` pairs of layouts, of one kind or of two.
    """

    count: int
    high_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    fitted: Domain
    scores: tuple[Score, ...]
    alike: Pairs | None = None
    unlike: Pairs | None = None

    def outside(self, case: CalibrationCase) -> tuple[str, ...]:
        return tuple(self.fitted.outside(case))

    def score_of(self, case: CalibrationCase) -> Score | None:
        """Return the score of those steps that are most similar and numerous enough."""
        wanted = [(False, case.kind.value), (False, "")]
        if not self.outside(case):
            wanted.insert(0, (True, ""))
        enough = {(s.inside, s.kind): s for s in self.scores if s.doubt is not None}
        return next((enough[key] for key in wanted if key in enough), None)

    def doubt_of(self, case: CalibrationCase) -> float:
        score = self.score_of(case)
        if score is None or score.doubt is None:
            return DECLARED_DOUBT
        precisions = {p for score in self.scores for p in score.domain.precisions}
        kinds = {kind for s in self.scores for kind in (s.kind, *s.domain.kinds)}
        is_known = case.precision in precisions | set(self.fitted.precisions)
        is_known &= case.kind.value in kinds | set(self.fitted.kinds)
        return score.doubt if is_known else max(score.doubt, DECLARED_DOUBT)

    def between(self, one: Parallelism, other: Parallelism) -> float:
        """Return the relative difference of two predictions above which their order is reliable."""
        pairs = self.alike if one is other else self.unlike
        known = [found.high_error for found in (pairs, self.unlike, self.alike) if found]
        return known[0] if known else DECLARED_DOUBT


def percent(share: float) -> str:
    """Return ``2.2 %``; from ten on without decimals."""
    return (
        f"{share:.0%}".replace("%", " %") if share >= 0.0995 else f"{share:.1%}".replace("%", " %")
    )


def _is_within(amount: int, bounds: tuple[int, int]) -> bool:
    """True if ``amount`` is within ``bounds``, compared with two significant digits."""
    least, most = (float(f"{bound:.1e}") for bound in bounds)
    return least <= float(f"{amount:.1e}") <= most


def _count(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:,}"


def _range(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return f"{least:,} devices" if least == most else f"{least:,} to {most:,} devices"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)
