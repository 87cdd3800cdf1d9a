"""A plan at work on a live model: the step a user calls, and its receipt.

Wires run/ to the meters of measure/. Not for the loop behind ``steelyard run``: see train.py.
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
    CODE_TRADES,
    CODED_CALLS,
    codec_fallbacks,
    codec_of,
    warm_up_of,
)
from steelyard.ir.parallel_layout import DATA, LAYOUT_TRADES, ParallelLayout, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import ShardedSource
from steelyard.measure.operators.memory import is_profiled, meter_once
from steelyard.measure.operators.timer import Laps
from steelyard.measure.process import rss_peak_bytes
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.offload.tier import OffloadFile
from steelyard.planner.cost_provider import LazyCosts
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

# The second call: after what only a first call allocates, before a training loop is under way.
_METERED_CALL = 2
# Before, between and behind the first steps of whoever reports them.
_LOOKS = 4
# Ranks first tell each other what they hold at their peak after so many calls.
_TOLD_AFTER = 4


class Traffic(NamedTuple):
    """Seconds that values were on their way to offload memory or back; that they, or other ranks,
    were
    waited for; bytes that this rank has sent to others; and seconds in which it wrote gradients
    down and read them back."""

    busy: float
    waited: float
    sent: float
    coded: float


class Step:
    """``step(batch)``: forward, backward, optimizer; the loss, a tensor.

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
        self._home = torch_device_of(source.model)
        self.ranks = self._all_ranks = RankContext.of(
            ParallelLayout.of(plan.decisions.rules), self._home
        )
        self._members = tuple(range(self.ranks.layout.num_ranks))
        if self.ranks.groups:
            broadcast_model([*source.model.parameters(), *source.model.buffers()], self._home)
        self._parts: ShardedTensors | ShardedLayers | ShardedTensorsOfLayers | None = None
        self._codec_fallbacks = codec_fallbacks(plan.decisions.rules)
        program, captured = self._program_at(source)
        captured.reads.check()
        offload_memory = plan.decisions.offload_memory
        self.offload_file = OffloadFile(offload_memory) if offload_memory else None
        if (program.partings or program.pipeline) and optimizer is None:
            raise BadInput(
                "the plan gives each rank a part of the weights, and what updates them is not "
                "known",
                expected="an optimizer, so that it can be tried whether its step is the same on "
                "parts",
                remedy="plan with optimizer=, and call step(batch)",
            )
        self._parts = self.ranks.parts_of(source.model, program)
        live_optimizer = None if optimizer is None else optimizer(source.model.parameters())
        if live_optimizer is not None:
            refuse_foreign(live_optimizer, source.model.parameters())
        states = self._states_far(live_optimizer, program)
        is_watched = bool(self.ranks.channels) or self._home.type == "cpu"
        self._finite = FiniteWatch(self._home) if is_watched else None
        self._finite_codes: list[int] = []
        self.live = LiveStep(
            source.model,
            program,
            constants=captured.constants,
            batch=source.batch,
            optimizer=live_optimizer,
            states=states,
            parts=self._parts,
            reduction=source.reduction().value if program.parts > 1 else "mean",
            other_shape=self._other_shape,
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
        self._laps = Laps(self._home)
        self._wire, self._looks = SentBytesCounter(), 0
        self._traffic = [self.traffic()]
        self._losses: list[torch.Tensor] = []
        self._metered: int | None = None
        self.notes: list[str] = []
        self._calls = 0
        self._keeps_gradients = False
        self._own_loop: UserLoop | None = None
        # Steps that were not metered, because a profiler was on or the batch of another shape.
        self._profiled = self._of_other_shape = 0
        self._held_by_rank: list[int] = []
        self._told_after = _TOLD_AFTER

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
        self._tell_ranks()
        return loss

    def backward(self, batch: Any, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Add gradients of ``scale`` times the loss, as ``(loss * scale).backward()`` would."""
        self._refuse_other_ranks()
        if self._parts is not None:
            raise BadInput(
                "step.backward leaves gradients, of which this rank would have parts: to clip them "
                "by their norm, or to unscale them, each rank would do something else",
                expected="step(batch), which updates too",
                remedy="take the rules that shard weights out of the plan, or call step(batch)",
            )
        if self._own_loop is None:
            self._own_loop = UserLoop(self.live, device=self._home, resident=self.resident_bytes)
        own, kept = self._own_loop, bool(self.live.gradients())
        self._keeps_gradients = self._keeps_gradients or kept
        with own.a_pass() as is_new_step:
            if self._finite is not None:
                self._finite.adds_up = not is_new_step
            if own.lacks_peak(kept=kept) and self.may_meter(batch):
                nbytes, loss = self._metered_call(lambda: self.live.backward(batch, scale))
                own.note_peak(nbytes, kept=kept)
            else:
                loss = self._timed_call(lambda: self.live.backward(batch, scale), own.timed)
        self._tell_ranks()
        return loss

    def _refuse_other_ranks(self) -> None:
        """Before each step: a process group may be made after the plan was applied."""
        if ParallelLayout.of(self.plan.decisions.rules).num_ranks == 1 and not self._sums_gradients:
            refuse_other_ranks()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model is whole on every rank, to evaluate or save it; all enter together.

        Between steps a rank may hold parts of weights, where the plan shards tensors.
        """
        return self.live.whole()

    @property
    def stands_in(self) -> str:
        """The device that this runs on and the declared cluster that it was planned for; empty for
        a plan for this machine."""
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
        """What the steps so far cost, beside what they were predicted to cost."""
        # The first step pays for what is made once: state, caches, first touches of memory.
        laps, own = self._laps.seconds[1:], self._own_loop
        seconds = median(laps) if laps else None
        if own is not None and not self._calls:
            seconds = own.step_seconds(has_update=self._update is not None)
        losses = [float(x) for x in self._losses]
        busy, waited, sent = self.exchanged(self._traffic)
        held = [n for n in (self._held_bytes(), *self._held_by_rank) if n is not None and n >= 0]
        return ShownReceipt(
            Receipt(
                plan=self.plan,
                measured=RunMeasurement(
                    steps=self._calls + (own.steps if own else 0),
                    passes=own.passes if own else 0,
                    memory_bytes=max(held, default=None),
                    rss_bytes=rss_peak_bytes(),
                    communication_bytes=sent,
                    communication_seconds=busy,
                    computation_seconds=None if seconds is None else max(0.0, seconds - waited),
                    step_seconds=seconds,
                    first_loss=losses[0] if losses else None,
                    last_loss=losses[-1] if losses else None,
                    ranks=self.memory_of_ranks(self._held_by_rank),
                    stands_in=self.stands_in,
                    notes=(
                        *self.notes,
                        *self._note_on_finite(),
                        *self.notes_on_metering(is_metered=self._is_metered),
                        *(own.notes(has_update=self._update is not None) if own else ()),
                        *self.notes_on_ranks(waited, sent),
                        *self.notes_on_codes(self._traffic),
                        *self._note_on_gradients(),
                    ),
                ),
            )
        )

    def may_meter(self, batch: Any) -> bool:
        """Whether a step with this batch is as it was planned, and no profiler is on, which
        metering it would take events from."""
        if not self.live.is_planned(batch):
            self._of_other_shape += 1
            return False
        if is_profiled(self._home):
            self._profiled += 1
            return False
        return True

    def _note_on_finite(self) -> tuple[str, ...]:
        """In which step the loss was not finite, and whose values were so first."""
        finite = self._finite
        if finite is None or finite.failed_at is None:
            return ()
        many = bool(self.ranks.channels)
        codes = self._finite_codes if many else [finite.code]
        first = blamed(codes).words if codes else ""
        said = f"; first not finite: {first}" if first else ""
        return (f"the loss was not finite in step {finite.failed_at}{said}",)

    def notes_on_metering(self, *, is_metered: bool) -> tuple[str, ...]:
        """Why no step was metered, where one could have been."""
        why = []
        if self._profiled:
            why.append(
                f"a profiler was on in {self._profiled} of them, and metering a step would have "
                "taken its events"
            )
        if self._of_other_shape:
            why.append(f"{self._of_other_shape} were of another batch shape, or in other codes")
        if is_metered or not why:
            return ()
        return (f"no step's memory was measured: {'; '.join(why)}",)

    def memory_of_ranks(self, held: Sequence[int]) -> tuple[RankMemory, ...]:
        """Beside what was predicted; ``held`` by each rank, or less than nothing where that is not
        known."""
        if not self.ranks.channels:
            return ()
        program = self.live.program
        if program.layout.shares:
            # This rank's is of its own share, and others hold what other shares take.
            base = Program.plain(self._source.captured().graph, update=self._update)
            rules = self._codec_fallbacks[0]
            program = apply_rules_on_ranks(base, rules, trades=TRADES, source=self._source)
            others = tuple(self._as_run(one) for one in program.sibling_programs)
            said = rank_peak_bytes(
                replace(self._as_run(program), sibling_programs=others), self._pricing.made.costs
            )
        elif program.pipeline is None:
            # All hold the same, which the plan says: nothing needs to be measured for it.
            said = (self.plan.predicted.peak.nbytes,) * program.layout.num_ranks
        else:
            said = rank_peak_bytes(self._as_run(program), self._pricing.made.costs)
        known = dict(enumerate(held))
        return tuple(
            RankMemory(
                rank=rank,
                predicted_bytes=nbytes,
                measured_bytes=found if (found := known.get(rank, -1)) >= 0 else None,
            )
            for rank, nbytes in enumerate(said)
        )

    @property
    def are_unequal(self) -> bool:
        """Whether ranks have unequal shares of the batch, or unequal speeds."""
        decisions = self.plan.decisions
        return (
            bool(ParallelLayout.of(decisions.rules).shares) or len({*decisions.target.speeds}) > 1
        )

    def traffic(self) -> Traffic:
        """So far: see there."""
        busy = waited = sent = coded = 0.0
        if self.ranks.channels:
            if self._looks < _LOOKS:  # connections come about when they are first used
                self._looks += 1
                self._wire.look()
            waited = sum(channel.waiting.seconds for channel in self.ranks.channels.values())
            coded = sum(channel.coding.seconds for channel in self.ranks.channels.values())
            moved = sum(channel.waiting.moved_bytes for channel in self.ranks.channels.values())
            sent = self._wire.sent_bytes + self.live.moved_bytes + moved
            sent -= self.ranks.coordinator.asked_bytes
        if self.offload_file is not None:
            busy, waited = self.offload_file.busy_seconds, self.offload_file.waited_seconds + waited
        return Traffic(busy, waited, sent, coded)

    def exchanged(self, traffic: Sequence[Traffic]) -> tuple[float | None, float, int | None]:
        """Of a step: seconds in which something was on its way, None where nobody knows; in which
        it was waited for; and the bytes that went to other ranks. Torch does not say when an
        exchange among ranks is over."""
        found, many = between(traffic), bool(self.ranks.channels)
        if found is None:
            return (None if self.offload_file or many else 0.0), 0.0, None
        sent = round(found.sent) if many and self._is_counted else None
        return (None if many else found.busy), found.waited, sent

    @property
    def _is_counted(self) -> bool:
        """What goes over connections the kernel counts, and what goes through slots is counted
        here; NCCL says nothing of what it sends."""
        if all(channel.backend == "gloo" for channel in self.ranks.channels.values()):
            return self._wire.is_counted
        program = self.live.program
        exchanged = (node.collective for node in program.graph.nodes if node.collective is not None)
        summed = program.pipeline is not None and (
            DATA in self.ranks.groups or program.pipeline.stages.shared
        )
        return self._wire.is_counted and not summed and all(c.is_pinned for c in exchanged)

    def notes_on_ranks(self, waited: float, sent: int | None) -> tuple[str, ...]:
        if not self.ranks.channels:
            return ()
        metrics = self.plan.predicted.metrics
        own, said = format_seconds(waited), metrics.exposed_communication_seconds.value
        notes = [f"waited {own} of a step for other ranks (predicted ~{format_seconds(said)})"]
        if sent is not None:
            own, said = format_bytes(sent), metrics.communication_bytes.value
            notes.append(f"sent {own} of a step to other ranks (predicted {format_bytes(said)})")
        return tuple(notes)

    def turn_to(self, plan: Plan, members: Sequence[int] | None = None) -> None:
        """From the next step on by this plan, in which ranks hold what they hold now; all turn.

        ``members`` are the ranks that take part, all unless said, and the first of all is one of
        them. The others stand by: they take batches, hear the loss and update nothing. Those that
        come back are sent what they have missed.
        """
        everyone = self._all_ranks
        whole = tuple(range(everyone.layout.num_ranks))
        members = whole if members is None else tuple(members)
        assert members[0] == 0, "the first rank saves, so it takes every step"
        assert ParallelLayout.of(plan.decisions.rules).num_ranks == len(members)
        # What codes hold back is put together by those that hold it.
        self.live.residuals.owe_all()
        if not set(members) <= set(self._members):
            bring_up_to_date(self.live, everyone.coordinator)
        self.plan, self._codec_fallbacks = plan, codec_fallbacks(plan.decisions.rules)
        if members != self._members:
            layout = ParallelLayout.of(plan.decisions.rules)
            self.ranks = everyone if members == whole else everyone.among(members, layout)
            self._members = members
            self.live.turn_among(
                rank=layout.place(self.ranks.rank, DATA),
                channels=self.ranks.channels,
                tell_loss=None if members == whole else self.ranks.coordinator.tell_loss,
                stands_by=self.ranks.stands_by,
            )
            self._wire, self._looks = SentBytesCounter(), 0
        self.live.begin_anew(self._guard())
        self._laps.clear()
        self._traffic = [self.traffic()]

    @property
    def can_stand_by(self) -> bool:
        """Whether steps may go on without some ranks, which could come back later."""
        live = self.live
        return live.states is None and live.parts is None and live.program.pipeline is None

    @property
    def state_bytes(self) -> int:
        """What a rank that comes back is sent: the model, and what the optimizer keeps."""
        return resident_bytes(self.live) - self.live.shared_bytes

    @property
    def is_as_planned(self) -> bool:
        """Whether the last step's gradients went in the codes that the plan says."""
        return self.live.rung == 0

    @property
    def gave_up_codes(self) -> bool:
        """True if the guard has replaced a gradient code of this plan by a less lossy one."""
        guard = self.live.guard
        return guard is not None and guard.rung != 0 and not guard.warm_up

    def notes_on_codes(self, traffic: Sequence[Traffic]) -> tuple[str, ...]:
        """What coding took, how many steps went without, what was held back, and which codes were
        given up."""
        if self.live.guard is None:
            return ()
        seen, notes, found = self.live.guard.seen(), list[str](), between(traffic)
        if found is not None and found.coded:
            costs = self._pricing.made.costs.on(self.ranks.layout.num_ranks).of_rank(
                self.ranks.rank
            )
            nodes = (n for n in self.live.program.graph.nodes if n.op in CODED_CALLS)
            said = sum(costs.seconds(node).value for node in nodes)
            notes.append(
                f"wrote gradients down and read them back in {format_seconds(found.coded)} of a "
                f"step (predicted ~{format_seconds(said)})"
            )
        if seen.exact_steps:
            notes.append(
                f"{seen.exact_steps} steps went without codes, and are in no figure of a step"
            )
        if any(seen.held):
            notes.append(
                f"codes held back {max(seen.held):.2g} steps' worth of gradients at most, in "
                f"{len(seen.held)} looks"
            )
        for number, reason in enumerate(seen.reasons, start=1):
            notes.append(
                f"gradients went in {_coded_in(self._codec_fallbacks[number])} from then: {reason}"
            )
        return tuple(notes)

    def meter(self, call: Any) -> int:
        """The bytes at the peak of ``call``: what is resident and what it adds, by the allocator,
        and beside it the pieces in which values are moved to offload memory."""
        resident = self.resident_bytes()
        metered = meter_once(call, device=self._home)
        if not metered.is_clean:
            self.notes.append(
                f"the metered step freed {format_bytes(metered.freed_bytes)} from before it; "
                "its measured memory may be that much too high"
            )
        return resident + metered.peak_bytes

    def resident_bytes(self) -> int:
        """What stays for a whole step, as the plan counts it."""
        resident = resident_bytes(self.live, self._constants) + self._batch_bytes
        return resident + (2 * OFFLOAD_PIECE_BYTES if self.offload_file else 0)

    def _note_on_gradients(self) -> tuple[str, ...]:
        """A loop of the user's own may keep them; a step that is planned begins without."""
        if not self._keeps_gradients:
            return ()
        program = self._as_run(self.live.program)
        nbytes = kept_gradients_bytes(program, self._pricing.made.costs)
        if not nbytes:
            return ()
        return (
            f"gradients kept from one step to the next add ~{format_bytes(nbytes)} to the plan",
        )

    def _metered_call(self, call: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
        """Its peak and the loss. It is slowed, and counts for nothing else."""
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
            # What went over connections between two calls is the user's own.
            added = (b - a for a, b in zip(before, self.traffic(), strict=True))
            self._traffic.append(Traffic(*map(sum, zip(self._traffic[-1], added))))
        self._note_loss(loss)
        return loss

    @property
    def _is_metered(self) -> bool:
        passes = None if self._own_loop is None else self._own_loop.passes_bytes()
        return self._metered is not None or passes is not None

    def _held_bytes(self) -> int | None:
        """The peak that was measured on this rank; None where no step was metered yet."""
        own = self._own_loop
        if own is None or self._metered is not None:
            return self._metered
        return own.peak_bytes(has_update=self._update is not None)

    def _tell_ranks(self) -> None:
        """Ranks take the same calls, and after some of them tell each other what they hold: at a
        receipt it would be too late, for which one of them may ask alone."""
        if not self.ranks.channels:
            return
        calls = self._calls + (self._own_loop.passes if self._own_loop else 0)
        if calls >= self._told_after:
            self._told_after = 2 * calls
            held = self._held_bytes()
            self._held_by_rank = self.ranks.coordinator.each(-1 if held is None else held)
        # All ranks find it after the same call: it is the loss of all.
        if self._finite is not None and self._finite.failed_at and not self._finite_codes:
            self._finite_codes = self.ranks.coordinator.each(self._finite.code)

    def _note_loss(self, loss: torch.Tensor) -> None:
        del self._losses[1:]
        self._losses.append(loss)

    def _states_far(
        self, optimizer: torch.optim.Optimizer | None, program: Program
    ) -> OffloadedStates | None:
        """Weights, gradients and what the optimizer keeps, where the plan moves them."""
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
            # Ranks may become others while the run goes on.
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

    def _as_run(self, program: Program) -> Program:
        """What the runner makes of it, of which the bytes are told."""
        return lower(program) if self._is_compiled else program

    def _program_at(self, source: CapturedStep, rung: int = 0) -> tuple[Program, Captured]:
        """The plan's rules applied on the whole trace of this step, in the codes of the next."""
        rules = [self._at(rule, source) for rule in self._codec_fallbacks[rung]]
        if self.ranks.stands_by:
            # It is bound so that batches are checked as on the others, and never run.
            rules = [rule for rule in rules if rule.trade not in LAYOUT_TRADES]
        # A whole model is traced, of which there are parts once the first step is bound.
        with self._parts.imagined() if self._parts else contextlib.nullcontext():
            graph = source.captured().graph
            base = Program.plain(graph, update=self._update, rank=self.ranks.rank)
            program = apply_rules(base, rules, trades=TRADES, source=source)
            if program.layout.shares and self.ranks is self._all_ranks:
                self.ranks.coordinator.check_equal("exchanges", "\n".join(program.spoken))
            return program, source.captured(micro_batches=program.units, share=program.share)

    def _at(self, rule: Rule, source: CapturedStep) -> Rule:
        """A last batch that is no multiple of the parts is cut into the fewest no larger."""
        size, layout = batch_size(source.batch), ParallelLayout.of(self.plan.decisions.rules)
        possible = ShardedSource(source=source, layout=layout).divisors()
        if rule.trade != "accumulate" or rule.degree in possible or not possible or size is None:
            return rule
        size //= layout.units
        most = (batch_size(self._source.batch) or 1) // layout.units // rule.degree
        return replace(rule, degree=min(k for k in possible if size // k <= max(most, 1)))

    def _other_shape(self, batch: Any) -> tuple[Program, Constants, CodeReads]:
        """The same rules at another batch shape: predicted, and run if they fit."""
        size, layout = batch_size(batch), ParallelLayout.of(self.plan.decisions.rules)
        if size is not None and size % layout.units:
            shares = f"shares of {spelled(layout.shares)}" if layout.shares else "equal shares"
            raise Mismatch(
                f"a batch of {size} has no {shares} for {layout.batch} ranks",
                expected=f"a number of samples that {layout.units} divides",
                remedy="drop the last partial batch (drop_last=True), or pad it",
            )
        entries = self._source.at(batch).entries()
        is_alike = [e.shape for e in entries] == [e.shape for e in self._source.entries()]
        # A model of which this rank holds a part lends the forms of the whole, without values; and
        # of a batch of the same shape it has been tried, when the loss was a number.
        source = self._source
        if not is_alike or self._parts is not None:
            source = self._source.at(batch, with_values=self._parts is None and not is_alike)
        program, captured = self._program_at(source, self.live.rung)
        lacking = self._pricing.made.measure(program.graph, may_lack=True)
        limit = self.plan.decisions.budget.memory_bytes
        if is_alike and limit is None:
            return program, captured.constants, captured.reads  # in other codes alone
        # Of the rank that needs most: all go on, or none does.
        as_executed = self._as_run(program)
        nbytes = self.ranks.coordinator.most(peak_bytes(as_executed, self._pricing.made.costs))
        if limit is not None and nbytes > limit:
            what = "a step in other codes" if is_alike else "a batch of another shape"
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
                f"a batch of another shape would move {format_bytes(program.far_bytes)} far",
                expected=f"at most {format_bytes(self.offload_file.offload_memory.size_bytes)}, "
                "what it may hold",
                remedy="drop that batch, allow offload memory a larger size, or plan for this "
                "shape",
            )
        if is_alike:
            return program, captured.constants, captured.reads
        shapes = ", ".join(str(list(e.shape)) for e in entries[:2])
        cut = f" in {program.repeats} micro-batches" if program.repeats > 1 else ""
        lacks = f"; {lacking} operators of it were not measured, as a profiler was on"
        self.notes.append(
            f"also ran batches of {shapes}{cut} (predicted {format_bytes(nbytes)}"
            f"{lacks if lacking else ''})"
        )
        return program, captured.constants, captured.reads


def _coded_in(rules: Sequence[Rule]) -> str:
    codes = {codec_of(rule).label for rule in rules if rule.trade in CODE_TRADES}
    return " and ".join(sorted(label.removeprefix("gradients in ") for label in codes)) or "no code"


class ShownReceipt:
    """A receipt that prints as the explain tree with measured beside predicted."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self.plan, self.measured = receipt.plan, receipt.measured

    def __str__(self) -> str:
        return plain(render(tree_of(self.receipt)))

    def _repr_html_(self) -> str:
        """The page that ``steelyard run --html`` writes, for a notebook."""
        return to_html(tree_of(self.receipt))


def between(traffic: Sequence[Traffic]) -> Traffic | None:
    """The median of what each step added, the first left out; None before the second."""
    added = [[b - a for a, b in zip(*both)] for both in pairwise(traffic)][1:]
    return Traffic(*map(median, zip(*added))) if added else None


def resident_bytes(live: LiveStep, constants: Sequence[torch.Tensor] = ()) -> int:
    """Bytes of the storages that outlive a step: weights, buffers, optimizer state, what else the
    code reads, room for messages of other ranks; and gradients that are kept from before.
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
                remedy="build the model on a real device; on meta it can only be planned",
            )
