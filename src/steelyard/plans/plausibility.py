"""Figures that no plan and no run can have, found in what a file says.

Types and keys are checked before, by pydantic; here are bounds, and laws between values. Not for
whether a prediction is good: any that is possible passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import islice

from steelyard.ir.metrics import Estimate, Metrics
from steelyard.plans.accuracy import is_word
from steelyard.plans.peak_memory import PeakMemory, Timeline
from steelyard.plans.plan import FrontierPoint, Plan, Prediction
from steelyard.plans.receipt import RunMeasurement
from steelyard.plans.trade import Remaining
from steelyard.safe_files import where
from steelyard.units import format_bytes, format_seconds

MOST_INSTANTS = 4096
# 4 EiB and whole numbers as in a plan file; three centuries.
_MOST, _MOST_SECONDS = 2**62, 1e10
# FLOPs: a thousand times those of the largest training. A step: as many as a checkpoint can name.
_MOST_BY_NAME = {
    "flops": 1e30,
    "steps": 10**12,
    "first_step": 10**12,
    "num_offers": 10**6,
    "micro_batches": 10**9,
    "slowdown": 1e6,
    "first_loss": 1e38,
    "last_loss": 1e38,
}
_MOST_PROBLEMS = 100
# Beside the plan without it, a trade may pay or buy less than nothing; a loss may be below zero.
_SIGNED = frozenset({"buys_bytes", "pays_seconds", "buys_seconds", "first_loss", "last_loss"})
_AT_LEAST_ONE = frozenset({"first_step", "micro_batches"})

_Place = tuple[str | int, ...]
_Problem = tuple[_Place, str]


def implausible(plan: Plan, measured: RunMeasurement | None) -> list[str]:
    """One line for each value that cannot be, with its place in the file."""
    values = [
        found
        for root, value in (("plan", plan), ("measured", measured))
        for found in _values(value, (root,))
    ]
    # Laws between values hold for numbers within bounds; they may be beyond what a float holds.
    found = _said(problem for value, place in values for problem in _number(value, place))
    return found or _said(problem for value, place in values for problem in _law(value, place))


def _said(problems: Iterator[_Problem]) -> list[str]:
    return [f"{where(place)} {said}" for place, said in islice(problems, _MOST_PROBLEMS)]


def _values(value: object, place: _Place) -> Iterator[tuple[object, _Place]]:
    """All values within, each behind what it is a part of."""
    yield value, place
    if isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _values(inner, (*place, index))
    elif is_dataclass(value):
        for field in fields(value):
            # The decisions stand in a file of their own, and were checked when that was read.
            if field.name != "decisions":
                yield from _values(getattr(value, field.name), (*place, field.name))


def _law(value: object, place: _Place) -> Iterator[_Problem]:
    for kind, problems in _LAWS.items():
        if isinstance(value, kind):
            yield from (((*place, *inner), said) for inner, said in problems(value))


def _number(value: object, place: _Place) -> Iterator[_Problem]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name = next(part for part in reversed(place) if isinstance(part, str))
    # An interval has its unit from what it is of.
    name = str(place[-2]) if name in ("value", "low", "high") else name
    most = _MOST_BY_NAME.get(name, _MOST_SECONDS if name.endswith("seconds") else _MOST)
    least = -most if name in _SIGNED else 1 if name in _AT_LEAST_ONE else 0
    if not least <= value <= most:
        shown = f"{value:g}" if abs(value) < 1e300 else "a number of more than 300 digits"
        yield place, f"is {shown}, not between {least:g} and {most:g}"


def _of_plan(plan: Plan) -> Iterator[_Problem]:
    left = [refusal.left for refusal in plan.refused]
    refused = sum(1 for how in left if how is not Remaining.NEVER)
    for what, count in (("taken", len(plan.taken)), ("refused", refused)):
        if count > plan.num_offers:
            yield (what,), f"has {count} offers, and there were {plan.num_offers}"


def _of_prediction(prediction: Prediction) -> Iterator[_Problem]:
    memory, peak = prediction.metrics.memory_bytes, prediction.peak.nbytes
    if not memory.low <= peak <= memory.high:
        said = f"is {format_bytes(peak)}, outside the interval of memory_bytes"
        yield ("peak", "nbytes"), said
    timeline = prediction.timeline
    if timeline is not None and max(timeline.nbytes, default=0) > 2 * max(peak, memory.high):
        yield ("timeline", "nbytes"), f"is more than twice the peak of {format_bytes(peak)}"


def _of_quad(metrics: Metrics) -> Iterator[_Problem]:
    if not is_word(metrics.accuracy_loss):
        yield ("accuracy_loss",), "is no word for an accuracy loss, such as exact"
    # They are estimated each by itself, so one may be slightly above the other.
    most = 2 * metrics.step_seconds.high
    for name in ("computation_seconds", "exposed_communication_seconds"):
        part: Estimate = getattr(metrics, name)
        if part.value > most:
            took = format_seconds(metrics.step_seconds.value)
            yield (name,), f"is {format_seconds(part.value)}, in a step of {took}"


def _of_point(point: FrontierPoint) -> Iterator[_Problem]:
    if not is_word(point.accuracy_loss):
        yield ("accuracy_loss",), "is no word for an accuracy loss, such as exact"


def _of_peak(peak: PeakMemory) -> Iterator[_Problem]:
    if peak.resident_bytes > peak.nbytes:
        yield ("resident_bytes",), f"is more than the peak of {format_bytes(peak.nbytes)}"
    for index, holding in enumerate(peak.alive):
        if holding.nbytes > peak.nbytes:
            said = f"is more than the peak of {format_bytes(peak.nbytes)}"
            yield ("alive", index, "nbytes"), said


def _of_timeline(timeline: Timeline) -> Iterator[_Problem]:
    counts = {len(timeline.seconds), len(timeline.nbytes), len(timeline.phases)}
    if len(counts) > 1:
        yield (), "has not as many seconds as nbytes and phases"
    if max(counts) > MOST_INSTANTS:
        yield (), f"has {max(counts)} instants, and at most {MOST_INSTANTS} may stand"
    if any(a > b for a, b in zip(timeline.seconds, timeline.seconds[1:])):
        yield ("seconds",), "does not ascend"


def _of_measured(measured: RunMeasurement) -> Iterator[_Problem]:
    if measured.first_step > measured.steps + 1:
        yield ("first_step",), f"is {measured.first_step}, beyond the last, {measured.steps}"


_LAWS: dict[type, Callable[..., Iterator[_Problem]]] = {
    Plan: _of_plan,
    Prediction: _of_prediction,
    Metrics: _of_quad,
    FrontierPoint: _of_point,
    PeakMemory: _of_peak,
    Timeline: _of_timeline,
    RunMeasurement: _of_measured,
}
