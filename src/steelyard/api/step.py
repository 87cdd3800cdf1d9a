"""The step of an applied plan: called by the user on a live model, and reported in a receipt.

Connects run/ to the meters of measure/. Not for the loop of ``steelyard run``: see train.py.
"""

import contextlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from steelyard.api.batch_program import BatchPrograms
from steelyard.api.memory_meter import MemoryMeter, resident_bytes
from steelyard.api.rank_context import RankContext, refuse_other_ranks
from steelyard.api.receipt import (
    ShownReceipt,
    note_on_coding,
    notes_on_fallbacks,
    notes_on_finite,
    notes_on_ranks,
)
from steelyard.api.traffic import Traffic, TrafficCounter, median_traffic
from steelyard.api.user_loop import UserLoop
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.optimizer import OptimizerFactory, refuse_foreign
from steelyard.comm.devices import torch_device_of
from steelyard.errors import BadInput
from steelyard.hardware.host_os import this_device
from steelyard.ir.parallel_layout import DATA, ParallelLayout
from steelyard.ir.program import Program
from steelyard.measure.operators.timer import Laps
from steelyard.measure.process import rss_peak_bytes
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.offload.tier import OffloadFile
from steelyard.planner.cost_provider import LazyCosts
from steelyard.plans.codec_fallbacks import warm_up_of
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import RankMemory, Receipt, RunMeasurement
from steelyard.predict import kept_gradients_bytes
from steelyard.run.codegen import Emitted, emit
from steelyard.run.compiled.inductor import compile_program
from steelyard.run.compression_fallback import CompressionFallback
from steelyard.run.finite_check import FiniteWatch
from steelyard.run.launch.coordination import bring_up_to_date, broadcast_model
from steelyard.run.step import LiveStep
from steelyard.safe_text import printable
from steelyard.units import format_bytes

