import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from steelyard.hardware import host_os as machine

GIB = 1 << 30
CAPACITY = "system/cpu/cpu{}/cpu_capacity"


def under(limit: str) -> dict[str, int]:
    """Return the figures of a process that was started with that limit."""
    probe = (
        "import resource\n"
        f"resource.setrlimit(resource.{limit}, ({GIB}, {GIB}))\n"
        "from steelyard.hardware import host_os as machine\n"
        "print(machine.available_bytes(), *machine.process_limits_bytes().items())"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    available, _, limits = run.stdout.partition(" ")
    assert limits.strip() == f"('{limit}', {GIB})"
    return {"available": int(available)}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_limit_on_the_process_bounds_what_is_available(limit: str) -> None:
    assert 0 < under(limit)["available"] < GIB


def test_available_is_within_the_machine() -> None:
    assert 0 < machine.available_bytes() <= machine.memory_bytes()


def test_file_pages_of_a_control_group_count_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": ["4000"],
        "/sys/fs/cgroup/memory.current": ["3000"],
        "/sys/fs/cgroup/memory.stat": ["anon 900", "inactive_file 1500", "active_file 500"],
    }
    monkeypatch.setattr(machine, "_lines", lambda path: files.get(path, []))
    assert machine.cgroup_limit_bytes() == 4000
    assert machine.cgroup_used_bytes() == 1000
    assert machine.available_bytes() == 3000


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        (
            "0::/a/b",
            {"": {}, "a": {"cpu.max": "max 100000"}, "a/b": {"cpu.max": "50000 100000"}},
            0.5,
        ),
        ("0::/a/b", {"a": {"cpu.max": "150000 100000"}, "a/b": {"cpu.max": "max 100000"}}, 1.5),
        ("0::/", {"": {"cpu.max": "25000 100000"}}, 0.25),
        (
            "1:cpu:/a",
            {"cpu/a": {"cpu.cfs_quota_us": "5000", "cpu.cfs_period_us": "10000"}},
            0.5,
        ),
        ("1:cpu:/a", {"cpu/a": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "10000"}}, inf),
        ("1:memory:/a", {"memory/a": {"cpu.max": "1 2"}}, inf),
        ("0::/a", {}, inf),
    ],
)
def test_the_tightest_quota_around_a_process_is_its_own(
    tmp_path: Path, group: str, files: dict[str, dict[str, str]], cores: float
) -> None:
    said = tmp_path / "proc/self/cgroup"
    said.parent.mkdir(parents=True)
    said.write_text(group + "\n")
    for folder, inside in files.items():
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in inside.items():
            (place / name).write_text(text + "\n")
    assert machine.quota_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("files", "alike"),
    [
        ({}, True),
        ({CAPACITY.format(0): "1024", CAPACITY.format(1): "1024"}, True),
        ({CAPACITY.format(0): "1024", CAPACITY.format(1): "446"}, False),
        ({"cpu_core/cpus": "0-7", "cpu_atom/cpus": "8-15"}, False),
        ({"cpu_core/cpus": "0-7"}, True),
    ],
)
def test_core_speeds_are_read_from_the_kernel(
    tmp_path: Path, files: dict[str, str], alike: bool
) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/devices" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.are_cores_alike(tmp_path) == alike


@pytest.mark.parametrize(
    ("said", "is_virtual"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse hypervisor avx2\n", True),
        ("processor\t: 0\nflags\t\t: fpu sse avx2\nbugs\t\t: hypervisor\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        (None, False),
    ],
)
def test_a_virtual_machine_is_known_by_its_flags(
    tmp_path: Path, said: str | None, is_virtual: bool
) -> None:
    if said is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(said)
    assert machine.is_virtual(tmp_path) == is_virtual
