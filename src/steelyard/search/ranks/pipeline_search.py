"""Searches pipeline-parallel plans: stage boundaries, schedule, micro-batches and recompute.

Each candidate is applied and priced as a whole program. Pipelines may be replicated (data
parallelism), and their stages may be tensor-parallel. Not for layouts without a pipeline: see
layout_search.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from steelyard.errors import BadInput, Mismatch
from steelyard.ir.graph import Node, Phase, Role
from steelyard.ir.message_slots import PINNED
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import (
    PipelineStageEnd,
    Recomputation,
    SharedMemoryMessages,
    StateSharding,
    TensorSharding,
)
from steelyard.ir.step_source import StepSource
from steelyard.passes.pipeline.stage_boundaries import balanced_ends
from steelyard.plans.budget import Budget
from steelyard.plans.plan import FrontierPoint, SelectedTrade
from steelyard.plans.trade import Rejection, Remaining, Trade, apply_rules, offers_of
from steelyard.predict import message_of, pipelined, predict, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.infeasible import beyond_budget, too_slow
from steelyard.search.layout_rules import batch_rules
from steelyard.search.ranks.labels import ranks_label, tensor_count
from steelyard.search.rejection import StepCosts, rejected, without_shared_memory
from steelyard.search.result import SearchResult
from steelyard.search.single.search import StepSearch
from steelyard.search.trade_price import price_without, step_price_without
from steelyard.units import format_bytes, format_seconds

# Micro-batches per stage: with more of them the pipeline bubble shrinks, but each one is less
# efficient.
_PER_STAGE = (2, 4)
# The number of recompute plans that are tried for each number of micro-batches.
_NUM_RECOMPUTE_PLANS = 8
# Recompute is tried only if the fastest candidate takes less than this share of the best plan.
_MIN_GAIN_RATIO = 0.98
# Candidates that are predicted to be slower by up to this factor count as equally fast: schedules
# differ in their messages, and link speeds are known to within a seventh.
_EQUAL_RATIO = 1.06
_NEVER = float("inf")
_THROUGH_SLOTS = "pipeline messages through shared memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleCandidate:
    """The rules of a pipeline, with the name of its schedule and its predicted costs."""

    rules: tuple[Rule, ...]
    schedule: str
    parts: int
    seconds: float
    nbytes: int
    flops: int

    @property
    def tensor_rules(self) -> tuple[TensorSharding, ...]:
        return of_kind(self.rules, TensorSharding)

    @property
    def is_pinned(self) -> bool:
        return bool(of_kind(self.rules, SharedMemoryMessages))


class PipelineSearch:
    """The search over the pipelines of one layout.

    ``cuts`` returns the variants of tensor-parallel rules within a stage. ``searching`` creates the
    search for the step with only one of these variants applied.
    """

    def __init__(
        self,
        program: Program,
        *,
        layout: ParallelLayout,
        trades: Sequence[Trade],
        source: StepSource,
        costs: CostTable,
        searching: Callable[[tuple[Rule, ...]], StepSearch],
        cuts: Callable[[], Sequence[tuple[Rule, ...]]] = lambda: ((),),
    ) -> None:
        self._program, self._layout = program, layout
        self._trades, self._source, self._costs = tuple(trades), source, costs
        self._make_search, self._make_cuts = searching, cuts
        self.refusals: tuple[Rejection, ...] = ()
        target = replace(program, layout=layout)
        self.offers, refusals = offers_of(trades, PipelineStageEnd, target, source)
        self._add_refusals(refusals)
        self._evaluated: dict[tuple[Rule, ...], _ScheduleCandidate] = {}
        self._slots: tuple[Rule, ...] | None = None

    @property
    def least_seconds(self) -> float:
        """A lower bound on the step time: perfectly balanced stages that never wait."""
        alone = (
            step_seconds(self._apply(tensor_rules), self._costs).value
            for tensor_rules in self._shardings
        )
        return min(alone) / (self._layout.pipeline * self._layout.data)

    @cached_property
    def _shardings(self) -> Sequence[tuple[Rule, ...]]:
        return tuple(dict.fromkeys(self._make_cuts()))

    @cached_property
    def candidates(self) -> list[_ScheduleCandidate]:
        """All candidates without recompute, the fastest first; empty if the step cannot be
        split.
        """
        found = [
            candidate for parts in self._parts() for candidate in self._schedule_candidates(parts)
        ]
        return sorted(found, key=lambda c: (c.seconds, c.nbytes))

    def find(self, budget: Budget, *, within_seconds: float = _NEVER) -> SearchResult | None:
        """Return the fastest plan within the budget.

        Raise Infeasible if there is none. Return None if none takes less than ``within_seconds``.
        """
        limit = budget.memory_bytes
        for candidates in self._by_parts():
            best = self._best(limit)
            fastest = within_seconds if best is None else min(within_seconds, best.seconds)
            if candidates[0].seconds < _MIN_GAIN_RATIO * fastest:
                is_short = limit is not None and candidates[0].nbytes > limit
                self._add_recompute(
                    [*candidates, *self._with_sharded_states(candidates)]
                    if is_short
                    else candidates
                )
        best = self._best(limit)
        if within_seconds < _NEVER and (best is None or best.seconds >= within_seconds):
            return None
        if best is not None and not budget.bounds_time:
            best = self._leaner(best, within_seconds)
        least = min(self._evaluated.values(), key=lambda c: (c.nbytes, c.seconds))
        least_peak = predict(self._apply(least.rules), self._costs).peak
        if best is None:
            refusals = self.refusals
            raise beyond_budget(
                least_peak,
                budget,
                parts=least.parts,
                refusals=refusals,
                has_offload_memory=False,
                leaner_settings=self._source.leaner_settings(),
            )
        program = self._apply(best.rules)
        prediction = predict(program, self._costs)
        if (slow := too_slow(prediction, budget)) is not None:
            raise slow
        return SearchResult(
            program=program,
            rules=best.rules,
            prediction=prediction,
            micro_batches=best.parts,
            taken=tuple(self._taken(best)),
            refused=(*self.refusals, *self._why_not_others(best)),
            num_offers=len(self.offers) + (PINNED in self._costs.links),
            frontier=self.frontier(),
            least=least_peak,
            least_within=0,
            next_cent=None,
            gap=None,
        )

    def _best(self, limit: int | None) -> _ScheduleCandidate | None:
        fitting = [
            candidate
            for candidate in self._evaluated.values()
            if limit is None or candidate.nbytes <= limit
        ]
        return min(fitting, key=lambda c: (c.seconds, c.nbytes), default=None)

    def _leaner(self, fastest: _ScheduleCandidate, within_seconds: float) -> _ScheduleCandidate:
        """Return the candidate with the lowest peak among those about as fast as ``fastest``."""
        most = min(_EQUAL_RATIO * fastest.seconds, within_seconds)
        comparable = [
            candidate for candidate in self._evaluated.values() if candidate.seconds < most
        ]
        return min((fastest, *comparable), key=lambda c: (c.nbytes, c.seconds))

    def explore_all(self) -> None:
        for candidates in self._by_parts():
            self._add_recompute([*candidates, *self._with_sharded_states(candidates)])

    def _by_parts(self) -> list[list[_ScheduleCandidate]]:
        """Return the candidates grouped by number of micro-batches, the fastest group first."""
        numbers = dict.fromkeys(candidate.parts for candidate in self.candidates)
        return [
            [candidate for candidate in self.candidates if candidate.parts == parts]
            for parts in numbers
        ]

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """Return the Pareto front of all evaluated candidates, by peak memory and step time."""
        points: list[FrontierPoint] = []
        for candidate in sorted(self._evaluated.values(), key=lambda c: (c.nbytes, c.seconds)):
            if points and candidate.seconds >= points[-1].step_seconds:
                continue
            points.append(
                FrontierPoint(
                    memory_bytes=candidate.nbytes,
                    step_seconds=candidate.seconds,
                    flops=candidate.flops,
                    micro_batches=candidate.parts,
                    rules=candidate.rules,
                )
            )
        return tuple(points)

    def _parts(self) -> list[int]:
        """Return the numbers of micro-batches to try, or [1] if the batch cannot be split."""
        ranks, groups = self._layout.pipeline, self._layout.data
        can_be_cut = self._source.why_not_split() is None
        divisors = self._source.divisors() if can_be_cut else (1,)
        possible = [k // groups for k in divisors if k % groups == 0]
        if not possible:
            return []
        wanted = [min(possible, key=lambda k: abs(k - each * ranks)) for each in _PER_STAGE]
        return list(dict.fromkeys(wanted)) if self.offers else []

    def _schedule_candidates(self, parts: int) -> Iterator[_ScheduleCandidate]:
        """Yield candidates of each schedule, with stages balanced by time and by memory."""
        graph = self._source.graph(micro_batches=parts * self._layout.data)
        # The bucket size has no effect, because gradients are reduced one by one after the last
        # pass.
        split = batch_rules(replace(self._layout, micro_batches=parts), self._trades)
        for offer in self.offers:
            (first, *_) = stage_ends = of_kind(offer.rules, PipelineStageEnd)
            count, schedule = len(stage_ends) + 1, first.schedule
            for weight, handing in (
                (self._node_seconds, self._handoff_seconds),
                (self._node_bytes, _no_handoff),
            ):
                ends = balanced_ends(graph, count, weight=weight, handing=handing)
                stage_rules = [replace(first, behind=end) for end in ends]
                for tensor_rules in self._shardings if stage_rules else ():
                    candidate = self._evaluate(
                        (*split, *tensor_rules, *stage_rules), schedule, parts
                    )
                    if candidate is not None:
                        yield candidate
                        yield from self._through_slots(candidate)

    def _node_seconds(self, node: Node) -> float:
        return self._costs.seconds(node).value

    def _handoff_seconds(self, nbytes: int) -> float:
        if "pipeline" not in self._costs.links:
            return 0.0
        return self._costs.exchange_seconds(message_of(self._layout, nbytes)).value

    def _node_bytes(self, node: Node) -> float:
        """Return the bytes that a node adds to its stage.

        These are its activations, for about as many micro-batches as there are stages, and the
        weights that it reads, with their gradients and optimizer state.
        """
        if node.phase is not Phase.FORWARD:
            return 0.0
        graph = self._program.graph
        inputs = (graph.by_name[i] for i in node.inputs if i in graph.by_name)
        read = (t for i in inputs if i.is_input for t in i.outputs)
        weights = sum(t.nbytes for t in read if graph.storages[t.storage].role is Role.PARAMETER)
        made = 0 if node.is_free else sum(t.nbytes for t in node.outputs)
        return 4 * weights + self._layout.pipeline * made

    def _with_sharded_states(
        self, candidates: Sequence[_ScheduleCandidate]
    ) -> Iterator[_ScheduleCandidate]:
        """Yield the fastest and the least-memory one of these candidates, with ZeRO-style sharded
        states.
        """
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        for candidate in dict.fromkeys((candidates[0], leanest)) if self._layout.data > 1 else ():
            offers, _ = offers_of(
                self._trades, StateSharding, self._apply(candidate.rules), self._source
            )
            state_rules = tuple(rule for offer in offers for rule in offer.rules)
            found = (
                self._evaluate(
                    (*candidate.rules, *state_rules), candidate.schedule, candidate.parts
                )
                if state_rules
                else None
            )
            if found is not None:
                yield found

    def _through_slots(self, candidate: _ScheduleCandidate) -> Iterator[_ScheduleCandidate]:
        """Yield the candidate with its messages in shared-memory slots, if there are any."""
        if PINNED in self._costs.links:
            if self._slots is None:  # this is the same for all candidates
                offers, _ = offers_of(
                    self._trades, SharedMemoryMessages, self._apply(candidate.rules), self._source
                )
                self._slots = tuple(rule for offer in offers for rule in offer.rules)
            found = self._evaluate(
                (*candidate.rules, *self._slots), candidate.schedule, candidate.parts
            )
            if found is not None:
                yield found

    def _add_recompute(self, candidates: Sequence[_ScheduleCandidate]) -> None:
        """Evaluate the fastest and the least-memory one of these with increasing recompute."""
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        parts, chosen = (
            candidates[0].parts * self._layout.data,
            dict.fromkeys((candidates[0], leanest)),
        )
        for tensor_rules in dict.fromkeys(candidate.tensor_rules for candidate in chosen):
            for recomputed in self._make_search(tensor_rules).plans_of_recomputation(
                parts, count=_NUM_RECOMPUTE_PLANS
            ):
                for candidate in chosen:
                    if candidate.tensor_rules == tensor_rules:
                        self._evaluate(
                            (*candidate.rules, *recomputed), candidate.schedule, candidate.parts
                        )

    def _evaluate(
        self, rules: tuple[Rule, ...], schedule: str, parts: int
    ) -> _ScheduleCandidate | None:
        """Return the evaluated candidate, or None with a rejection added if it is impossible."""
        if rules not in self._evaluated:
            try:
                program = self._apply(rules)
            except (BadInput, Mismatch) as refusal:
                label = f"{schedule}, {parts} micro-batches"
                self._add_refusals([rejected(PipelineStageEnd, label, refusal.happened)])
                return None
            assert program.pipeline is not None
            priced = pipelined(program, program.pipeline, self._costs)
            self._evaluated[rules] = _ScheduleCandidate(
                rules=rules,
                schedule=schedule,
                parts=parts,
                seconds=priced.seconds,
                nbytes=priced.peak_bytes,
                flops=priced.flops,
            )
        return self._evaluated[rules]

    def _add_refusals(self, refusals: Sequence[Rejection]) -> None:
        impossible = (replace(refusal, left=Remaining.NEVER) for refusal in refusals)
        self.refusals = tuple(dict.fromkeys((*self.refusals, *impossible)))

    def _taken(self, best: _ScheduleCandidate) -> Iterator[SelectedTrade]:
        """Yield the best candidate's trades, each compared with the step before that trade was
        applied.

        The first trade, tensor parallelism, is compared with the step on one device.
        """
        recomputed = of_kind(best.rules, Recomputation)
        state_rules = of_kind(best.rules, StateSharding)
        slot_rules = of_kind(best.rules, SharedMemoryMessages)
        applied = tuple(
            rule for rule in best.rules if rule not in (*recomputed, *state_rules, *slot_rules)
        )
        alone, before, after = (
            predict(self._apply(rules), self._costs) for rules in ((), best.tensor_rules, applied)
        )
        if best.tensor_rules:
            label = f"{tensor_count(best.tensor_rules)} sharded over {self._layout.tensor} ranks"
            yield price_without(
                TensorSharding, label, best.tensor_rules, without=alone, with_it=before
            )
        stages = len(of_kind(applied, PipelineStageEnd)) + 1
        batches = f", {best.parts} micro-batches" if best.parts > 1 else ""
        yield price_without(
            PipelineStageEnd,
            f"{stages} stages {ranks_label(self._layout)}, {best.schedule}{batches}",
            tuple(rule for rule in applied if not isinstance(rule, TensorSharding)),
            without=before,
            with_it=after,
        )
        count = sum(rule.count for rule in recomputed)
        for kind, label, rules in (
            (SharedMemoryMessages, _THROUGH_SLOTS, slot_rules),
            (
                StateSharding,
                f"{tensor_count(state_rules)} sharded over {self._layout.data} ranks",
                state_rules,
            ),
            (Recomputation, f"{count} operators of all stages", recomputed),
        ):
            if rules:
                applied = (*applied, *rules)
                without, after = after, predict(self._apply(applied), self._costs)
                yield step_price_without(
                    kind,
                    label,
                    rules,
                    saved_bytes=without.peak.nbytes - after.peak.nbytes,
                    saved_seconds=without.metrics.step_seconds.value
                    - after.metrics.step_seconds.value,
                )

    def _why_not_others(self, best: _ScheduleCandidate) -> Iterator[Rejection]:
        """Yield the rejections of slots and of every other schedule; the latter is judged by its
        fastest candidate.
        """
        yield from self._why_no_slots(best)
        for schedule in dict.fromkeys(candidate.schedule for candidate in self.candidates):
            candidate = next(
                candidate for candidate in self.candidates if candidate.schedule == schedule
            )
            if schedule != best.schedule:
                label = f"{schedule} {ranks_label(self._layout)}"
                its_costs = (
                    f"{format_seconds(candidate.seconds)} and {format_bytes(candidate.nbytes)}"
                )
                plan_costs = f"{format_seconds(best.seconds)} and {format_bytes(best.nbytes)}"
                note = ", which cannot be distinguished" if candidate.seconds < best.seconds else ""
                reason = f"takes ~{its_costs} a step; the plan's schedule takes ~{plan_costs}{note}"
                yield rejected(PipelineStageEnd, label, reason)

    def _why_no_slots(self, best: _ScheduleCandidate) -> Iterator[Rejection]:
        if best.is_pinned:
            return
        tried = next(self._through_slots(best), None)
        yield from without_shared_memory(
            _THROUGH_SLOTS,
            is_possible=PINNED in self._costs.links,
            tried=None if tried is None else StepCosts(tried.seconds, tried.nbytes),
            chosen=StepCosts(best.seconds, best.nbytes),
        )

    def _apply(self, rules: Sequence[Rule]) -> Program:
        return apply_rules(self._program, rules, trades=self._trades, source=self._source)


def _no_handoff(nbytes: int) -> float:  # noqa: ARG001 - of what is handed on
    return 0.0
