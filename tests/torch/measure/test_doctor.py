import shutil
from pathlib import Path

import pytest
import torch

from steelyard.hardware import host_os as machine
from steelyard.hardware.diagnosis import DoctorRow, Verdict
from steelyard.ir.metrics import Estimate
from steelyard.measure.cache import CostCache
from steelyard.measure.doctor import diagnose

ROWS = {
    "python", "torch", "device", "threads", "gloo", "speed", "noise", "cores", "memory",
    "process limits", "shared memory", "C++ compiler", "cost cache",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "costs.sqlite"
    monkeypatch.setenv("STEELYARD_CACHE", str(path))
    return path


def by_name(rows: tuple[DoctorRow, ...]) -> dict[str, DoctorRow]:
    return {row.name: row for row in rows}


def test_every_row_that_is_not_ok_has_a_remedy() -> None:
    rows = diagnose()
    assert {row.name for row in rows} == ROWS
    for row in rows:
        assert row.value
        assert (row.verdict is Verdict.OK) == (row.remedy == ""), row


def test_stored_measurements_are_removed_on_request(cache: Path) -> None:
    found = Estimate(value=0.5, low=0.4, high=0.75)
    CostCache(cache).write_whole("here", "step", found)
    diagnose()
    assert CostCache(cache).read_whole("here", "step") == found
    rows = by_name(diagnose(forget=True))
    assert rows["cost cache"].verdict is Verdict.OK
    assert CostCache(cache).read_whole("here", "step") is None


def test_problems_are_reported(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    cache.mkdir()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(machine, "process_limits_bytes", lambda: {"RLIMIT_DATA": 1 << 30})
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 20)
    rows = by_name(diagnose())
    assert rows["torch"].verdict is Verdict.NOTE
    assert "torch>=2.11" in rows["torch"].remedy
    assert "OMP_NUM_THREADS" in rows["threads"].remedy
    assert "g++" in rows["C++ compiler"].remedy
    assert rows["process limits"].value == "RLIMIT_DATA = 1.00 GiB"
    assert rows["memory"].verdict is Verdict.NOTE
    assert "STEELYARD_CACHE" in rows["cost cache"].remedy
