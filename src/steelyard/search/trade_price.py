"""The price of an applied trade: the step with it compared with the step without it.

Not for the trades of one device, which are priced with estimates: see single/explain.py.
"""

from steelyard.ir.rule import Rule, trade_name
from steelyard.plans.plan import Prediction, SelectedTrade


def price_without(
    kind: type[Rule],
    label: str,
    rules: tuple[Rule, ...],
    *,
    without: Prediction,
    with_it: Prediction,
) -> SelectedTrade:
    """Return the exposed communication that a trade of ranks pays, and the computation it buys.

    Computation that the trade adds is paid as well.
    """
    saved = computation_seconds(without) - computation_seconds(with_it)
    return SelectedTrade(
        trade=trade_name(kind),
        label=label,
        rules=rules,
        buys_bytes=without.peak.nbytes - with_it.peak.nbytes,
        buys_seconds=max(saved, 0.0),
        pays_seconds=exposed_seconds(with_it) - exposed_seconds(without) + max(-saved, 0.0),
    )


def step_price_without(
    kind: type[Rule],
    label: str,
    rules: tuple[Rule, ...],
    *,
    saved_bytes: int,
    saved_seconds: float,
) -> SelectedTrade:
    """Return the seconds of the whole step that a trade pays or buys."""
    return SelectedTrade(
        trade=trade_name(kind),
        label=label,
        rules=rules,
        buys_bytes=saved_bytes,
        buys_seconds=max(0.0, saved_seconds),
        pays_seconds=max(0.0, -saved_seconds),
    )


def computation_seconds(prediction: Prediction) -> float:
    return prediction.metrics.computation_seconds.value


def exposed_seconds(prediction: Prediction) -> float:
    return prediction.metrics.exposed_communication_seconds.value
