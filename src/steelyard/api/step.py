"""The step of an applied plan: called by the user on a live model, and reported in a receipt.

Connects run/ to the meters of measure/. Not for the loop of ``steelyard run``: see train.py.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from steelyard import _torch
from steelyard.api.rank_context import RankContext, refuse_other_ranks
from steelyard.api.user_loop import UserLoop
from steelyard.capture.batch.splitting import batch_size
from steelyard.capture.step import Captured, CapturedStep
from steelyard.capture.tracing.optimizer import OptimizerFactory, refuse_foreign
from steelyard.comm.devices import torch_device_of
from steelyard.comm.tcp_counters import SentBytesCounter
from steelyard.errors import BadInput, Mismatch
from steelyard.hardware.cluster import OFFLOAD_PIECE_BYTES
from steelyard.hardware.host_os import this_device
from steelyard.ir.gradient_codec import (
    CODED_CALLS,
)
from steelyard.ir.parallel_layout import DATA, ParallelLayout, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import BETWEEN_RANKS, Rule, of_kind
from steelyard.ir.rule_kinds import GradientCompression, MicroBatches
from steelyard.ir.step_source import ShardedSource
from steelyard.measure.operators.memory import is_profiled, meter_once
from steelyard.measure.operators.timer import Laps
from steelyard.measure.process import rss_peak_bytes
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.offload.tier import OffloadFile
from steelyard.planner.cost_provider import LazyCosts
from steelyard.plans.codec_fallbacks import codec_fallbacks, warm_up_of
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import RankMemory, Receipt, RunMeasurement
from steelyard.plans.trade import apply_rules, apply_rules_on_ranks
from steelyard.predict import kept_gradients_bytes, peak_bytes, rank_peak_bytes
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.styled_text import plain
from steelyard.report.text import render
from steelyard.run.codegen import Emitted, emit
from steelyard.run.compiled.inductor import compile_program
from steelyard.run.compiled.lower import lower
from steelyard.run.compression_fallback import CompressionFallback
from steelyard.run.finite_check import FiniteWatch, blamed
from steelyard.run.launch.coordination import bring_up_to_date, broadcast_model
from steelyard.run.sharded_model.layers import ShardedLayers, ShardedTensorsOfLayers
from steelyard.run.sharded_model.tensors import ShardedTensors
from steelyard.run.step import CodeReads, Constants, LiveStep
from steelyard.safe_text import printable
from steelyard.trades import TRADES
from steelyard.units import format_bytes, format_seconds

# The second call is metered. The first one also allocates state, and metering a later one would
# interrupt the user's training loop.
_METERED_CALL = 2
# The byte counter looks for new connections at these calls: before, between and after the first
# steps.
_CONNECTION_SCANS = 4
# Ranks first exchange their measured peaks after this many calls.
_FIRST_REPORT = 4


class Traffic(NamedTuple):
    """Time and bytes spent on transfers.

    ``busy``: seconds during which values moved to or from offload memory. ``waited``: seconds of
    waiting for these transfers or for other ranks. ``sent``: bytes that this rank sent to other
    ranks. ``coding``: seconds in which it encoded and decoded gradients.
    """

    busy: float
    waited: float
    sent: float
    coding: float


class Step:
    """``step(batch)`` runs forward, backward and the optimizer, and returns the loss as a tensor.

    ``step.backward(batch)`` leaves clipping, scaling and the optimizer's step to the user.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        source: CapturedStep,
        pricing: LazyCosts,
        optimizer: OptimizerFactory | None,
        update: Program | None,
        sums_gradients: bool = False,
    ) -> None:
        _refuse_meta(source.model)
        self.plan = plan
        self._sums_gradients = sums_gradients
        self._refuse_other_ranks()
        self._source = source
        self._pricing = pricing
        self._update = update
        self._device = torch_device_of(source.model)
        self.ranks = self._plan_ranks = RankContext.of(
            ParallelLayout.of(plan.decisions.rules), self._device
        )
        self._members = tuple(range(self.ranks.layout.num_ranks))
        if self.ranks.groups:
            broadcast_model([*source.model.parameters(), *source.model.buffers()], self._device)
        self._sharded_model: ShardedTensors | ShardedLayers | ShardedTensorsOfLayers | None = None
        self._codec_fallbacks = codec_fallbacks(plan.decisions.rules)
        program, captured = self._program_for(source)
        captured.reads.check()
        offload_memory = plan.decisions.offload_memory
        self.offload_file = OffloadFile(offload_memory) if offload_memory else None
        if (program.shardings or program.pipeline) and optimizer is None:
            raise BadInput(
                "the plan shards the weights, but no optimizer was given",
                expected="an optimizer, so that its step can be tested on shards",
                remedy="plan with optimizer=, and call step(batch)",
            )
        self._sharded_model = self.ranks.parts_of(source.model, program)
        live_optimizer = None if optimizer is None else optimizer(source.model.parameters())
        if live_optimizer is not None:
            refuse_foreign(live_optimizer, source.model.parameters())
        states = self._offloaded_states(live_optimizer, program)
        is_watched = bool(self.ranks.channels) or self._device.type == "cpu"
        self._finite = FiniteWatch(self._device) if is_watched else None
        self._finite_codes: list[int] = []
        self.live = LiveStep(
            source.model,
            program,
            constants=captured.constants,
            batch=source.batch,
            optimizer=live_optimizer,
            states=states,
            parts=self._sharded_model,
            reduction=source.reduction().value if program.parts > 1 else "mean",
            other_shape=self._bind_other_shape,
            on_change=lambda words: self.ranks.coordinator.check_equal("batch", words),
            runner=self._runner(states),
            reads=captured.reads,
            rank=program.layout.place(self.ranks.rank, DATA),
            in_stages=self.ranks.in_stages,
            channels=self.ranks.channels,
            guard=self._guard(),
            finite=self._finite,
        )
        self._constants = tuple(captured.constants.values())
        self._batch_bytes = program.batch_bytes
        self._laps = Laps(self._device)
        self._sent_counter, self._num_scans = SentBytesCounter(), 0
        self._traffic = [self.traffic()]
        self._losses: list[torch.Tensor] = []
        self._metered: int | None = None
        self.notes: list[str] = []
        self._calls = 0
        self._keeps_gradients = False
        self._user_loop: UserLoop | None = None
        # Number of steps that were not metered because a profiler was active, or because the batch
        # had another shape.
        self._num_profiled = self._num_other_shapes = 0
        self._peak_bytes_by_rank: list[int] = []
        self._next_report = _FIRST_REPORT

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.live.optimizer

    def __call__(self, batch: Any) -> torch.Tensor:
        self._refuse_other_ranks()
        self._calls += 1
        first = _METERED_CALL + warm_up_of(self.plan.decisions.rules)
        if self._metered is None and self._calls >= first and self.may_meter(batch):
            self.live.zero_grad()
            self._metered, loss = self._metered_call(lambda: self.live(batch))
        else:
            loss = self._timed_call(lambda: self.live(batch), self._laps.begin)
        self._exchange_measurements()
        return loss

    def backward(self, batch: Any, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Add gradients of ``scale`` times the loss, as ``(loss * scale).backward()`` would."""
        self._refuse_other_ranks()
        if self._sharded_model is not None:
            raise BadInput(
                "step.backward returns gradients, but this plan shards them: clipping or "
                "unscaling would then differ between ranks",
                expected="step(batch), which also updates the weights",
                remedy="remove the rules that shard weights from the plan, or call step(batch)",
            )
        if self._user_loop is None:
            self._user_loop = UserLoop(self.live, device=self._device, resident=self.resident_bytes)
        loop, has_gradients = self._user_loop, bool(self.live.gradients())
        self._keeps_gradients = self._keeps_gradients or has_gradients
        with loop.wrap_pass() as is_new_step:
            if self._finite is not None:
                self._finite.adds_up = not is_new_step
            if loop.needs_peak(has_gradients=has_gradients) and self.may_meter(batch):
                nbytes, loss = self._metered_call(lambda: self.live.backward(batch, scale))
                loop.note_peak(nbytes, has_gradients=has_gradients)
            else:
                loss = self._timed_call(lambda: self.live.backward(batch, scale), loop.start_timer)
        self._exchange_measurements()
        return loss

    def _refuse_other_ranks(self) -> None:
        """Check before each step: a process group may be created after the plan was applied."""
        if ParallelLayout.of(self.plan.decisions.rules).num_ranks == 1 and not self._sums_gradients:
            refuse_other_ranks()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Gather the full model on every rank within the context, to evaluate or save it.

        All ranks must enter together. Between steps a rank may hold only shards of the weights.
        """
        return self.live.whole()

    @property
    def stands_in(self) -> str:
        """A note on the device that runs a plan for a declared cluster; empty for other plans."""
        declared = self.plan.decisions.target.declared
        if not declared:
            return ""
        known = self._pricing.made.cluster
        device = known.fastest if known.is_here else this_device()
        threads = f"{device.threads} thread{'s' if device.threads > 1 else ''} a rank"
        return (
            f"on {device.kind}, {threads}; the plan is for the declared cluster "
            f"{printable(declared)}, whose times differ"
        )

    def receipt(self) -> "ShownReceipt":
        """Return the measured cost of the steps so far, with the predicted cost."""
        # The first step also allocates state, fills caches and touches memory for the first time.
        laps, loop = self._laps.seconds[1:], self._user_loop
        seconds = median(laps) if laps else None
        if loop is not None and not self._calls:
            seconds = loop.step_seconds(has_update=self._update is not None)
        losses = [float(x) for x in self._losses]
        busy, waited, sent = self.median_exchange(self._traffic)
        peaks = [
            n
            for n in (self._measured_peak_bytes(), *self._peak_bytes_by_rank)
            if n is not None and n >= 0
        ]
        return ShownReceipt(
            Receipt(
                plan=self.plan,
                measured=RunMeasurement(
                    steps=self._calls + (loop.steps if loop else 0),
                    passes=loop.passes if loop else 0,
                    memory_bytes=max(peaks, default=None),
                    rss_bytes=rss_peak_bytes(),
                    communication_bytes=sent,
                    communication_seconds=busy,
                    computation_seconds=None if seconds is None else max(0.0, seconds - waited),
                    step_seconds=seconds,
                    first_loss=losses[0] if losses else None,
                    last_loss=losses[-1] if losses else None,
                    ranks=self.memory_of_ranks(self._peak_bytes_by_rank),
                    stands_in=self.stands_in,
                    notes=(
                        *self.notes,
                        *self._note_on_finite(),
                        *self.notes_on_metering(is_metered=self._is_metered),
                        *(loop.notes(has_update=self._update is not None) if loop else ()),
                        *self.notes_on_ranks(waited, sent),
                        *self.notes_on_compression(self._traffic),
                        *self._note_on_gradients(),
                    ),
                ),
            )
        )

    def may_meter(self, batch: Any) -> bool:
        """True if the batch has the planned shape and no profiler is active.

        Metering would take events from a profiler.
        """
        if not self.live.is_planned(batch):
            self._num_other_shapes += 1
            return False
        if is_profiled(self._device):
            self._num_profiled += 1
            return False
        return True

    def _note_on_finite(self) -> tuple[str, ...]:
        """Return a note on the first step with a non-finite loss, and on its source."""
        finite = self._finite
        if finite is None or finite.failed_at is None:
            return ()
        has_ranks = bool(self.ranks.channels)
        codes = self._finite_codes if has_ranks else [finite.code]
        first = blamed(codes).words if codes else ""
        source = f"; first not finite: {first}" if first else ""
        return (f"the loss was not finite in step {finite.failed_at}{source}",)

    def notes_on_metering(self, *, is_metered: bool) -> tuple[str, ...]:
        """Return a note on why no step was metered, if one could have been."""
        reasons = []
        if self._num_profiled:
            reasons.append(
                f"a profiler was active in {self._num_profiled} of them, and metering a step would "
                "have taken its events"
            )
        if self._num_other_shapes:
            reasons.append(
                f"{self._num_other_shapes} had another batch shape or another gradient codec"
            )
        if is_metered or not reasons:
            return ()
        return (f"no step's memory was measured: {'; '.join(reasons)}",)

    def memory_of_ranks(self, measured: Sequence[int]) -> tuple[RankMemory, ...]:
        """Return predicted and measured peak bytes of each rank.

        ``measured`` is the peak of each rank, negative if unknown.
        """
        if not self.ranks.channels:
            return ()
        program = self.live.program
        if program.layout.shares:
            # The prediction of this rank covers only its batch share; ranks with other shares
            # differ.
            base = Program.plain(self._source.captured().graph, update=self._update)
            rules = self._codec_fallbacks[0]
            program = apply_rules_on_ranks(base, rules, trades=TRADES, source=self._source)
            others = tuple(self._as_executed(one) for one in program.sibling_programs)
            predicted_bytes = rank_peak_bytes(
                replace(self._as_executed(program), sibling_programs=others),
                self._pricing.made.costs,
            )
        elif program.pipeline is None:
            # All ranks need the same memory, which the plan predicts; nothing needs to be measured.
            predicted_bytes = (self.plan.predicted.peak.nbytes,) * program.layout.num_ranks
        else:
            predicted_bytes = rank_peak_bytes(self._as_executed(program), self._pricing.made.costs)
        known = dict(enumerate(measured))
        return tuple(
            RankMemory(
                rank=rank,
                predicted_bytes=nbytes,
                measured_bytes=found if (found := known.get(rank, -1)) >= 0 else None,
            )
            for rank, nbytes in enumerate(predicted_bytes)
        )

    @property
    def are_unequal(self) -> bool:
        """True if ranks have unequal batch shares or unequal speeds."""
        decisions = self.plan.decisions
        return (
            bool(ParallelLayout.of(decisions.rules).shares) or len({*decisions.target.speeds}) > 1
        )

    def traffic(self) -> Traffic:
        """Return the traffic so far."""
        busy = waited = sent = coded = 0.0
        if self.ranks.channels:
            if self._num_scans < _CONNECTION_SCANS:  # connections are opened on first use
                self._num_scans += 1
                self._sent_counter.look()
            waited = sum(channel.waiting.seconds for channel in self.ranks.channels.values())
            coded = sum(channel.coding.seconds for channel in self.ranks.channels.values())
            moved = sum(channel.waiting.moved_bytes for channel in self.ranks.channels.values())
            sent = self._sent_counter.sent_bytes + self.live.moved_bytes + moved
            sent -= self.ranks.coordinator.asked_bytes
        if self.offload_file is not None:
            busy, waited = self.offload_file.busy_seconds, self.offload_file.waited_seconds + waited
        return Traffic(busy, waited, sent, coded)

    def median_exchange(self, samples: Sequence[Traffic]) -> tuple[float | None, float, int | None]:
        """Return the transfer seconds, the waiting seconds and the sent bytes of the median step.

        Transfer seconds are None with several ranks: torch does not report when a collective has
        ended. Sent bytes are None if they were not counted.
        """
        found, has_ranks = median_traffic(samples), bool(self.ranks.channels)
        if found is None:
            return (None if self.offload_file or has_ranks else 0.0), 0.0, None
        sent = round(found.sent) if has_ranks and self._counts_sent_bytes else None
        return (None if has_ranks else found.busy), found.waited, sent

    @property
    def _counts_sent_bytes(self) -> bool:
        """True if all bytes sent to other ranks are counted.

        The kernel counts the bytes sent over connections; bytes in message slots are counted here.
        NCCL does not report what it sends.
        """
        if all(channel.backend == "gloo" for channel in self.ranks.channels.values()):
            return self._sent_counter.is_counted
        program = self.live.program
        collectives = (
            node.collective for node in program.graph.nodes if node.collective is not None
        )
        summed = program.pipeline is not None and (
            DATA in self.ranks.groups or program.pipeline.stages.shared
        )
        return (
            self._sent_counter.is_counted and not summed and all(c.is_pinned for c in collectives)
        )

    def notes_on_ranks(self, waited: float, sent: int | None) -> tuple[str, ...]:
        if not self.ranks.channels:
            return ()
        metrics = self.plan.predicted.metrics
        own, predicted = format_seconds(waited), metrics.exposed_communication_seconds.value
        notes = [f"waited {own} a step for other ranks (predicted ~{format_seconds(predicted)})"]
        if sent is not None:
            own, predicted = format_bytes(sent), metrics.communication_bytes.value
            notes.append(f"sent {own} a step to other ranks (predicted {format_bytes(predicted)})")
        return tuple(notes)

    def switch_plan(self, plan: Plan, members: Sequence[int] | None = None) -> None:
        """Switch to another plan from the next step on; all ranks call this together.

        Sharded state stays where it is. ``members`` are the ranks that take part, by default all;
        rank 0 is always one of them. The other ranks stand by: they take batches, receive the loss
        and update nothing. When they return, they are sent the updates that they missed.
        """
        everyone = self._plan_ranks
        all_ranks = tuple(range(everyone.layout.num_ranks))
        members = all_ranks if members is None else tuple(members)
        assert members[0] == 0, "the first rank saves, so it takes every step"
        assert ParallelLayout.of(plan.decisions.rules).num_ranks == len(members)
        # The error-feedback residuals are combined by the ranks that hold them.
        self.live.residuals.owe_all()
        if not set(members) <= set(self._members):
            bring_up_to_date(self.live, everyone.coordinator)
        self.plan, self._codec_fallbacks = plan, codec_fallbacks(plan.decisions.rules)
        if members != self._members:
            layout = ParallelLayout.of(plan.decisions.rules)
            self.ranks = everyone if members == all_ranks else everyone.among(members, layout)
            self._members = members
            self.live.change_ranks(
                rank=layout.place(self.ranks.rank, DATA),
                channels=self.ranks.channels,
                broadcast_loss=None
                if members == all_ranks
                else self.ranks.coordinator.broadcast_loss,
                stands_by=self.ranks.stands_by,
            )
            self._sent_counter, self._num_scans = SentBytesCounter(), 0
        self.live.switch_programs(self._guard())
        self._laps.clear()
        self._traffic = [self.traffic()]

    @property
    def supports_standby(self) -> bool:
        """True if steps may run without some of the ranks, which may return later."""
        live = self.live
        return live.states is None and live.parts is None and live.program.pipeline is None

    @property
    def state_bytes(self) -> int:
        """The bytes sent to a rank that returns: the model and the optimizer state."""
        return resident_bytes(self.live) - self.live.shared_bytes

    @property
    def is_as_planned(self) -> bool:
        """True if the last step used the gradient codecs named by the plan."""
        return self.live.rung == 0

    @property
    def has_fallen_back(self) -> bool:
        """True if a gradient codec of this plan was replaced, because of its error, by a less lossy
        one.
        """
        guard = self.live.guard
        return guard is not None and guard.rung != 0 and not guard.warm_up

    def notes_on_compression(self, traffic: Sequence[Traffic]) -> tuple[str, ...]:
        """Return notes on gradient compression: its time, exact steps, residuals and fallbacks."""
        if self.live.guard is None:
            return ()
        record, notes, found = self.live.guard.record(), list[str](), median_traffic(traffic)
        if found is not None and found.coding:
            costs = self._pricing.made.costs.on(self.ranks.layout.num_ranks).of_rank(
                self.ranks.rank
            )
            nodes = (n for n in self.live.program.graph.nodes if n.op in CODED_CALLS)
            predicted_seconds = sum(costs.seconds(node).value for node in nodes)
            notes.append(
                f"encoded and decoded gradients in {format_seconds(found.coding)} of a step "
                f"(predicted ~{format_seconds(predicted_seconds)})"
            )
        if record.exact_steps:
            notes.append(
                f"{record.exact_steps} steps sent gradients uncompressed and are excluded from all "
                "step figures"
            )
        if any(record.residuals):
            notes.append(
                f"error feedback held at most {max(record.residuals):.2g} steps' worth of "
                f"gradients, in {len(record.residuals)} checks"
            )
        for rung, reason in enumerate(record.reasons, start=1):
            notes.append(
                f"gradients were sent in {_codec_text(self._codec_fallbacks[rung])} from then on: "
                f"{reason}"
            )
        return tuple(notes)

    def meter(self, call: Any) -> int:
        """Return the peak bytes of ``call``.

        These are the resident bytes, the bytes that the call adds in the allocator, and the buffers
        for transfers to offload memory.
        """
        resident = self.resident_bytes()
        metered = meter_once(call, device=self._device)
        if not metered.is_clean:
            self.notes.append(
                f"the metered step freed {format_bytes(metered.freed_bytes)} from before it; "
                "its measured memory may be that much too high"
            )
        return resident + metered.peak_bytes

    def resident_bytes(self) -> int:
        """Return the bytes that are resident for a whole step, as the plan counts them."""
        resident = resident_bytes(self.live, self._constants) + self._batch_bytes
        return resident + (2 * OFFLOAD_PIECE_BYTES if self.offload_file else 0)

    def _note_on_gradients(self) -> tuple[str, ...]:
        """Return a note on gradients that the user's loop keeps between steps.

        A planned step starts without gradients.
        """
        if not self._keeps_gradients:
            return ()
        program = self._as_executed(self.live.program)
        nbytes = kept_gradients_bytes(program, self._pricing.made.costs)
        if not nbytes:
            return ()
        return (f"gradients kept between steps add ~{format_bytes(nbytes)} to the plan",)

    def _metered_call(self, call: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
        """Return the peak bytes and the loss; the call is slow, so its time is not used."""
        losses: list[torch.Tensor] = []
        nbytes = self.meter(lambda: losses.append(call()))
        self._note_loss(losses[0])
        return nbytes, losses[0]

    def _timed_call(
        self, call: Callable[[], torch.Tensor], lap: Callable[[], Callable[[], None]]
    ) -> torch.Tensor:
        before, is_over = self.traffic(), lap()
        loss = call()
        if self.is_as_planned:
            is_over()
            # Bytes that are sent between two calls belong to the user's own code.
            added = (b - a for a, b in zip(before, self.traffic(), strict=True))
            self._traffic.append(Traffic(*map(sum, zip(self._traffic[-1], added))))
        self._note_loss(loss)
        return loss

    @property
    def _is_metered(self) -> bool:
        passes = None if self._user_loop is None else self._user_loop.passes_bytes()
        return self._metered is not None or passes is not None

    def _measured_peak_bytes(self) -> int | None:
        """The measured peak of this rank; None before a step was metered."""
        loop = self._user_loop
        if loop is None or self._metered is not None:
            return self._metered
        return loop.peak_bytes(has_update=self._update is not None)

    def _exchange_measurements(self) -> None:
        """Exchange measured peaks and non-finite codes between ranks, after some of the calls.

        All ranks make the same calls. The exchange cannot wait for the receipt, because a single
        rank may ask for one.
        """
        if not self.ranks.channels:
            return
        calls = self._calls + (self._user_loop.passes if self._user_loop else 0)
        if calls >= self._next_report:
            self._next_report = 2 * calls
            peak_bytes = self._measured_peak_bytes()
            self._peak_bytes_by_rank = self.ranks.coordinator.each(
                -1 if peak_bytes is None else peak_bytes
            )
        # All ranks see it after the same call, because they all have the same loss.
        if self._finite is not None and self._finite.failed_at and not self._finite_codes:
            self._finite_codes = self.ranks.coordinator.each(self._finite.code)

    def _note_loss(self, loss: torch.Tensor) -> None:
        del self._losses[1:]
        self._losses.append(loss)

    def _offloaded_states(
        self, optimizer: torch.optim.Optimizer | None, program: Program
    ) -> OffloadedStates | None:
        """Return the offloaded weights, gradients and optimizer state, if the plan offloads any."""
        if not program.far_rooms:
            return None
        assert self.offload_file is not None
        parameters = dict(self._source.model.named_parameters())
        return OffloadedStates(optimizer, program, parameters=parameters, memory=self.offload_file)

    def _guard(self) -> CompressionFallback | None:
        if len(self._codec_fallbacks) == 1:
            return None
        return CompressionFallback(
            len(self._codec_fallbacks), warm_up=warm_up_of(self.plan.decisions.rules)
        )

    def _runner(self, states: OffloadedStates | None) -> Callable[[Program], Emitted]:
        tensors = states.tensors if states else None

        def run(program: Program) -> Emitted:
            # The ranks that take part may change during the run.
            channels, watch = self.ranks.channels, self._exchange_watch
            if self._is_compiled:
                return compile_program(program, channels=channels, watch=watch)
            return emit(
                program,
                channels=channels,
                watch=watch,
                offload_file=self.offload_file,
                tensors=tensors,
            )

        return run

    @property
    def _exchange_watch(self) -> FiniteWatch | None:
        return self._finite if self.ranks.channels else None

    @property
    def _is_compiled(self) -> bool:
        return self.plan.decisions.target.runner == "inductor"

    def _as_executed(self, program: Program) -> Program:
        """Return the program as the runner executes it, for predictions of its memory."""
        return lower(program) if self._is_compiled else program

    def _program_for(self, source: CapturedStep, rung: int = 0) -> tuple[Program, Captured]:
        """Return the program of the plan's rules on this step, in the given fallback codec."""
        rules = [self._fit_micro_batches(rule, source) for rule in self._codec_fallbacks[rung]]
        if self.ranks.stands_by:
            # A rank that stands by checks batches as the others do, but never runs the program.
            rules = [rule for rule in rules if rule.stage not in BETWEEN_RANKS]
        # The full model is traced first; it is split into shards when the first step is bound.
        with self._sharded_model.imagined() if self._sharded_model else contextlib.nullcontext():
            graph = source.captured().graph
            base = Program.plain(graph, update=self._update, rank=self.ranks.rank)
            program = apply_rules(base, rules, trades=TRADES, source=source)
            if program.layout.shares and self.ranks is self._plan_ranks:
                self.ranks.coordinator.check_equal("exchanges", "\n".join(program.collective_order))
            return program, source.captured(micro_batches=program.units, share=program.share)

    def _fit_micro_batches(self, rule: Rule, source: CapturedStep) -> Rule:
        """Return the rule for the size of this batch.

        A smaller last batch may not divide into the planned number of micro-batches. It is split
        into the fewest micro-batches that are no larger than planned.
        """
        size, layout = batch_size(source.batch), ParallelLayout.of(self.plan.decisions.rules)
        possible = ShardedSource(source=source, layout=layout).divisors()
        if not isinstance(rule, MicroBatches) or not possible or size is None:
            return rule
        if rule.micro_batches in possible:
            return rule
        size //= layout.units
        max_samples = (batch_size(self._source.batch) or 1) // layout.units // rule.micro_batches
        parts = min(k for k in possible if size // k <= max(max_samples, 1))
        return replace(rule, micro_batches=parts)

    def _bind_other_shape(self, batch: Any) -> tuple[Program, Constants, CodeReads]:
        """Return the program for a batch of another shape, if it fits the budget."""
        size, layout = batch_size(batch), ParallelLayout.of(self.plan.decisions.rules)
        if size is not None and size % layout.units:
            shares = f"shares of {spelled(layout.shares)}" if layout.shares else "equal shares"
            raise Mismatch(
                f"a batch of {size} samples does not divide into {shares} for {layout.data} ranks",
                expected=f"a number of samples that {layout.units} divides",
                remedy="drop the last partial batch (drop_last=True), or pad it",
            )
        entries = self._source.at(batch).entries()
        has_planned_shape = [e.shape for e in entries] == [e.shape for e in self._source.entries()]
        # A sharded model provides the shapes of the full model, without values. A batch of the
        # planned shape was already tried, when its loss was computed.
        source = self._source
        if not has_planned_shape or self._sharded_model is not None:
            source = self._source.at(
                batch, with_values=self._sharded_model is None and not has_planned_shape
            )
        program, captured = self._program_for(source, self.live.rung)
        num_unmeasured = self._pricing.made.measure(program.graph, may_lack=True)
        limit = self.plan.decisions.budget.memory_bytes
        if has_planned_shape and limit is None:
            return program, captured.constants, captured.reads  # only the codecs differ
        # The rank with the highest need decides: all ranks continue, or none does.
        as_executed = self._as_executed(program)
        nbytes = self.ranks.coordinator.most(peak_bytes(as_executed, self._pricing.made.costs))
        if limit is not None and nbytes > limit:
            what = (
                "a step in another gradient codec"
                if has_planned_shape
                else "a batch of another shape"
            )
            raise Mismatch(
                f"{what} would need {format_bytes(nbytes)} under this plan",
                expected=f"at most {format_bytes(limit)}, the plan's budget",
                remedy="drop or pad that batch, raise the budget, or plan for this shape",
            )
        if (
            self.offload_file is not None
            and program.far_bytes > self.offload_file.offload_memory.size_bytes
        ):
            raise Mismatch(
                f"a batch of another shape would offload {format_bytes(program.far_bytes)}",
                expected=f"at most {format_bytes(self.offload_file.offload_memory.size_bytes)}, "
                "the size of the offload memory",
                remedy="drop that batch, give offload memory a larger size, or plan for this shape",
            )
        if has_planned_shape:
            return program, captured.constants, captured.reads
        shapes = ", ".join(str(list(e.shape)) for e in entries[:2])
        cut = f" in {program.repeats} micro-batches" if program.repeats > 1 else ""
        unmeasured_text = (
            f"; {num_unmeasured} of its operators were not measured, because a profiler was active"
        )
        self.notes.append(
            f"also ran batches of {shapes}{cut} (predicted {format_bytes(nbytes)}"
            f"{unmeasured_text if num_unmeasured else ''})"
        )
        return program, captured.constants, captured.reads


def _codec_text(rules: Sequence[Rule]) -> str:
    codes = {rule.codec.label for rule in of_kind(rules, GradientCompression)}
    return " and ".join(sorted(label.removeprefix("gradients in ") for label in codes)) or "no code"


class ShownReceipt:
    """A receipt with measured and predicted values; printing it shows the explain tree."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self.plan, self.measured = receipt.plan, receipt.measured

    def __str__(self) -> str:
        return plain(render(tree_of(self.receipt)))

    def _repr_html_(self) -> str:
        """Return the page that ``steelyard run --html`` writes, for display in a notebook."""
        return to_html(tree_of(self.receipt))


def median_traffic(traffic: Sequence[Traffic]) -> Traffic | None:
    """Return the median traffic of a step, without the first step; None before the second."""
    added = [[b - a for a, b in zip(*both)] for both in pairwise(traffic)][1:]
    return Traffic(*map(median, zip(*added))) if added else None


def resident_bytes(live: LiveStep, constants: Sequence[torch.Tensor] = ()) -> int:
    """Return the bytes of the storages that outlive a step.

    These hold weights, buffers, optimizer state, other tensors that the code reads, message buffers
    shared with other ranks, and gradients kept from earlier steps.
    """
    tensors = [*live.model.parameters(), *live.model.buffers(), *live.gradients(), *constants]
    tensors += live.residuals.tensors
    if live.optimizer is not None:
        for state in live.optimizer.state.values():
            tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    if live.states is not None:
        tensors = [t for t in tensors if not live.states.tensors.holds(t)]
    storages = {_torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) + live.shared_bytes


def _refuse_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise BadInput(
                f"parameter {name} is on the meta device and has no values",
                expected="a model with weights to train",
                remedy="build the model on a real device; a model on meta can be planned but not "
                "run",
            )
