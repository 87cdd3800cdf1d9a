"""The programs of an applied plan, for batches of the planned shape and of others.

A batch of another shape is refused if its program exceeds the budget. Not for running a program:
see step.py.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from steelyard.api.rank_context import RankContext
from steelyard.capture.batch.splitting import batch_size
from steelyard.capture.step import Captured, CapturedStep
from steelyard.errors import Mismatch
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import BETWEEN_RANKS, Rule
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.ir.step_source import ShardedSource
from steelyard.planner.cost_provider import LazyCosts
from steelyard.plans.codec_fallbacks import codec_fallbacks
from steelyard.plans.plan import Plan
from steelyard.plans.trade import apply_rules, apply_rules_on_ranks
from steelyard.predict import peak_bytes, rank_peak_bytes
from steelyard.run.compiled.lower import lower
from steelyard.run.sharded_model.layers import ShardedLayers, ShardedTensorsOfLayers
from steelyard.run.sharded_model.tensors import ShardedTensors
from steelyard.run.step import CodeReads, Constants
from steelyard.trades import TRADES
from steelyard.units import format_bytes


class BatchPrograms:
    """Applies the rules of a plan to a step for any batch, on this rank.

    ``fallbacks`` are the rules with each gradient codec, in the order of falling back.
    ``sharded_model`` is set once the model of ``source`` is split into shards.
    """

    def __init__(
        self,
        plan: Plan,
        source: CapturedStep,
        *,
        pricing: LazyCosts,
        update: Program | None,
        ranks: RankContext,
        on_note: Callable[[str], None],
    ) -> None:
        self._source, self._pricing, self._update = source, pricing, update
        self._plan_ranks, self._on_note = ranks, on_note
        self._offload_memory = plan.decisions.offload_memory
        self.sharded_model: ShardedTensors | ShardedLayers | ShardedTensorsOfLayers | None = None
        self.switch_plan(plan, ranks)

    def switch_plan(self, plan: Plan, ranks: RankContext) -> None:
        """Switch to another plan, whose step these ranks take."""
        self._plan, self._ranks = plan, ranks
        self.fallbacks = codec_fallbacks(plan.decisions.rules)

    @property
    def is_compiled(self) -> bool:
        return self._plan.decisions.target.runner == "inductor"

    def as_executed(self, program: Program) -> Program:
        """Return the program as the runner executes it, for predictions of its memory."""
        return lower(program) if self.is_compiled else program

    def program_for(self, source: CapturedStep, rung: int = 0) -> tuple[Program, Captured]:
        """Return the program of the plan's rules on this step, in the given fallback codec."""
        rules = [self._fit_micro_batches(rule, source) for rule in self.fallbacks[rung]]
        if self._ranks.stands_by:
            # A rank that stands by checks batches as the others do, but never runs the program.
            rules = [rule for rule in rules if rule.stage not in BETWEEN_RANKS]
        # The full model is traced first; it is split into shards when the first step is bound.
        with self.sharded_model.imagined() if self.sharded_model else contextlib.nullcontext():
            graph = source.captured().graph
            base = Program.plain(graph, update=self._update, rank=self._ranks.rank)
            program = apply_rules(base, rules, trades=TRADES, source=source)
            if program.layout.shares and self._ranks is self._plan_ranks:
                self._ranks.coordinator.check_equal(
                    "exchanges", "\n".join(program.collective_order)
                )
            return program, source.captured(micro_batches=program.units, share=program.share)

    def for_batch(self, batch: Any, *, rung: int) -> tuple[Program, Constants, CodeReads]:
        """Return the program for a batch of another shape, if it fits the budget.

        ``rung`` is the position of the gradient codec in the fallback order.
        """
        size, layout = batch_size(batch), ParallelLayout.of(self._plan.decisions.rules)
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
        if not has_planned_shape or self.sharded_model is not None:
            source = self._source.at(
                batch, with_values=self.sharded_model is None and not has_planned_shape
            )
        program, captured = self.program_for(source, rung)
        num_unmeasured = self._pricing.made.measure(program.graph, may_lack=True)
        limit = self._plan.decisions.budget.memory_bytes
        if has_planned_shape and limit is None:
            return program, captured.constants, captured.reads  # only the codecs differ
        # The rank with the highest need decides: all ranks continue, or none does.
        as_executed = self.as_executed(program)
        nbytes = self._ranks.coordinator.most(peak_bytes(as_executed, self._pricing.made.costs))
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
            self._offload_memory is not None
            and program.offload_bytes > self._offload_memory.size_bytes
        ):
            raise Mismatch(
                f"a batch of another shape would offload {format_bytes(program.offload_bytes)}",
                expected=f"at most {format_bytes(self._offload_memory.size_bytes)}, "
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
        self._on_note(
            f"also ran batches of {shapes}{cut} (predicted {format_bytes(nbytes)}"
            f"{unmeasured_text if num_unmeasured else ''})"
        )
        return program, captured.constants, captured.reads

    def peak_bytes_by_rank(self, program: Program) -> tuple[int, ...]:
        """Return the predicted peak bytes of each rank, with the running ``program``."""
        if program.layout.shares:
            # The prediction of this rank covers only its batch share; ranks with other shares
            # differ.
            base = Program.plain(self._source.captured().graph, update=self._update)
            rules = self.fallbacks[0]
            program = apply_rules_on_ranks(base, rules, trades=TRADES, source=self._source)
            others = tuple(self.as_executed(one) for one in program.sibling_programs)
            return rank_peak_bytes(
                replace(self.as_executed(program), sibling_programs=others),
                self._pricing.made.costs,
            )
        if program.pipeline is None:
            # All ranks need the same memory, which the plan predicts; nothing needs to be measured.
            return (self._plan.predicted.peak.nbytes,) * program.layout.num_ranks
        return rank_peak_bytes(self.as_executed(program), self._pricing.made.costs)

    def _fit_micro_batches(self, rule: Rule, source: CapturedStep) -> Rule:
        """Return the rule for the size of this batch.

        A smaller last batch may not divide into the planned number of micro-batches. It is split
        into the fewest micro-batches that are no larger than planned.
        """
        size, layout = batch_size(source.batch), ParallelLayout.of(self._plan.decisions.rules)
        possible = ShardedSource(source=source, layout=layout).divisors()
        if not isinstance(rule, MicroBatches) or not possible or size is None:
            return rule
        if rule.micro_batches in possible:
            return rule
        size //= layout.units
        max_samples = (batch_size(self._source.batch) or 1) // layout.units // rule.micro_batches
        parts = min(k for k in possible if size // k <= max(max_samples, 1))
        return replace(rule, micro_batches=parts)
