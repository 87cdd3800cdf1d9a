"""Clusters: classes of devices and links, with declared or measured speeds.

The parts have their own files and are re-exported here. Not for measuring: see measure/.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from math import inf
from pathlib import Path

from steelyard.errors import BadInput
from steelyard.hardware.device import DTYPES, Device
from steelyard.hardware.link import Link
from steelyard.hardware.offload_memory import (
    OFFLOAD_IN,
    OFFLOAD_OUT,
    OFFLOAD_PAGE_BYTES,
    OFFLOAD_PIECE_BYTES,
    OffloadMemory,
    offload_room,
)
from steelyard.hardware.topology import LevelMember, LevelPosition, TopologyLevel
from steelyard.safe_text import printable
from steelyard.units import parse_bytes

__all__ = [
    "DTYPES",
    "OFFLOAD_IN",
    "OFFLOAD_OUT",
    "OFFLOAD_PAGE_BYTES",
    "OFFLOAD_PIECE_BYTES",
    "Cluster",
    "Device",
    "LevelMember",
    "LevelPosition",
    "Link",
    "OffloadMemory",
    "TopologyLevel",
    "offload_room",
]


# More processes than this would only wait for each other.
_RANKS_OF_A_CORE = 8
_MOST_HOSTS = 1024
# A slower rank is broken, and no share of the batch is small enough for it.
_SLOWEST = 1e-3


def _relative_speeds(speeds: Sequence[float], ranks: int) -> list[float]:
    """Return the speeds relative to the fastest one; raise BadInput if they are invalid."""
    known = [float(speed) for speed in speeds if type(speed) in (int, float) and 0 < speed < inf]
    if len(known) != len(speeds) or len(known) != ranks or min(known) < _SLOWEST * max(known):
        each = ",".join("1" * ranks)
        raise BadInput(
            f"speeds {printable(repr(tuple(speeds)), most=60)} of {ranks} rank{'s' * (ranks > 1)}",
            expected=f"a relative speed above 0 for each rank, none below {_SLOWEST:g} of the "
            "fastest",
            remedy=f"write, for example, --speeds {each} for equal ranks, or leave them out to "
            "have them measured",
        )
    return [speed / max(known) for speed in known]


# Maximum characters of a cluster's description in plan files.
_MOST_CHARACTERS = 120


def most_ranks_here() -> int:
    """Return the maximum number of ranks on this machine, by its cores."""
    from steelyard.hardware.host_os import num_cores

    return _RANKS_OF_A_CORE * num_cores()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices a plan may use, and the offload memory of each.

    ``speeds`` are those of the ranks of this machine relative to the fastest, where known. With
    several ``hosts`` like this machine, each has the same number of consecutive ranks.
    """

    tree: TopologyLevel
    offload_memory: OffloadMemory | None = None
    speeds: tuple[float, ...] = ()
    hosts: int = 1

    @property
    def num_devices(self) -> int:
        return self.tree.num_devices

    @property
    def ranks_of_a_host(self) -> int:
        """The number of ranks per host, which share its cores and memory."""
        return self.num_devices // self.hosts

    @property
    def device(self) -> Device:
        """The only device class; raises BadInput if there are several."""
        (device, _), *others = self.tree.classes
        if others:
            kinds = ", ".join(f"{count} {found.kind}" for found, count in self.tree.classes)
            raise BadInput(
                f"the cluster has several classes of devices: {kinds}",
                expected="devices of one class",
                remedy="use a cluster with one class of devices",
            )
        return device

    @property
    def fastest(self) -> Device:
        """The class with the highest compute rate; a step on a single device runs on it."""
        return max((device for device, _ in self.tree.classes), key=lambda d: d.flops_per_second)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank; empty if there is only one class."""
        if len(self.tree.classes) == 1:
            return ()
        return tuple(self.tree.device_of(rank) for rank in range(self.num_devices))

    @property
    def rates_said(self) -> str:
        """The assumed fraction of declared rates of each device class, and its source."""
        return "; ".join(device.rates_said for device, _ in self.tree.classes)

    @property
    def is_here(self) -> bool:
        return all(device.is_here for device, _ in self.tree.classes)

    @property
    def declared(self) -> str:
        """Name and devices of a declared cluster; empty for this machine."""
        if self.is_here:
            return ""
        devices = ", ".join(f"{count} {device.kind}" for device, count in self.tree.classes)
        return printable(f"{self.tree.name} ({devices})", most=_MOST_CHARACTERS)

    def at_speeds(self, speeds: Sequence[float]) -> "Cluster":
        """Return this cluster with local ranks, otherwise equal, at these relative speeds."""
        assert self.is_here
        assert len(speeds) == self.num_devices
        full_speed = replace(self.fastest, speed=1.0)
        members, (member, *_) = [], self.tree.members
        for speed, equal_speeds in groupby(speeds):
            device = full_speed if speed == 1 else full_speed.at_speed(speed)
            members.append(replace(member, of=device, count=len(list(equal_speeds))))
        tree = replace(self.tree, members=tuple(members))
        return replace(self, tree=tree, speeds=tuple(speeds))

    @property
    def host_memory(self) -> OffloadMemory | None:
        """The host's memory of a single declared device; None if it, or the link to it, is unknown.

        Plans offload to it, unless another offload memory is given.
        """
        if self.num_devices > 1 or self.is_here:
            return None
        size, link = self.device.host_memory_bytes, self.device.host_link
        if size is None or link is None:
            return None
        return OffloadMemory.of_host(rate=link.bytes_per_second, size=size)

    @property
    def fingerprint(self) -> str:
        """A hash of all that plans depend on; for a single device, of its name and threads only."""
        (device, count), *_ = self.tree.classes
        device_id = f"{device.kind}|{device.threads}|{count}"
        host_suffix = f"|{self.hosts} hosts" if self.hosts > 1 else ""
        identity_text = device_id if self.num_devices == 1 else f"{self.tree.identity}{host_suffix}"
        return sha256(identity_text.encode()).hexdigest()[:16]

    @classmethod
    def here(
        cls,
        ranks: int = 1,
        *,
        hosts: int = 1,
        speeds: Sequence[float] = (),
        offload_memory: OffloadMemory | None = None,
    ) -> "Cluster":
        """Return this machine as the operating system describes it; touches no device.

        ``ranks`` processes share its cores and its memory evenly and communicate over loopback.
        Several ``hosts`` have equal numbers of ranks, and must have found each other before: see
        docs/hosts.md. ``speeds=(1, 0.5)`` gives each rank's compute speed relative to the fastest;
        without it, speeds are measured.
        """
        from steelyard.hardware.host_os import loopback, num_cores, this_device

        if type(hosts) is not int or not 1 <= hosts <= _MOST_HOSTS:
            raise BadInput(
                f"a cluster of {hosts!r} hosts is not possible",
                expected=f"a whole number of machines from 1 to {_MOST_HOSTS}",
                remedy="write Cluster.here(ranks=2, hosts=2), or leave out hosts",
            )
        most = most_ranks_here()
        if type(ranks) is not int or not 1 <= ranks <= hosts * most:
            raise BadInput(
                f"a cluster of {ranks!r} ranks is not possible",
                expected=f"a whole number of processes, from 1 to {most} on {num_cores()} cores"
                + (f" for each of {hosts} hosts" if hosts > 1 else ""),
                remedy="write Cluster.here(ranks=2), or --ranks 2",
            )
        if ranks % hosts:
            raise BadInput(
                f"{ranks} ranks cannot be divided over {hosts} hosts",
                expected="the same number of ranks on each host",
                remedy=f"write Cluster.here(ranks={hosts}, hosts={hosts}), or leave out hosts",
            )
        of = this_device(ranks=ranks // hosts)
        member = LevelMember(of=of, count=ranks, link=loopback())
        found = cls(
            tree=TopologyLevel(name="here", members=(member,)),
            offload_memory=offload_memory,
            hosts=hosts,
        )
        return found.at_speeds(_relative_speeds(speeds, ranks)) if speeds else found

    @classmethod
    def load(cls, path: str | Path, *, offload_memory: OffloadMemory | None = None) -> "Cluster":
        """Return the cluster that a TOML file declares: see docs/cluster-files.md. Touches no
        device.
        """
        from steelyard.hardware.cluster_file import read_tree

        return cls(tree=read_tree(Path(path)), offload_memory=offload_memory)

    @classmethod
    def named(cls, name: str, *, offload_memory: OffloadMemory | None = None) -> "Cluster":
        """Return a preset machine, such as ``"dgx-h100"``, or one preset device, such as
        ``"RTX-4090"``: see docs/cluster-presets.md.
        """
        from steelyard.hardware.cluster_file import preset_tree

        return cls(tree=preset_tree(name), offload_memory=offload_memory)

    @classmethod
    def gpu(cls, name: str, *, host_memory: str | int | None = None) -> "Cluster":
        """Return one preset GPU, such as ``"RTX-4090"``: see docs/cluster-presets.md.

        Plans may offload to ``host_memory``, such as ``"64 GiB"``, over the GPU's host link.
        """
        from steelyard.hardware.cluster_file import gpu_tree

        tree = gpu_tree(name)
        if host_memory is not None:
            (member,) = tree.members
            nbytes = parse_bytes(host_memory, what="host_memory")
            device = replace(tree.classes[0][0], host_memory_bytes=nbytes)
            tree = replace(tree, members=(replace(member, of=device),))
        return cls(tree=tree)
