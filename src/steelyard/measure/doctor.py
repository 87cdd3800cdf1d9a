"""Checks this machine for requirements, recommendations and causes of misleading measurements.

Not for printing the findings: see report/.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from steelyard.hardware import host_os
from steelyard.hardware.diagnosis import DoctorRow, Verdict
from steelyard.measure import cache
from steelyard.torch_version import INSTALL, NEWEST_TESTED, dotted, minor_version
from steelyard.units import format_bytes

_PYTHON = (3, 11)
_LEAST_SHARED_BYTES = 256 << 20
_LEAST_CACHE_BYTES = 64 << 20
# The spread of repeated times of one product. If it is larger than this, a measured second predicts
# the next one badly.
_MOST_NOISE = 0.15


def diagnose(*, forget: bool = False) -> tuple[DoctorRow, ...]:
    """Return all rows; this takes a second or two plus the import of torch, and raises no error.

    With ``forget`` the cost cache is emptied first; if that fails, its row says why.
    """
    if forget:
        cache.CostCache().forget()
    return tuple(_rows())


def _rows() -> Iterator[DoctorRow]:
    yield _python()
    yield from _torch()
    yield _cores()
    yield _memory()
    yield from _limits()
    yield _shared_memory()
    yield _compiler()
    yield _cache()


def _python() -> DoctorRow:
    version = platform.python_version()
    if sys.version_info[:2] < _PYTHON:
        wanted = ".".join(map(str, _PYTHON))
        return DoctorRow(
            name="python",
            value=version,
            verdict=Verdict.BAD,
            remedy=f"use Python {wanted} or newer",
        )
    return DoctorRow(name="python", value=version)


def _torch() -> Iterator[DoctorRow]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield DoctorRow(
            name="torch",
            value=f"cannot be imported: {str(error)[:80]}",
            verdict=Verdict.BAD,
            remedy=INSTALL,
        )
        return
    yield _torch_version(torch.__version__)
    yield DoctorRow(name="device", value=_devices())
    yield _threads(torch.get_num_threads())
    yield _gloo()
    yield from _speed()


def _torch_version(version: str) -> DoctorRow:
    """Return the row for torch. (A version older than the oldest supported one is refused at
    import.)
    """
    if minor_version(version) <= NEWEST_TESTED:
        return DoctorRow(name="torch", value=version)
    return DoctorRow(
        name="torch",
        value=version,
        verdict=Verdict.NOTE,
        remedy=f"newer than {dotted(NEWEST_TESTED)}, the newest tested one; if it fails, {INSTALL}",
    )


def _devices() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return ", ".join([f"cpu {host_os.processor()}", *(f"cuda {name}" for name in gpus)])


def _threads(threads: int) -> DoctorRow:
    cores = host_os.num_cores()
    if threads > cores:
        return DoctorRow(
            name="threads",
            value=f"{threads} on {cores} cores",
            verdict=Verdict.NOTE,
            remedy=f"set OMP_NUM_THREADS={cores}: more threads than cores wait for one another",
        )
    return DoctorRow(name="threads", value=str(threads))


def _gloo() -> DoctorRow:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return DoctorRow(name="gloo", value="available")
    return DoctorRow(
        name="gloo",
        value="missing",
        verdict=Verdict.NOTE,
        remedy="install a torch build with gloo to run several ranks on CPUs",
    )


def _speed() -> Iterator[DoctorRow]:
    import torch

    from steelyard.measure.device_rates import matmul_seconds, with_measured_rates

    device = with_measured_rates(host_os.this_device())
    yield DoctorRow(
        name="speed",
        value=f"{device.flops_per_second / 1e9:.0f} GFLOP/s, "
        f"{format_bytes(device.bytes_per_second)}/s",
    )
    times = sorted(matmul_seconds(torch.device("cpu"), rounds=30))
    noise = (times[26] - times[3]) / times[15]
    value = (
        f"{noise:.0%} between the fastest and the slowest tenth of the times of one matrix product"
    )
    if noise <= _MOST_NOISE:
        yield DoctorRow(name="noise", value=value)
    else:
        yield DoctorRow(
            name="noise",
            value=value,
            verdict=Verdict.NOTE,
            remedy="stop other processes on this machine, or expect wide intervals on predicted "
            "times",
        )


def _cores() -> DoctorRow:
    return DoctorRow(name="cores", value=str(host_os.num_cores()))


def _memory() -> DoctorRow:
    total, free = host_os.memory_bytes(), host_os.available_bytes()
    limit = host_os.cgroup_limit_bytes()
    value = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limit is not None:
        value += f" (control group limit {format_bytes(limit)})"
    if free < total // 10:
        return DoctorRow(
            name="memory",
            value=value,
            verdict=Verdict.NOTE,
            remedy="stop other processes that use memory: large operators will not be measured",
        )
    return DoctorRow(name="memory", value=value)


def _limits() -> Iterator[DoctorRow]:
    limits = host_os.process_limits_bytes()
    if not limits:
        yield DoctorRow(name="process limits", value="none")
    for name, limit in limits.items():
        yield DoctorRow(
            name="process limits",
            value=f"{name} = {format_bytes(limit)}",
            verdict=Verdict.NOTE,
            remedy="also use it as --memory, or raise it with ulimit: allocations beyond it fail",
        )


def _shared_memory() -> DoctorRow:
    path = Path("/dev/shm")
    if not path.is_dir():
        return DoctorRow(name="shared memory", value="none on this system")
    free = shutil.disk_usage(path).free
    value = f"{format_bytes(free)} free in {path}"
    if free < _LEAST_SHARED_BYTES:
        return DoctorRow(
            name="shared memory",
            value=value,
            verdict=Verdict.NOTE,
            remedy="enlarge it (docker: --shm-size=1g), or use no DataLoader workers",
        )
    return DoctorRow(name="shared memory", value=value)


def _compiler() -> DoctorRow:
    chosen = os.environ.get("CXX", "g++")
    found = shutil.which(chosen) or shutil.which("clang++")
    if found:
        return DoctorRow(name="C++ compiler", value=found)
    return DoctorRow(
        name="C++ compiler",
        value=f"{chosen} not found",
        verdict=Verdict.NOTE,
        remedy="install g++ for the Inductor runner; generated Python needs none",
    )


def _cache() -> DoctorRow:
    path = cache.default_path()
    file = cache.CostCache(path)
    file.read_rates("")
    if file.notes:
        return DoctorRow(
            name="cost cache",
            value=file.notes[-1],
            verdict=Verdict.NOTE,
            remedy="set STEELYARD_CACHE to a writable file",
        )
    return DoctorRow(name="cost cache", value=f"{path}, {format_bytes(path.stat().st_size)}")
