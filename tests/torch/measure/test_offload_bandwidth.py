"""The link to offload memory is measured once for each folder and rate."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import steelyard as sy
from steelyard.errors import BadInput
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT
from steelyard.measure import offload_bandwidth as measure
from steelyard.measure.cache import CostCache


@pytest.fixture(autouse=True)
def _in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    # These tests do not depend on the precision of the measurement.
    monkeypatch.setattr(measure, "_SECONDS", 0.05)
    monkeypatch.setattr(measure, "_ROUNDS", 1)


def test_two_plans_get_the_same_measured_offload_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload_memory = sy.OffloadMemory(tmp_path, rate="50 MB/s", size="20 KiB")
    cache = CostCache(tmp_path / "costs.sqlite")
    first = measure.measured_links(offload_memory, cache=cache)
    links, _ = first
    assert set(links) == {OFFLOAD_OUT, OFFLOAD_IN}
    for link in links.values():
        assert 0 < link.bytes_per_second <= 50e6
        assert min(link.latency_seconds, link.call_seconds, link.disturbs) > 0
    asked: list[Any] = []
    real = measure._measured
    monkeypatch.setattr(measure, "_measured", lambda m: asked.append(m) or real(m))
    assert (
        measure.measured_links(offload_memory, cache=CostCache(tmp_path / "costs.sqlite")) == first
    )
    assert not asked
    measure.measured_links(sy.OffloadMemory(tmp_path, rate="40 MB/s", size="20 KiB"), cache=cache)
    measure.measured_links(offload_memory)
    assert len(asked) == 2
    cache.forget()
    measure.measured_links(offload_memory, cache=cache)
    assert len(asked) == 3


def test_a_folder_that_is_gone_is_refused_though_its_link_is_known(tmp_path: Path) -> None:
    folder, cache = tmp_path / "far", CostCache(tmp_path / "costs.sqlite")
    folder.mkdir()
    offload_memory = sy.OffloadMemory(folder, rate="50 MB/s", size="20 KiB")
    measure.measured_links(offload_memory, cache=cache)
    shutil.rmtree(folder)
    with pytest.raises(BadInput, match=r"the folder .* does not exist"):
        measure.measured_links(offload_memory, cache=cache)
