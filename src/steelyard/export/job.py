"""The job that trains by a plan: nodes, processes, memory and price.

Not for the files of a scheduler: see launch_files.py.
"""

import re
import shlex
from dataclasses import dataclass

from steelyard.export.exported import ExportPrice
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plans.plan import Decisions
from steelyard.units import format_bytes, format_seconds

# Python, torch and its libraries in one process, beside the tensors of the step.
_PROCESS_BYTES = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of ``nodes`` with ``processes`` each, which run ``script`` by the plan in ``path``.

    ``gpu`` names the GPU if the cluster is declared. ``device`` is the type of device in torch, or
    empty if it is not known. ``peak_bytes`` is the predicted peak of a rank. ``usd_per_hour`` is
    the price of the devices that are used.
    """

    script: str
    path: str
    decisions: Decisions
    nodes: int
    processes: int
    device: str = ""
    gpu: str = ""
    peak_bytes: int | None = None
    step_seconds: float | None = None
    usd_per_hour: float | None = None

    @property
    def name(self) -> str:
        """The plan's name as a label of DNS, which every scheduler accepts."""
        stem = self.path.rpartition("/")[2].removesuffix(".toml").removesuffix(".plan").lower()
        return re.sub("[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-") or "train"

    @property
    def is_on_gpus(self) -> bool:
        return self.device not in ("", "cpu")

    @property
    def host_mib(self) -> int | None:
        """The host memory of a node in MiB, if the step runs on CPUs and its peak is known."""
        if self.peak_bytes is None or self.device != "cpu":
            return None
        return -(-self.processes * (self.peak_bytes + _PROCESS_BYTES) // _MIB)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("run", self.script, "--plan", self.path)

    @property
    def shell_arguments(self) -> str:
        return shlex.join(self.arguments)

    def described(self) -> tuple[str, ...]:
        """Return what the job needs and costs, one line each."""
        ranks = self.nodes * self.processes
        lines = [
            f"plan {self.decisions.name}: {self.nodes} node{'s' * (self.nodes != 1)} with "
            f"{self.processes} process{'es' * (self.processes != 1)} each"
            + (f" on {self.gpu}" if self.gpu else "")
        ]
        if self.peak_bytes is not None:
            lines.append(f"predicted peak: ~{format_bytes(self.peak_bytes)} per process")
        if self.step_seconds is not None:
            lines.append(f"predicted step: ~{format_seconds(self.step_seconds)}")
        if self.usd_per_hour is not None:
            price = f"price: {self.usd_per_hour:.2f} USD/h for {ranks} device{'s' * (ranks != 1)}"
            if self.step_seconds is not None:
                each = self.usd_per_hour * self.step_seconds / 3.6
                price += f", ~{each:.4g} USD per 1,000 steps"
            lines.append(price)
        return tuple(lines)

    def notes(self) -> tuple[str, ...]:
        """Return what the plan does not say, and the user has to check."""
        found = []
        if not self.device:
            found.append(
                "the plan does not say whether it is for CPUs or GPUs: name the script as well, or "
                "add memory or GPUs to the file"
            )
        if self.usd_per_hour is None:
            found.append("the price is not known: no cluster file states one")
        return tuple(found)


def job_of(
    decisions: Decisions,
    *,
    script: str,
    path: str,
    cluster: Cluster | None,
    device: str,
    price: ExportPrice | None,
) -> Job:
    """Return the job for these decisions; ``cluster`` is the declared one, if there is one."""
    ranks = ParallelLayout.of(decisions.rules).num_ranks
    nodes = nodes_of(decisions, cluster)
    gpu, usd = "", None
    if cluster is not None and not cluster.is_here:
        gpu, usd = cluster.fastest.kind, cluster.tree.usd_per_hour_of(ranks)
        device = device or "cuda"
    memory = None if price is None else price.memory_bytes
    seconds = None if price is None else price.step_seconds
    return Job(
        script=script,
        path=path,
        decisions=decisions,
        nodes=nodes,
        processes=-(-ranks // nodes),
        device=device or ("cuda" if decisions.target.declared else ""),
        gpu=gpu,
        peak_bytes=None if memory is None else round(memory.value),
        step_seconds=None if seconds is None else seconds.value,
        usd_per_hour=usd,
    )


def nodes_of(decisions: Decisions, cluster: Cluster | None) -> int:
    """Return the number of machines; ``cluster`` is the declared one, if there is one."""
    ranks = ParallelLayout.of(decisions.rules).num_ranks
    if cluster is None or cluster.is_here:
        return len(decisions.hosts_used(ranks))
    return -(-ranks // _devices_of_a_node(cluster.tree))


def _devices_of_a_node(level: TopologyLevel) -> int:
    """Return the number of devices in the lowest level: the devices of one machine."""
    inner = [m.of for m in level.members if isinstance(m.of, TopologyLevel)]
    return _devices_of_a_node(inner[0]) if inner else level.num_devices
