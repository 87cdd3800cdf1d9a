"""A process that is one of the ranks of a plan: how it joins them, and over what it speaks to them.

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
from steelyard.run.launch.environment import who_am_i
from steelyard.run.launch.rendezvous import hold_meeting_place as hold
from steelyard.run.launch.rendezvous import joined, needing_store
from steelyard.run.launch.status_reporter import recorded, told_by_itself
from steelyard.run.pipeline.driver import PipelineDriver
from steelyard.run.sharded_model.layers import ShardedLayers, ShardedTensorsOfLayers
from steelyard.run.sharded_model.tensors import ShardedTensors, ShardSpec


def refuse_other_ranks() -> None:
    """A plan for one rank in a process that is one of several: replicas would drift apart."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size > 1:
        raise Mismatch(
            f"this process is one of {size} ranks of a process group, and the plan is for one: no "
            "gradient would be summed over ranks, and each would train a model of its own",
            expected="a plan for all ranks, or gradients that your own code exchanges",
            remedy=f"plan with cluster=sy.Cluster.here(ranks={size}); or, if your loop sums them, "
            "write plan.apply(model, sums_gradients=True) and step.backward(batch)",
        )


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Which of the ranks this process is, and with whom it speaks along each axis."""

    layout: ParallelLayout = ALONE
    rank: int = 0
    home: torch.device = CPU
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    # Of a step that some of the ranks take: all of them, and whether this one stands by.
    everyone: Coordinator | None = None
    stands_by: bool = False

    @classmethod
    def of(cls, layout: ParallelLayout, home: torch.device = CPU) -> "RankContext":
        """Of the process group that this process has joined, with a model that lies at ``home``."""
        if layout.num_ranks == 1:
            return cls()
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        here = group.size() if group is not None else 1
        if group is None or here != layout.num_ranks:
            raise Mismatch(
                f"the plan is for {layout.num_ranks} ranks, and here "
                + (f"are {here}" if group is not None else "is one process"),
                expected="as many ranks as the plan was made for, in one process group",
                remedy="steelyard run starts them; or torchrun, with init_process_group before "
                "apply; or plan again for this many",
            )
        _refuse_backends(group, home)
        groups = _groups(layout, group)
        take_turns()
        return cls(layout=layout, rank=group.rank(), home=home, groups=groups)

    @cached_property
    def coordinator(self) -> Coordinator:
        return self.everyone or (InGroup() if self.groups else Alone())

    def among(self, members: Sequence[int], layout: ParallelLayout) -> "RankContext":
        """The same process where only these ranks take the step; all ranks come here together.

        A rank that stands by takes the place of the first, and speaks to nobody in a step.
        """
        own, groups = dist.get_rank(), dict[str, dist.ProcessGroup]()
        is_member = own in members
        if len(members) > 1:
            group = dist.new_group(list(members))
            if is_member:
                groups = _groups(layout, group)
        take_turns()
        return RankContext(
            layout=layout,
            rank=members.index(own) if is_member else 0,
            home=self.home,
            groups=groups,
            everyone=self.coordinator,
            stands_by=not is_member,
        )

    @cached_property
    def channels(self) -> Mapping[str, Channel]:
        return {axis: Channel.of(group, self.home) for axis, group in self.groups.items()}

    def parts_of(
        self, model: nn.Module, program: Program
    ) -> ShardedTensors | ShardedLayers | ShardedTensorsOfLayers | None:
        """The model cut to what this rank holds of it; None where that is all of it."""
        parts = self._in_parts(model, program.partings) if program.partings else None
        if program.pipeline is None:
            return parts
        held = [program.pipeline.held(r) for r in range(self.layout.pipeline)]
        layers = ShardedLayers(live_tensors(model, {}), held, group=self.groups[PIPELINE])
        return layers if parts is None else ShardedTensorsOfLayers(parts, layers)

    def _in_parts(self, model: nn.Module, partings: Sequence[ShardingChoice]) -> ShardedTensors:
        ways: dict[str, list[ShardSpec]] = {}
        for choice in partings:
            place, group = self.layout.place(self.rank, choice.axis), self.groups[choice.axis]
            for name, lies in choice.inputs:
                if isinstance(lies, Shard):
                    way = ShardSpec(shard=lies, num_ranks=choice.num_ranks, rank=place, group=group)
                    ways.setdefault(name, []).append(way)
        return ShardedTensors(live_tensors(model, {}), ways)

    def in_stages(self, program: Program, live: Mapping[str, Any]) -> PipelineDriver:
        """What carries out those of its stages that lie on this rank."""
        assert program.pipeline is not None
        return PipelineDriver(
            program.pipeline,
            live,
            group=self.groups[PIPELINE],
            channels=self.channels,
            replicas=self.groups.get(DATA),
            in_shares=program.in_shares,
        )


def _refuse_backends(group: dist.ProcessGroup, home: torch.device) -> None:
    """What ranks agree on lies on the host, wherever the model does."""
    known = dist.get_backend_config(group)
    if not {"cpu", home.type} <= {pair.partition(":")[0] for pair in known.split(",")}:
        wanted = "gloo" if home.type == "cpu" else "cpu:gloo,cuda:nccl"
        raise BadInput(
            f"the process group carries {known}, and the model is on {home}",
            expected="a backend for that, and one for the CPU",
            remedy=f'init_process_group("{wanted}")',
        )


def _groups(layout: ParallelLayout, everyone: dist.ProcessGroup) -> dict[str, dist.ProcessGroup]:
    axes = layout.axes
    if len(axes) == 1:
        return dict.fromkeys(axes, everyone)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return {axis: mesh.get_group(axis) for axis in axes}


@contextlib.contextmanager
def as_a_rank(num_ranks: int, *, hosts: int) -> Iterator[None]:
    """What ends the rank is written down for whoever started it."""
    who = who_am_i(os.environ)
    with recorded(who), told_by_itself(who):
        who.check_size(num_ranks, planned_hosts=hosts)
        yield


def hold_meeting_place() -> None:
    """For the ranks that a plan lies on, of which this process is none."""
    hold(who_am_i(os.environ))


def keep_to_own_cores() -> None:
    keep_to_cores_of(who_am_i(os.environ))


@contextlib.contextmanager
def joined_ranks(workload: Workload, *, plan: str, timeout_seconds: float) -> Iterator[None]:
    """One of the ranks that hold the same plan, a model of the same shapes and the same batch."""
    found = _torch.tree_flatten_with_path(workload.first_batch())[0]
    tensors = {_torch.keystr(path): x for path, x in found if isinstance(x, torch.Tensor)}
    named = workload.model.named_parameters()
    words = words_for(plan_digest=plan, parameters=named, batch=tensors.items())
    # Ranks that draw another batch each would train on less than the plan says.
    words["values of the first batch"] = "\n".join(f"{n} {_digest(x)}" for n, x in tensors.items())
    who, home = who_am_i(os.environ), torch_device_of(workload.model)
    check_is_own(home)
    if who.hosts > 1:
        words |= gpu_description(home, who)
    backend = backend_for(home, ranks=who.size // who.hosts)
    with needing_store(who), joined(who, words, timeout_seconds=timeout_seconds, backend=backend):
        if who.hosts > 1:
            check_neighbours(who)
            probe_hosts(who, home)
        yield


def restarts() -> int:
    """How often the ranks were started before."""
    return who_am_i(os.environ).attempt


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
