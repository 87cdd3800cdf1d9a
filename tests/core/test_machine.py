import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.core import machine

GIB = 1 << 30


def under(limit: str) -> dict[str, int]:
    """What a process says that was started with that limit."""
    probe = (
        "import resource\n"
        f"resource.setrlimit(resource.{limit}, ({GIB}, {GIB}))\n"
        "from steelyard.core import machine\n"
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
