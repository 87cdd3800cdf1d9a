"""The step in micro-batches is captured and calibrated only when a plan uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from steelyard.capture.step import CapturedStep
from steelyard.hardware.cluster import Cluster
from steelyard.ir.program import Program
from steelyard.planner.priced_source import PricedSource
from tests.support.stepping import source_of
from tests.zoo import case


@dataclass
class _Prices:
    """The prices of a device that is here, whose calibrations of splits are known or not."""

    is_known: bool
    cluster: Cluster = field(default_factory=Cluster.here)
    checked: list[int] = field(default_factory=list)
    estimated: list[int] = field(default_factory=list)

    def measure(self, *graphs: Any) -> None:
        pass

    def is_split_known(self, cut: Program) -> bool:
        return self.is_known or cut.repeats in self.checked

    def estimate_cut(self, cut: Program) -> None:
        self.estimated.append(cut.repeats)

    def check_cut(self, source: CapturedStep, cut: Program) -> None:
        del source
        self.checked.append(cut.repeats)


@pytest.fixture
def source() -> CapturedStep:
    return source_of(case("mlp").make())


def test_a_split_is_captured_only_when_it_is_calibrated(source: CapturedStep) -> None:
    prices: Any = _Prices(is_known=False)
    priced = PricedSource(source, prices)
    priced.graph(micro_batches=2)
    assert (prices.estimated, prices.checked) == ([2], [])
    assert not priced.is_split_calibrated(micro_batches=2)
    assert (1, 2) not in source._captured
    priced.calibrate_split(micro_batches=2)
    assert (1, 2) in source._captured
    assert prices.checked[-1] == 2
    assert priced.is_split_calibrated(micro_batches=2)


def test_a_split_whose_calibration_is_known_was_captured_before(source: CapturedStep) -> None:
    prices: Any = _Prices(is_known=True)
    priced = PricedSource(source, prices)
    priced.graph(micro_batches=2)
    assert priced.is_split_calibrated(micro_batches=2)
    priced.calibrate_split(micro_batches=2)
    assert prices.estimated == []
    assert (1, 2) not in source._captured
