"""Cores, memory and limits of this machine, as the operating system reports them.

Reading them from files is fast and needs no torch. Not for speeds: see measure/.
"""

import os
import platform
import resource
from math import inf
from pathlib import Path

from steelyard.hardware.device import Device
from steelyard.hardware.link import Link

# Round figures for a server core of the 2020s with AVX2, used only where nothing has been measured.
_CORE_FLOPS_PER_SECOND = 40e9
_CORE_BYTES_PER_SECOND = 8e9


# Gloo in torch 2.13, one way between two processes on a busy two-core machine: the best of 12 to 60
# round trips. This is declared until a cluster is measured itself.
_LOOPBACK = (
    (4 << 10, 70e-6),
    (64 << 10, 90e-6),
    (1 << 20, 0.4e-3),
    (8 << 20, 3e-3),
    (32 << 20, 14e-3),
)


def this_device(*, ranks: int = 1) -> Device:
    """Return the equal share of this machine that each of ``ranks`` processes has."""
    cores = num_cores()
    share = cores / ranks
    threads = int(os.environ.get("OMP_NUM_THREADS") or cores)
    return Device(
        kind=f"cpu {processor()}",
        flops_per_second=share * _CORE_FLOPS_PER_SECOND,
        bytes_per_second=share * _CORE_BYTES_PER_SECOND,
        memory_bytes=memory_bytes() // ranks,
        threads=min(threads, max(1, cores // ranks)) if ranks > 1 else threads,
        is_here=True,
    )


def loopback() -> Link:
    """Return the link between processes of this machine."""
    return Link.curve(_LOOPBACK, kind="loopback")


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of(rank: int, num_ranks: int) -> set[int]:
    """Return one rank's share of this process's cores; ranks share cores if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // num_ranks)
    first = rank * each % len(cores)
    return set(cores[first : first + each])


def processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit_bytes()
    return min(total, limit) if limit else total


def available_bytes() -> int:
    """Return the bytes that can be allocated now, within all limits on this process."""
    bounds = [memory_bytes()]
    bounds += [
        int(line.split()[1]) * 1024
        for line in _lines("/proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    limit, used = cgroup_limit_bytes(), cgroup_used_bytes()
    if limit is not None and used is not None:
        bounds.append(limit - used)
    counted_bytes = _counted_bytes()
    bounds += [most - counted_bytes.get(name, 0) for name, most in process_limits_bytes().items()]
    return max(0, min(bounds))


def process_limits_bytes() -> dict[str, int]:
    """Return the limits set on this process alone, by name; unset limits are left out."""
    limits = {}
    for name in ("RLIMIT_DATA", "RLIMIT_AS"):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            limits[name] = soft
    return limits


def filesystem_of(folder: Path) -> str:
    """Return the file system type of a folder; empty if it is unknown."""
    found: dict[Path, str] = {}
    for line in _lines("/proc/self/mounts"):
        _, place, kind, *_ = line.split()
        # Spaces are written as octal escapes; a later mount on the same folder hides an earlier
        # one.
        found[Path(place.replace("\\040", " "))] = kind
    resolved = folder.resolve()
    return next((found[p] for p in (resolved, *resolved.parents) if p in found), "")


def _counted_bytes() -> dict[str, int]:
    """Return how many bytes count against each of those limits."""
    counted = {"VmData": "RLIMIT_DATA", "VmSize": "RLIMIT_AS"}
    counted_bytes = {}
    for line in _lines("/proc/self/status"):
        name, _, rest = line.partition(":")
        if name in counted:
            counted_bytes[counted[name]] = int(rest.split()[0]) * 1024
    return counted_bytes


def quota_cores(root: Path = Path("/")) -> float:
    """Return the number of cores that the CPU quotas of this process allow; infinity without
    quotas.
    """
    found = [inf]
    for line in _lines(str(root / "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / controllers
        # A group's quota applies to all its descendants, and in a container the group is often the
        # root.
        group = Path(path.lstrip("/"))
        found += (_quota_of(mounted / folder) for folder in (group, *group.parents))
    return min(found)


def is_virtual(root: Path = Path("/")) -> bool:
    """True in a virtual machine, where other guests may run on the same physical cores."""
    flags = (line for line in _lines(str(root / "proc/cpuinfo")) if line.startswith("flags"))
    return "hypervisor" in next(flags, "").split()


def are_cores_alike(root: Path = Path("/")) -> bool:
    """True if the kernel reports equal core capacities, or no capacities at all."""
    devices = root / "sys/devices"
    capacities = {tuple(_lines(str(f))) for f in devices.glob("system/cpu/cpu*/cpu_capacity")}
    is_hybrid = all((devices / name / "cpus").exists() for name in ("cpu_core", "cpu_atom"))
    return len(capacities) <= 1 and not is_hybrid


def _quota_of(group: Path) -> float:
    """Return the quota of a control group (version 2 or 1), in cores; infinity if none is set."""
    given = [entry for line in _lines(str(group / "cpu.max")) for entry in line.split()]
    for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") if not given else ():
        given += _lines(str(group / name))
    is_set = len(given) == 2 and all(figure.isdigit() and int(figure) for figure in given)
    return int(given[0]) / int(given[1]) if is_set else inf


def cgroup_used_bytes() -> int | None:
    """Return the bytes that count against the control group's limit, less reclaimable file
    pages.
    """
    for folder, used, prefix in (
        ("/sys/fs/cgroup", "memory.current", ""),
        ("/sys/fs/cgroup/memory", "memory.usage_in_bytes", "total_"),
    ):
        for line in _lines(f"{folder}/{used}"):
            if line.isdigit():
                files = (f"{prefix}active_file", f"{prefix}inactive_file")
                stat = (entry.split() for entry in _lines(f"{folder}/memory.stat"))
                return int(line) - sum(int(e[1]) for e in stat if e and e[0] in files)
    return None


def cgroup_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        for line in _lines(path):
            if line.isdigit() and int(line) < 2**60:
                return int(line)
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
