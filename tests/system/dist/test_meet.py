"""Hosts measure their links once the first one knows the device of the step."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.measure.links.link_figures import BETWEEN_HOSTS
from tests.system.dist.ranks import on_two_ranks

pytestmark = pytest.mark.dist


def test_all_hosts_measure_once_and_receive_the_plan() -> None:
    first, second = on_two_ranks("tests.system.dist.meet:measuring")
    check_met(first, second)


def check_met(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["same"]
    assert first["rate"] > 0
    assert first["kind"] == BETWEEN_HOSTS
    assert second == {"heard": "a plan"}


def test_a_rank_with_another_device_kind_is_named_on_all_ranks() -> None:
    for said in on_two_ranks("tests.system.dist.meet:of_other_kinds"):
        assert said.startswith("rank 1 differs from rank 0 in the kind of device")
