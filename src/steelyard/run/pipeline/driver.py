"""Runs a pipelined training step on the ranks, in the order of one of torch's schedules.

Not for the computation of a stage (see stage.py) or for choosing stages and schedule, which the
plan does.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from steelyard.comm.channel import Channel, Waiting
from steelyard.comm.devices import CPU
from steelyard.comm.gloo.thread_scheduling import take_turns
from steelyard.comm.pipeline_schedules import made_schedule
from steelyard.ir.graph import Graph, OutputKind
from steelyard.ir.parallel_layout import PIPELINE
from steelyard.ir.pipeline_schedule import Action, ActionKind
from steelyard.ir.program import Pipeline
from steelyard.operators import copy_strided
from steelyard.run.finite_check import ACTIVATIONS, GRADIENTS, LOSS, FiniteWatch
from steelyard.run.pipeline.messages import ByGloo, Messages, ThroughSlots
from steelyard.run.pipeline.rng import Draws
from steelyard.run.pipeline.sharded_weights import ShardedParameters
from steelyard.run.pipeline.stage import LiveStage, Values, keep_only


class PipelineDriver:
    """Runs the pipeline stages of this rank; every rank gets the whole batch.

    Weights of micro-batches and random numbers are those of a single device. Gradients of
    parameters that several ranks hold are summed, also over the ``replicas``, which hold the same
    stages and train on other samples. ``in_shares`` names the weights that are sharded over the
    replicas. Collectives within a stage use ``channels``; the pipeline's channel records this
    rank's idle time.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        live: Mapping[str, Any],
        *,
        group: dist.ProcessGroup,
        channels: Mapping[str, Channel],
        replicas: dist.ProcessGroup | None = None,
        in_shares: frozenset[str] = frozenset(),
    ) -> None:
        self._group, self._waiting = group, channels[PIPELINE].waiting
        self._replicas = replicas
        self.finite: FiniteWatch | None = None
        self._device = device = channels[PIPELINE].device
        self._graph, stages = pipeline.stages.graph, pipeline.stages.stages
        self._rank_of = pipeline.order.rank_of
        rank, last = dist.get_rank(group), len(stages) - 1
        self._messages: Messages = (
            ThroughSlots(pipeline, group=group, device=device)
            if pipeline.is_pinned
            else ByGloo(pipeline, group=group, rank_at=self._rank_at, device=device)
        )
        own = [stage for stage in stages if self._rank_of[stage.index] == rank]
        self._draws = Draws(pipeline.stages, own={stage.index for stage in own}, device=device)
        self._own = [
            _ScheduledStage(
                LiveStage(
                    stage,
                    live=live,
                    channels=channels,
                    forward_buffers=self._messages.output_buffers(
                        stage.index + 1, stage.sends, is_back=False
                    ),
                    backward_buffers=self._messages.output_buffers(
                        stage.index - 1, stage.sends_back, is_back=True
                    ),
                ),
                self._graph,
                len(stages),
                group,
                messages=self._messages,
                rank_at=self._rank_at,
                waiting=self._waiting,
            )
            for stage in own
        ]
        self._rank_of_loss = self._rank_of[last]
        self._tied = self._tied_parameters(pipeline.stages.shared, live)
        trained = pipeline.trained(rank)
        self._trained = [live[name] for name in trained]
        names = (name for own in self._own for name in own.live.stage.held)
        sharded = [live[name] for name in dict.fromkeys(names) if name in in_shares]
        self._replicated = [live[name] for name in trained if name not in in_shares]
        self._shares = ShardedParameters(sharded, group=replicas) if replicas is not None else None
        self._schedule = made_schedule(
            pipeline.schedule, self._own, micro_batches=pipeline.order.num_micro_batches
        )

    @property
    def held_bytes(self) -> int:
        """Memory that is reserved for messages, also between steps."""
        return self._messages.held_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes sent to other ranks through shared memory so far."""
        return self._messages.moved_bytes

    def _rank_at(self, stage: int) -> int:
        """Return the global rank that runs this stage."""
        return dist.get_global_rank(self._group, self._rank_of[stage])

    def _tied_parameters(
        self, shared: Sequence[tuple[str, tuple[int, ...]]], live: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, dist.ProcessGroup]]:
        """Return this rank's parameters that other ranks also have, with the group of those
        ranks.
        """
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        sums = []
        for name, stages in shared:
            ranks = tuple(sorted({self._rank_of[index] for index in stages}))
            if len(ranks) < 2 or dist.get_rank(self._group) not in ranks:
                continue
            if ranks not in groups:
                world = [dist.get_global_rank(self._group, r) for r in ranks]
                # Only these ranks create the group; the ranks of another pipeline create their own.
                groups[ranks] = dist.new_group(world, use_local_synchronization=True)
            sums.append((live[name], groups[ranks]))
        take_turns()
        return sums

    def run(
        self, micro_batches: Sequence[Mapping[str, Any]], shares: Sequence[float]
    ) -> torch.Tensor:
        """Run all micro-batches forward and backward; return the loss, which the rank that has it
        broadcasts.
        """
        with self._waiting.running():  # paused while a stage computes: see _ScheduledStage
            with self._reduced_gradients_detached():
                losses = self._run_schedule(micro_batches)
            return self._broadcast_loss(losses, shares)

    def _run_schedule(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """Run the schedule; return the loss of each micro-batch, on the rank that has it."""
        count = len(micro_batches)
        self._draws.begin(count)
        self._messages.begin()
        for own in self._own:
            own.begin([dict(values) for values in micro_batches], self._draws, self.finite)
        losses: list[torch.Tensor] = []
        is_last = any(own.is_last for own in self._own)
        targets = torch.arange(count, device=CPU) if is_last else None
        with self._shares.gathered() if self._shares else contextlib.nullcontext():
            # Stages need no autograd, but torch's schedules refuse to start if it is disabled.
            with torch.enable_grad():
                self._schedule.step(
                    target=targets, losses=losses if is_last else None, return_outputs=False
                )
            self._messages.end()
            self._check_gradients()
            for parameter, group in self._tied:
                dist.all_reduce(_gradient(parameter), group=group)
            for parameter in self._trained if self._shares else ():
                _gradient(parameter)
        with self._waiting.stopped():
            self._draws.end()
            if self.finite is not None:
                self.finite.saw(LOSS, losses)
        self._reduce_gradients()
        return losses

    def _check_gradients(self) -> None:
        """Check the gradients of this rank's stages before they are summed over ranks."""
        if self.finite is None:
            return
        last = max(own.stage_index for own in self._own)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        with self._waiting.stopped(), torch.no_grad():
            self.finite.saw(GRADIENTS - last, gradients)

    @contextlib.contextmanager
    def _reduced_gradients_detached(self) -> Iterator[None]:
        """Exclude already reduced gradients of earlier calls, and add them afterwards.

        If the call fails, these gradients are restored unchanged.
        """
        summed = {id(p): p for p, _ in self._tied}
        if self._replicas is not None:
            summed |= {id(p): p for p in self._trained}
        before = [(p, p.grad) for p in summed.values() if p.grad is not None]
        _clear_gradients(summed.values())
        try:
            yield
        except BaseException:
            _clear_gradients(summed.values())  # drops what this rank alone has accumulated
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        for parameter, gradient in before:
            parameter.grad = gradient.add_(_gradient(parameter))

    def _reduce_gradients(self) -> None:
        """All-reduce the unsharded gradients over the replicas."""
        if self._replicas is not None:
            works = [
                dist.all_reduce(_gradient(p), group=self._replicas, async_op=True)
                for p in self._replicated
            ]
            for work in works:
                work.wait()

    def _broadcast_loss(
        self, losses: Sequence[torch.Tensor], shares: Sequence[float]
    ) -> torch.Tensor:
        name = next(o.node for o in self._graph.outputs if o.kind is OutputKind.LOSS)
        (planned,) = self._graph.by_name[name].outputs
        dtype = getattr(torch, planned.dtype)
        total = torch.zeros(planned.shape, dtype=dtype, device=self._device)
        for loss, share in zip(losses, shares):
            total += loss * share
        total = total.to(CPU)  # messages are sent from the host
        if self._replicas is not None and dist.get_rank(self._group) == self._rank_of_loss:
            dist.all_reduce(total, group=self._replicas)
        source = dist.get_global_rank(self._group, self._rank_of_loss)
        dist.broadcast(total, source, group=self._group)
        return total.to(self._device)