# The second call is metered. The first one also allocates state, and metering a later one would
# interrupt the user's training loop.
_METERED_CALL = 2
# Ranks first exchange their measured peaks after this many calls.
_FIRST_REPORT = 4


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
        self.notes: list[str] = []
        self._programs = BatchPrograms(
            plan,
            source,
            pricing=pricing,
            update=update,
            ranks=self.ranks,
            on_note=self.notes.append,
        )
        program, captured = self._programs.program_for(source)
        captured.reads.check()
        offload_memory = plan.decisions.offload_memory
        self.offload_file = OffloadFile(offload_memory) if offload_memory else None
        if (program.shardings or program.pipeline) and optimizer is None:
            raise BadInput(
                "the plan shards the weights, but no optimizer was given",
                expected="an optimizer, so that its step can be tested on shards",
                remedy="plan with optimizer=, and call step(batch)",
            )
        sharded_model = self._programs.sharded_model = self.ranks.parts_of(source.model, program)
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
            parts=sharded_model,
            reduction=source.reduction().value if program.parts > 1 else "mean",
            other_shape=lambda batch: self._programs.for_batch(batch, rung=self.live.rung),
            on_change=lambda words: self.ranks.coordinator.check_equal("batch", words),
            runner=self._runner(states),
            reads=captured.reads,
            rank=program.layout.place(self.ranks.rank, DATA),
            in_stages=self.ranks.in_stages,
            channels=self.ranks.channels,
            guard=self._guard(),
            finite=self._finite,
        )
        self.memory_meter = MemoryMeter(
            self.live,
            device=self._device,
            constants=tuple(captured.constants.values()),
            batch_bytes=program.batch_bytes,
            moves_pieces=self.offload_file is not None,
            on_note=self.notes.append,
        )
        self._laps = Laps(self._device)
        self.traffic_counter = TrafficCounter(self.live, self.ranks, offload_file=self.offload_file)
        self._traffic = [self.traffic_counter.total()]
        self._losses: list[torch.Tensor] = []
        self._metered: int | None = None
        self._calls = 0
        self._keeps_gradients = False
        self._user_loop: UserLoop | None = None
        self._peak_bytes_by_rank: list[int] = []
        self._next_report = _FIRST_REPORT

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.live.optimizer

    def __call__(self, batch: Any) -> torch.Tensor:
        self._refuse_other_ranks()
        self._calls += 1
        first = _METERED_CALL + warm_up_of(self.plan.decisions.rules)
        if self._metered is None and self._calls >= first and self.memory_meter.may_meter(batch):
            self.live.zero_grad()
            self._metered, loss = self._metered_call(lambda: self.live(batch))
        else:
            loss = self._timed_call(lambda: self.live(batch), self._laps.begin)
        self._exchange_measurements()
        return loss

    def backward(self, batch: Any, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Add gradients of ``scale`` times the loss, as ``(loss * scale).backward()`` would."""
        self._refuse_other_ranks()
        if self.live.parts is not None:
            raise BadInput(
                "step.backward returns gradients, but this plan shards them: clipping or "
                "unscaling would then differ between ranks",
                expected="step(batch), which also updates the weights",
                remedy="remove the rules that shard weights from the plan, or call step(batch)",
            )
        if self._user_loop is None:
            self._user_loop = UserLoop(
                self.live, device=self._device, resident=self.memory_meter.resident_bytes
            )
        loop, has_gradients = self._user_loop, bool(self.live.gradients())
        self._keeps_gradients = self._keeps_gradients or has_gradients
        with loop.wrap_pass() as is_new_step:
            if self._finite is not None:
                self._finite.adds_up = not is_new_step
            if loop.needs_peak(has_gradients=has_gradients) and self.memory_meter.may_meter(batch):
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
        """The device that runs the step in place of a declared cluster; empty for other plans."""
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

    def receipt(self) -> ShownReceipt:
        """Return the measured cost of the steps so far, with the predicted cost."""
        # The first step also allocates state, fills caches and touches memory for the first time.
        laps, loop = self._laps.seconds[1:], self._user_loop
        seconds = median(laps) if laps else None
        if loop is not None and not self._calls:
            seconds = loop.step_seconds(has_update=self._update is not None)
        losses = [float(x) for x in self._losses]
        busy, waited, sent = self.traffic_counter.median_exchange(self._traffic)
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
                        *notes_on_finite(self._finite, self._rank_codes),
                        *self.memory_meter.notes(is_metered=self._is_metered),
                        *(loop.notes(has_update=self._update is not None) if loop else ()),
                        *self.notes_on_exchange(self._traffic, waited=waited, sent=sent),
                        *self._note_on_gradients(),
                    ),
                ),
            )
        )

    @property
    def _rank_codes(self) -> list[int]:
        """The non-finite codes of the ranks, as far as they are known."""
        if self.ranks.channels or self._finite is None:
            return self._finite_codes
        return [self._finite.code]

    def memory_of_ranks(self, measured: Sequence[int]) -> tuple[RankMemory, ...]:
        """Return predicted and measured peak bytes of each rank.

        ``measured`` is the peak of each rank, negative if unknown.
        """
        if not self.ranks.channels:
            return ()
        known = dict(enumerate(measured))
        return tuple(
            RankMemory(
                rank=rank,
                predicted_bytes=nbytes,
                measured_bytes=found if (found := known.get(rank, -1)) >= 0 else None,
            )
            for rank, nbytes in enumerate(self._programs.peak_bytes_by_rank(self.live.program))
        )

    def notes_on_exchange(
        self, traffic: Sequence[Traffic], *, waited: float, sent: int | None
    ) -> tuple[str, ...]:
        """Return notes on waiting, sending and gradient compression in the median step."""
        notes = list[str]()
        if self.ranks.channels:
            notes += notes_on_ranks(self.plan, waited=waited, sent=sent)
        found = median_traffic(traffic)
        if self.live.guard is not None and found is not None and found.coding:
            costs = self._pricing.made.costs.on(self.ranks.layout.num_ranks)
            notes.append(note_on_coding(self.live, costs.of_rank(self.ranks.rank), found.coding))
        return (*notes, *notes_on_fallbacks(self.live, self._programs.fallbacks))

    def _note_on_gradients(self) -> tuple[str, ...]:
        """Return a note on gradients that the user's loop keeps between steps.

        A planned step starts without gradients.
        """
        if not self._keeps_gradients:
            return ()
        program = self._programs.as_executed(self.live.program)
        nbytes = kept_gradients_bytes(program, self._pricing.made.costs)
        if not nbytes:
            return ()
        return (f"gradients kept between steps add ~{format_bytes(nbytes)} to the plan",)

    @property
    def are_unequal(self) -> bool:
        """True if ranks have unequal batch shares or unequal speeds."""
        decisions = self.plan.decisions
        return (
            bool(ParallelLayout.of(decisions.rules).shares) or len({*decisions.target.speeds}) > 1
        )

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
        self.plan = plan
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
            self.traffic_counter.change_ranks(self.ranks)
        self._programs.switch_plan(plan, self.ranks)
        self.live.switch_programs(self._guard())
        self._laps.clear()
        self._traffic = [self.traffic_counter.total()]

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

    def _metered_call(self, call: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
        """Return the peak bytes and the loss; the call is slow, so its time is not used."""
        losses: list[torch.Tensor] = []
        nbytes = self.memory_meter.peak_bytes(lambda: losses.append(call()))
        self._note_loss(losses[0])
        return nbytes, losses[0]

    def _timed_call(
        self, call: Callable[[], torch.Tensor], lap: Callable[[], Callable[[], None]]
    ) -> torch.Tensor:
        before, is_over = self.traffic_counter.total(), lap()
        loss = call()
        if self.is_as_planned:
            is_over()
            # Bytes that are sent between two calls belong to the user's own code.
            added = (b - a for a, b in zip(before, self.traffic_counter.total(), strict=True))
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
        if not program.offloaded_nbytes:
            return None
        assert self.offload_file is not None
        parameters = dict(self._source.model.named_parameters())
        return OffloadedStates(optimizer, program, parameters=parameters, memory=self.offload_file)

    def _guard(self) -> CompressionFallback | None:
        if len(self._programs.fallbacks) == 1:
            return None
        return CompressionFallback(
            len(self._programs.fallbacks), warm_up=warm_up_of(self.plan.decisions.rules)
        )

    def _runner(self, states: OffloadedStates | None) -> Callable[[Program], Emitted]:
        tensors = states.tensors if states else None

        def run(program: Program) -> Emitted:
            # The ranks that take part may change during the run.
            channels, watch = self.ranks.channels, self._exchange_watch
            if self._programs.is_compiled:
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


def _refuse_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise BadInput(
                f"parameter {name} is on the meta device and has no values",
                expected="a model with weights to train",
                remedy="build the model on a real device; a model on meta can be planned but not "
                "run",
            )
