"""Finds values in a plan's files that no plan and no run can have.

Before that, pydantic checks types and keys; this module checks bounds and relations between values.
Not for the quality of predictions: any possible value passes.
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
# Bytes: 4 EiB, and whole numbers as in a plan file. Seconds: three centuries.
_MOST, _MOST_SECONDS = 2**62, 1e10
# FLOPs: a thousand times those of the largest training. Steps: as many as a checkpoint can name.
_LIMIT_BY_NAME = {
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
# Compared with the plan without it, a trade may pay or buy a negative amount; a loss may be
# negative too.
_SIGNED = frozenset({"buys_bytes", "pays_seconds", "buys_seconds", "first_loss", "last_loss"})
_AT_LEAST_ONE = frozenset({"first_step", "micro_batches"})

_Place = tuple[str | int, ...]
_Problem = tuple[_Place, str]


def implausible(plan: Plan, measured: RunMeasurement | None) -> list[str]:
    """Return one line for each impossible value, with its place in the file."""
    values: list[tuple[object, _Place]] = []
    _collect(plan, ("plan",), into=values)
    _collect(measured, ("measured",), into=values)
    # Relations are checked only between values within bounds; others may not fit into a float.
    found = _formatted(
        problem for value, place in values for problem in _bound_problems(value, place)
    )
    return found or _formatted(
        problem for value, place in values for problem in _relation_problems(value, place)
    )


def _formatted(problems: Iterator[_Problem]) -> list[str]:
    return [f"{where(place)} {text}" for place, text in islice(problems, _MOST_PROBLEMS)]


def _collect(value: object, place: _Place, *, into: list[tuple[object, _Place]]) -> None:
    """Append the value and all values inside it, each container before its contents."""
    if isinstance(value, str):  # no check is about text
        return
    into.append((value, place))
    if isinstance(value, tuple):
        for index, inner in enumerate(value):
            _collect(inner, (*place, index), into=into)
    elif is_dataclass(value):
        for field in fields(value):
            # The decisions are in a file of their own, which is checked when it is read.
            if field.name != "decisions":
                _collect(getattr(value, field.name), (*place, field.name), into=into)


def _relation_problems(value: object, place: _Place) -> Iterator[_Problem]:
    problems = _RELATIONS.get(type(value))
    if problems is not None:
        yield from (((*place, *inner), text) for inner, text in problems(value))


def _bound_problems(value: object, place: _Place) -> Iterator[_Problem]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name = next(part for part in reversed(place) if isinstance(part, str))
    # The ends of an interval have the unit of the field that contains it.
    name = str(place[-2]) if name in ("value", "low", "high") else name
    most = _LIMIT_BY_NAME.get(name, _MOST_SECONDS if name.endswith("seconds") else _MOST)
    least = -most if name in _SIGNED else 1 if name in _AT_LEAST_ONE else 0
    if not least <= value <= most:
        shown = f"{value:g}" if abs(value) < 1e300 else "a number of more than 300 digits"
        yield place, f"is {shown}, not between {least:g} and {most:g}"


def _of_plan(plan: Plan) -> Iterator[_Problem]:
    remainders = [refusal.left for refusal in plan.refused]
    refused = sum(1 for remaining in remainders if remaining is not Remaining.NEVER)
    for what, count in (("taken", len(plan.taken)), ("refused", refused)):
        if count > plan.num_offers:
            yield (what,), f"has {count} offers, but the plan had {plan.num_offers}"


def _of_prediction(prediction: Prediction) -> Iterator[_Problem]:
    memory, peak = prediction.metrics.memory_bytes, prediction.peak.nbytes
    if not memory.low <= peak <= memory.high:
        text = f"is {format_bytes(peak)}, outside the interval of memory_bytes"
        yield ("peak", "nbytes"), text
    timeline = prediction.timeline
    if timeline is not None and max(timeline.nbytes, default=0) > 2 * max(peak, memory.high):
        yield ("timeline", "nbytes"), f"is more than twice the peak of {format_bytes(peak)}"


def _of_metrics(metrics: Metrics) -> Iterator[_Problem]:
    if not is_word(metrics.accuracy_loss):
        yield ("accuracy_loss",), "is not a valid accuracy loss, such as exact"
    # The two are estimated separately, so one may be slightly above the other.
    most = 2 * metrics.step_seconds.high
    for name in ("computation_seconds", "exposed_communication_seconds"):
        part: Estimate = getattr(metrics, name)
        if part.value > most:
            took = format_seconds(metrics.step_seconds.value)
            yield (name,), f"is {format_seconds(part.value)}, longer than the step of {took} allows"


def _of_point(point: FrontierPoint) -> Iterator[_Problem]:
    if not is_word(point.accuracy_loss):
        yield ("accuracy_loss",), "is not a valid accuracy loss, such as exact"


def _of_peak(peak: PeakMemory) -> Iterator[_Problem]:
    if peak.resident_bytes > peak.nbytes:
        yield ("resident_bytes",), f"is more than the peak of {format_bytes(peak.nbytes)}"
    for index, tensor in enumerate(peak.alive):
        if tensor.nbytes > peak.nbytes:
            text = f"is more than the peak of {format_bytes(peak.nbytes)}"
            yield ("alive", index, "nbytes"), text


def _of_timeline(timeline: Timeline) -> Iterator[_Problem]:
    counts = {len(timeline.seconds), len(timeline.nbytes), len(timeline.phases)}
    if len(counts) > 1:
        yield (), "has different numbers of seconds, nbytes and phases"
    if max(counts) > MOST_INSTANTS:
        yield (), f"has {max(counts)} instants; at most {MOST_INSTANTS} are allowed"
    if any(a > b for a, b in zip(timeline.seconds, timeline.seconds[1:])):
        yield ("seconds",), "is not in ascending order"


def _of_measured(measured: RunMeasurement) -> Iterator[_Problem]:
    if measured.first_step > measured.steps + 1:
        yield ("first_step",), f"is {measured.first_step}, after the last step, {measured.steps}"


_RELATIONS: dict[type, Callable[..., Iterator[_Problem]]] = {
    Plan: _of_plan,
    Prediction: _of_prediction,
    Metrics: _of_metrics,
    FrontierPoint: _of_point,
    PeakMemory: _of_peak,
    Timeline: _of_timeline,
    RunMeasurement: _of_measured,
}