def _clear_gradients(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient, or zeros if this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _ScheduledStage(PipelineStage):
    """A live stage in the form that torch's schedules expect.

    Its own forward and backward passes replace autograd's. Torch is given a token as input and
    output, because it would otherwise keep buffers for all micro-batches at once.
    """

    def __init__(
        self,
        live: LiveStage,
        graph: Graph,
        num_stages: int,
        group: dist.ProcessGroup,
        *,
        messages: Messages,
        rank_at: Callable[[int], int],
        waiting: Waiting,
    ) -> None:
        token = torch.zeros(1, device=CPU)
        super().__init__(
            nn.Identity(),
            live.stage.index,
            num_stages,
            CPU,
            input_args=token,
            output_args=token,
            group=group,
        )
        self.live = live
        self._graph, self._messages, self._rank_at = graph, messages, rank_at
        self._waiting = waiting
        self._values: list[Values] = []
        self._draws: Draws | None = None
        self._input_names: tuple[str, ...] = ()
        self._finite: FiniteWatch | None = None

    def begin(self, values: list[Values], draws: Draws, finite: FiniteWatch | None) -> None:
        self._values, self._draws, self._finite = values, draws, finite
        self.live.begin()
        self._input_names = tuple(values[0])

    def clear_runtime_states(self) -> None:
        self.output_chunks.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002
        return []  # receives are posted ahead, by Messages

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002
        return []  # receives are posted ahead, by Messages

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._p2p_ops(self._pop_outputs(fwd_chunk_id), fwd_chunk_id, +1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._p2p_ops(self.get_local_bwd_output(bwd_chunk_id), bwd_chunk_id, -1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._values[mb_index].update(prev_stage_outputs)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self._values[mb_index].update(next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        popped = self._pop_values(
            mb_index, self.live.stage.sends_back, self.live.stage.kept_between
        )
        return self._check_finite(popped, GRADIENTS - self.stage_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],  # noqa: ARG002 - torch's signature
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - the same
        save_forward_output: bool = True,  # noqa: ARG002 - the same
    ) -> Any:
        values = self._values[fwd_chunk_id]
        self._receive(ActionKind.FORWARD, fwd_chunk_id)
        stage = self.live.stage
        assert self._draws is not None
        with self._waiting.stopped(), self._draws.at(fwd_chunk_id, stage.index):
            loss = self.live.forward(values)
        keep_only(values, dict.fromkeys((*self._input_names, *stage.kept, *stage.sends)))
        if self.is_last:
            return loss
        is_local = self._rank_at(self.stage_index + 1) == dist.get_rank()
        return self._pop_outputs(fwd_chunk_id) if is_local else None

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002 - torch's signature
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002 - the same
    ) -> None:
        values, stage = self._values[bwd_chunk_id], self.live.stage
        self._receive(
            ActionKind.BACKWARD if full_backward else ActionKind.BACK_TO_INPUTS, bwd_chunk_id
        )
        with self._waiting.stopped():
            (self.live.backward if full_backward else self.live.back_to_inputs)(values)
        kept = () if full_backward else (*self._input_names, *stage.kept_between)
        keep_only(values, dict.fromkeys((*kept, *stage.sends_back)))

    def backward_weight_one_chunk(
        self,
        bwd_chunk_id: int,
        last_backward: bool = False,  # noqa: ARG002 - torch's signature
    ) -> None:
        self._receive(ActionKind.BACK_TO_WEIGHTS, bwd_chunk_id)
        with self._waiting.stopped():
            self.live.back_to_weights(self._values[bwd_chunk_id])
        self._values[bwd_chunk_id].clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients that ranks share are all summed at the end of the step."""

    def _pop_outputs(self, index: int) -> Values:
        popped = self._pop_values(index, self.live.stage.sends, self.live.stage.kept)
        return self._check_finite(popped, ACTIVATIONS + self.stage_index)

    def _check_finite(self, values: Values, place: int) -> Values:
        if self._finite is not None:
            with self._waiting.stopped(), torch.no_grad():
                self._finite.saw(place, list(values.values()))
        return values

    def _pop_values(self, index: int, names: Sequence[str], kept: Sequence[str]) -> Values:
        """Return these values of a micro-batch, and drop those that this stage no longer needs."""
        values = self._values[index]
        popped = {name: values[name] for name in names}
        for name in set(names).difference(kept):
            del values[name]
        return popped

    def _p2p_ops(self, values: Values, index: int, step: int) -> list[dist.P2POp]:
        to = self.stage_index + step
        return self._messages.send(to, index, values, is_back=step < 0)

    def _receive(self, work: ActionKind, index: int) -> None:
        """Receive the inputs of an action, in the layout that they had at capture."""
        action = Action(stage=self.stage_index, work=work, micro_batch=index)
        for name, received in self._messages.receive(action).items():
            (planned,) = self._graph.by_name[name].outputs
            self._values[index][name] = (
                received
                if received.stride() == planned.stride
                else copy_strided(received, list(planned.shape), list(planned.stride))
            )
