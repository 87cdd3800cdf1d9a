"""One process as a rank of a plan: joining the other ranks, and communicating with them.

Not for starting ranks: see run/launch/launcher.py.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from steelyard import _torch
from steelyard.api.workload import Workload
from steelyard.comm.backends import backend_for
from steelyard.comm.channel import Channel
from steelyard.comm.devices import CPU, torch_device_of
from steelyard.comm.gloo.thread_scheduling import take_turns
from steelyard.errors import BadInput, Mismatch
from steelyard.ir.parallel_layout import ALONE, DATA, PIPELINE, ParallelLayout
from steelyard.ir.placement import Shard
from steelyard.ir.program import Program
from steelyard.ir.sharding_choice import ShardingChoice
from steelyard.measure.device_memory import check_is_own
from steelyard.planner.multi_host import (
    check_neighbours,
    gpu_description,
    keep_to_cores_of,
    probe_hosts,
)
from steelyard.run.binding import live_tensors
from steelyard.run.launch.consistency_check import words_for
from steelyard.run.launch.coordination import Alone, Coordinator, InGroup
from steelyard.run.launch.environment import rank_info
from steelyard.run.launch.rendezvous import hold_meeting_place as hold
from steelyard.run.launch.rendezvous import joined, needing_store
from steelyard.run.launch.status_reporter import recorded, reporting_lost_connections
from steelyard.run.pipeline.driver import PipelineDriver
from steelyard.run.sharded_model.layers import ShardedLayers, ShardedTensorsOfLayers
from steelyard.run.sharded_model.tensors import ShardedTensors, ShardSpec


def refuse_other_ranks() -> None:
    """Raise Mismatch if this process belongs to a group of several ranks.

    A plan for one rank sums no gradients over ranks, so the replicas would diverge.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size > 1:
        raise Mismatch(
            f"this process is one of {size} ranks of a process group, but the plan is for one: "
            "gradients would not be summed over ranks, and each rank would train a different "
            "model",
            expected="a plan for all ranks, or gradients that your own code exchanges",
            remedy=f"plan with cluster=sy.Cluster.here(ranks={size}); or, if your loop sums them, "
            "write plan.apply(model, sums_gradients=True) and step.backward(batch)",
        )


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The rank of this process, and its process group along each mesh axis."""

    layout: ParallelLayout = ALONE
    rank: int = 0
    torch_device: torch.device = CPU
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    # These are set if only some of the ranks take the step: the coordinator of all ranks, and True
    # if this rank stands by.
    everyone: Coordinator | None = None
    stands_by: bool = False

    @classmethod
    def of(cls, layout: ParallelLayout, torch_device: torch.device = CPU) -> "RankContext":
        """Return the context in the current process group, for a model on ``torch_device``."""
        if layout.num_ranks == 1:
            return cls()
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        here = group.size() if group is not None else 1
        if group is None or here != layout.num_ranks:
            raise Mismatch(
                f"the plan is for {layout.num_ranks} ranks, but the process group "
                + (f"has {here}" if group is not None else "does not exist"),
                expected="as many ranks as the plan was made for, in one process group",
                remedy="start them with steelyard run, or with torchrun and init_process_group "
                "before apply; or plan again for this number of ranks",
            )
        _refuse_backends(group, torch_device)
        groups = _groups(layout, group)
        take_turns()
        return cls(layout=layout, rank=group.rank(), torch_device=torch_device, groups=groups)

    @cached_property
    def coordinator(self) -> Coordinator:
        return self.everyone or (InGroup() if self.groups else Alone())

    def among(self, members: Sequence[int], layout: ParallelLayout) -> "RankContext":
        """Return the context in which only ``members`` take the step; all ranks call this together.

        A rank that stands by uses the rank number of the first member, and takes part in none of
        the step's collectives.
        """
        rank, groups = dist.get_rank(), dict[str, dist.ProcessGroup]()
        is_member = rank in members
        if len(members) > 1:
            group = dist.new_group(list(members))
            if is_member:
                groups = _groups(layout, group)
        take_turns()
        return RankContext(
            layout=layout,
            rank=members.index(rank) if is_member else 0,
            torch_device=self.torch_device,
            groups=groups,
            everyone=self.coordinator,
            stands_by=not is_member,
        )

    @cached_property
    def channels(self) -> Mapping[str, Channel]:
        return {axis: Channel.of(group, self.torch_device) for axis, group in self.groups.items()}

    def parts_of(
        self, model: nn.Module, program: Program
    ) -> ShardedTensors | ShardedLayers | ShardedTensorsOfLayers | None:
        """Return the part of the model that this rank holds; None if it holds the whole model."""
        sharded = self._sharded_tensors(model, program.shardings) if program.shardings else None
        if program.pipeline is None:
            return sharded
        layers_of_rank = [program.pipeline.held(r) for r in range(self.layout.pipeline)]
        layers = ShardedLayers(live_tensors(model, {}), layers_of_rank, group=self.groups[PIPELINE])
        return layers if sharded is None else ShardedTensorsOfLayers(sharded, layers)

    def _sharded_tensors(
        self, model: nn.Module, shardings: Sequence[ShardingChoice]
    ) -> ShardedTensors:
        specs: dict[str, list[ShardSpec]] = {}
        for choice in shardings:
            place, group = self.layout.place(self.rank, choice.axis), self.groups[choice.axis]
            for name, placement in choice.inputs:
                if isinstance(placement, Shard):
                    spec = ShardSpec(
                        shard=placement, num_ranks=choice.num_ranks, rank=place, group=group
                    )
                    specs.setdefault(name, []).append(spec)
        return ShardedTensors(live_tensors(model, {}), specs)

    def in_stages(self, program: Program, live: Mapping[str, Any]) -> PipelineDriver:
        """Return the driver of the pipeline stages on this rank."""
        assert program.pipeline is not None
        return PipelineDriver(
            program.pipeline,
            live,
            group=self.groups[PIPELINE],
            channels=self.channels,
            replicas=self.groups.get(DATA),
            in_shares=program.in_shares,
        )


def _refuse_backends(group: dist.ProcessGroup, torch_device: torch.device) -> None:
    """Check that the group has a backend for the model's device, and one for the CPU.

    Ranks coordinate through tensors on the CPU, whatever the device of the model.
    """
    backends = dist.get_backend_config(group)
    if not {"cpu", torch_device.type} <= {pair.partition(":")[0] for pair in backends.split(",")}:
        required = "gloo" if torch_device.type == "cpu" else "cpu:gloo,cuda:nccl"
        raise BadInput(
            f"the process group has the backends {backends}, but the model is on {torch_device}",
            expected="a backend for the model's device, and one for the CPU",
            remedy=f'call init_process_group("{required}")',
        )


def _groups(layout: ParallelLayout, everyone: dist.ProcessGroup) -> dict[str, dist.ProcessGroup]:
    axes = layout.axes
    if len(axes) == 1:
        return dict.fromkeys(axes, everyone)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return {axis: mesh.get_group(axis) for axis in axes}


@contextlib.contextmanager
def as_a_rank(num_ranks: int, *, hosts: int) -> Iterator[None]:
    """Record an error that ends this rank within the context, so that the launcher can report
    it.
    """
    who = rank_info(os.environ)
    with recorded(who), reporting_lost_connections(who):
        who.check_size(num_ranks, planned_hosts=hosts)
        yield


def hold_meeting_place() -> None:
    """Keep the rendezvous store open in a process that is not a rank of the plan."""
    hold(rank_info(os.environ))


def keep_to_own_cores() -> None:
    keep_to_cores_of(rank_info(os.environ))


@contextlib.contextmanager
def joined_ranks(workload: Workload, *, plan: str, timeout_seconds: float) -> Iterator[None]:
    """Join the ranks with the same plan, the same model shapes and the same batch."""
    found = _torch.tree_flatten_with_path(workload.first_batch())[0]
    tensors = {_torch.keystr(path): x for path, x in found if isinstance(x, torch.Tensor)}
    named = workload.model.named_parameters()
    words = words_for(plan_digest=plan, parameters=named, batch=tensors.items())
    # Ranks that use different batches would train on fewer samples than the plan says.
    words["values of the first batch"] = "\n".join(f"{n} {_digest(x)}" for n, x in tensors.items())
    who, torch_device = rank_info(os.environ), torch_device_of(workload.model)
    check_is_own(torch_device)
    if who.hosts > 1:
        words |= gpu_description(torch_device, who)
    backend = backend_for(torch_device, ranks=who.size // who.hosts)
    with needing_store(who), joined(who, words, timeout_seconds=timeout_seconds, backend=backend):
        if who.hosts > 1:
            check_neighbours(who)
            probe_hosts(who, torch_device)
        yield


def restarts() -> int:
    """Return how many times the ranks have been restarted."""
    return rank_info(os.environ).attempt


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
