"""How the layers lie on ranks: where stages end, which schedule, how many micro-batches, and what
each computes again. Each way is applied and priced whole. Several groups of as many ranks may share
the batch, and the ranks of a stage its tensors. Not for ranks that share these alone: see
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
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.passes.pipeline.stage_boundaries import balanced_ends
from steelyard.plans.budget import Budget
from steelyard.plans.plan import FrontierPoint, Prediction, SelectedTrade
from steelyard.plans.trade import Rejection, Remaining, Trade, apply_rules
from steelyard.predict import message_of, pipelined, predict, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.infeasible import beyond_budget, too_slow
from steelyard.search.ranks.labels import on_ranks, tensors
from steelyard.search.result import SearchResult
from steelyard.search.single.search import StepSearch
from steelyard.units import format_bytes, format_seconds

_PIPELINE, _ACCUMULATE, _RECOMPUTE = "shard_pipeline", "accumulate", "recompute"
_BATCH, _TENSOR, _STATES = "shard_batch", "shard_tensor", "shard_states"
_PINNED = "shared_memory_transfer"
# Micro-batches for each rank: more leave less of the belt empty, and are slower one by one.
_EACH = (2, 4)
# How many plans of recomputation are tried of each number of micro-batches.
_PLANS = 8
# Gradients go one by one behind all micro-batches, whatever is said of buckets.
_BUCKET_BYTES = 25 * 2**20
# What the fastest way may be faster by, at most, to be not worth looking for one that fits.
_WORTH = 0.98
# By how much a way may be said to be slower and be as fast: what tells schedules apart are
# messages, and links are known to a seventh.
_ALIKE = 1.06
_EVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleCandidate:
    """``schedule`` as people name it; what it takes as it is."""

    rules: tuple[Rule, ...]
    schedule: str
    parts: int
    seconds: float
    nbytes: int
    flops: int

    @property
    def cut(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.trade == _TENSOR)

    @property
    def is_pinned(self) -> bool:
        return any(rule.trade == _PINNED for rule in self.rules)


class PipelineSearch:
    """The layers on so many ranks, of each group. By each of ``cuts`` the ranks of a stage share
    tensors, or share none; ``searching`` searches the step as it lies by one of them alone."""

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
        self._searching, self._made_cuts = searching, cuts
        self.refusals: tuple[Rejection, ...] = ()
        among = replace(program, layout=layout)
        self.offers, refusals = self._trade(_PIPELINE).offers(among, source)
        self._tell(refusals)
        self._tried: dict[tuple[Rule, ...], _ScheduleCandidate] = {}
        self._slots: tuple[Rule, ...] | None = None

    @property
    def least_seconds(self) -> float:
        """No way is faster: every stage computes as much as every other, and none waits."""
        alone = (step_seconds(self._apply(cut), self._costs).value for cut in self._cuts)
        return min(alone) / (self._layout.pipeline * self._layout.batch)

    @cached_property
    def _cuts(self) -> Sequence[tuple[Rule, ...]]:
        return tuple(dict.fromkeys(self._made_cuts()))

    @cached_property
    def ways(self) -> list[_ScheduleCandidate]:
        """Nothing recomputed, the fastest first; empty where the step cannot be cut."""
        found = [way for parts in self._parts() for way in self._of_schedules(parts)]
        return sorted(found, key=lambda way: (way.seconds, way.nbytes))

    def find(self, budget: Budget, *, within_seconds: float = _EVER) -> SearchResult | None:
        """The fastest within the budget; raises Infeasible where there is none. None where none
        was found that takes less than ``within_seconds``."""
        limit = budget.memory_bytes
        for ways in self._by_parts():
            best = self._best(limit)
            fastest = within_seconds if best is None else min(within_seconds, best.seconds)
            if ways[0].seconds < _WORTH * fastest:
                is_short = limit is not None and ways[0].nbytes > limit
                self._compute_again([*ways, *self._in_shares(ways)] if is_short else ways)
        best = self._best(limit)
        if within_seconds < _EVER and (best is None or best.seconds >= within_seconds):
            return None
        if best is not None and not budget.bounds_time:
            best = self._leaner(best, within_seconds)
        least = min(self._tried.values(), key=lambda way: (way.nbytes, way.seconds))
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
        fitting = [w for w in self._tried.values() if limit is None or w.nbytes <= limit]
        return min(fitting, key=lambda way: (way.seconds, way.nbytes), default=None)

    def _leaner(self, fastest: _ScheduleCandidate, within_seconds: float) -> _ScheduleCandidate:
        """What holds least of all that cannot be told from the fastest."""
        most = min(_ALIKE * fastest.seconds, within_seconds)
        alike = [way for way in self._tried.values() if way.seconds < most]
        return min((fastest, *alike), key=lambda way: (way.nbytes, way.seconds))

    def explore_all(self) -> None:
        for ways in self._by_parts():
            self._compute_again([*ways, *self._in_shares(ways)])

    def _by_parts(self) -> list[list[_ScheduleCandidate]]:
        """The ways of each number of micro-batches, of the fastest first."""
        numbers = dict.fromkeys(way.parts for way in self.ways)
        return [[way for way in self.ways if way.parts == parts] for parts in numbers]

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """Of all that was tried: more memory is never slower."""
        points: list[FrontierPoint] = []
        for way in sorted(self._tried.values(), key=lambda way: (way.nbytes, way.seconds)):
            if points and way.seconds >= points[-1].step_seconds:
                continue
            points.append(
                FrontierPoint(
                    memory_bytes=way.nbytes,
                    step_seconds=way.seconds,
                    flops=way.flops,
                    micro_batches=way.parts,
                    rules=way.rules,
                )
            )
        return tuple(points)

    def _parts(self) -> list[int]:
        """Numbers of micro-batches of each group; one where the batch cannot be cut."""
        ranks, groups = self._layout.pipeline, self._layout.batch
        can_be_cut = self._source.why_not_split() is None
        divisors = self._source.divisors() if can_be_cut else (1,)
        possible = [k // groups for k in divisors if k % groups == 0]
        if not possible:
            return []
        wanted = [min(possible, key=lambda k: abs(k - each * ranks)) for each in _EACH]
        return list(dict.fromkeys(wanted)) if self.offers else []

    def _of_schedules(self, parts: int) -> Iterator[_ScheduleCandidate]:
        """Each on stages that take equally long, and on such that hold equally much."""
        groups = self._layout.batch
        graph = self._source.graph(micro_batches=parts * groups)
        split: list[Rule] = []
        if parts > 1:
            split.append(Rule(trade=_ACCUMULATE, degree=parts))
        if groups > 1:
            split.append(Rule(trade=_BATCH, degree=groups, bucket_bytes=_BUCKET_BYTES))
        for offer in self.offers:
            count, schedule = len(offer.rules) + 1, offer.rules[0].op
            for weight, handing in ((self._takes, self._handing), (self._holds, _nothing)):
                ends = balanced_ends(graph, count, weight=weight, handing=handing)
                own = [replace(offer.rules[0], module=end) for end in ends]
                for cut in self._cuts if own else ():
                    way = self._way((*split, *cut, *own), schedule, parts)
                    if way is not None:
                        yield way
                        yield from self._through_slots(way)

    def _takes(self, node: Node) -> float:
        return self._costs.seconds(node).value

    def _handing(self, nbytes: int) -> float:
        if "pipeline" not in self._costs.links:
            return 0.0
        return self._costs.exchange_seconds(message_of(self._layout, nbytes)).value

    def _holds(self, node: Node) -> float:
        """Activations of about as many micro-batches as there are ranks; weights with gradients
        and what an optimizer keeps, where they are read."""
        if node.phase is not Phase.FORWARD:
            return 0.0
        graph = self._program.graph
        inputs = (graph.by_name[i] for i in node.inputs if i in graph.by_name)
        read = (t for i in inputs if i.is_input for t in i.outputs)
        weights = sum(t.nbytes for t in read if graph.storages[t.storage].role is Role.PARAMETER)
        made = 0 if node.is_free else sum(t.nbytes for t in node.outputs)
        return 4 * weights + self._layout.pipeline * made

    def _in_shares(self, ways: Sequence[_ScheduleCandidate]) -> Iterator[_ScheduleCandidate]:
        """Of these, the fastest and the one that holds least, with what groups could share of
        weights, and of what goes with them, in shares."""
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        for way in dict.fromkeys((ways[0], leanest)) if self._layout.batch > 1 else ():
            offers, _ = self._trade(_STATES).offers(self._apply(way.rules), self._source)
            shared = tuple(rule for offer in offers for rule in offer.rules)
            found = self._way((*way.rules, *shared), way.schedule, way.parts) if shared else None
            if found is not None:
                yield found

    def _through_slots(self, way: _ScheduleCandidate) -> Iterator[_ScheduleCandidate]:
        """The same with its messages in memory that these ranks share, where they do."""
        if PINNED in self._costs.links:
            if self._slots is None:  # the same of all ways
                offers, _ = self._trade(_PINNED).offers(self._apply(way.rules), self._source)
                self._slots = tuple(rule for offer in offers for rule in offer.rules)
            found = self._way((*way.rules, *self._slots), way.schedule, way.parts)
            if found is not None:
                yield found

    def _compute_again(self, ways: Sequence[_ScheduleCandidate]) -> None:
        """Of these, the fastest and the one that holds least, with ever more recomputed."""
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        parts, chosen = ways[0].parts * self._layout.batch, dict.fromkeys((ways[0], leanest))
        for cut in dict.fromkeys(way.cut for way in chosen):
            for again in self._searching(cut).plans_of_recomputation(parts, count=_PLANS):
                for way in chosen:
                    if way.cut == cut:
                        self._way((*way.rules, *again), way.schedule, way.parts)

    def _way(self, rules: tuple[Rule, ...], schedule: str, parts: int) -> _ScheduleCandidate | None:
        """None where the step cannot be cut so, which is told."""
        if rules not in self._tried:
            try:
                program = self._apply(rules)
            except (BadInput, Mismatch) as refusal:
                label = f"{schedule}, {parts} micro-batches"
                self._tell([Rejection(trade=_PIPELINE, label=label, reason=refusal.happened)])
                return None
            assert program.pipeline is not None
            priced = pipelined(program, program.pipeline, self._costs)
            self._tried[rules] = _ScheduleCandidate(
                rules=rules,
                schedule=schedule,
                parts=parts,
                seconds=priced.seconds,
                nbytes=priced.peak_bytes,
                flops=priced.flops,
            )
        return self._tried[rules]

    def _tell(self, refusals: Sequence[Rejection]) -> None:
        never = (replace(refusal, left=Remaining.NEVER) for refusal in refusals)
        self.refusals = tuple(dict.fromkeys((*self.refusals, *never)))

    def _taken(self, way: _ScheduleCandidate) -> Iterator[SelectedTrade]:
        """Tensors in parts beside one device, stages beside that, and what is made again."""
        again = tuple(rule for rule in way.rules if rule.trade == _RECOMPUTE)
        shared = tuple(rule for rule in way.rules if rule.trade == _STATES)
        slots = tuple(rule for rule in way.rules if rule.trade == _PINNED)
        rest = tuple(rule for rule in way.rules if rule not in (*again, *shared, *slots))
        alone, before, after = (
            predict(self._apply(rules), self._costs) for rules in ((), way.cut, rest)
        )
        if way.cut:
            quicker = _computing(alone) - _computing(before)
            yield SelectedTrade(
                trade=_TENSOR,
                label=f"{tensors(way.cut)} in parts on {self._layout.tensor} ranks",
                rules=way.cut,
                buys_bytes=alone.peak.nbytes - before.peak.nbytes,
                buys_seconds=max(0.0, quicker),
                pays_seconds=_waiting(before) + max(0.0, -quicker),
            )
        stages = sum(rule.trade == _PIPELINE for rule in rest) + 1
        cut = f", {way.parts} micro-batches" if way.parts > 1 else ""
        yield SelectedTrade(
            trade=_PIPELINE,
            label=f"{stages} stages {on_ranks(self._layout)}, {way.schedule}{cut}",
            rules=tuple(rule for rule in rest if rule.trade != _TENSOR),
            buys_bytes=before.peak.nbytes - after.peak.nbytes,
            buys_seconds=max(0.0, _computing(before) - _computing(after)),
            pays_seconds=max(0.0, _waiting(after) - _waiting(before)),
        )
        if slots:
            rest = (*rest, *slots)
            staged, after = after, predict(self._apply(rest), self._costs)
            faster = staged.metrics.step_seconds.value - after.metrics.step_seconds.value
            yield SelectedTrade(
                trade=_PINNED,
                label="messages of stages through slots",
                rules=slots,
                buys_bytes=staged.peak.nbytes - after.peak.nbytes,
                buys_seconds=max(0.0, faster),
                pays_seconds=max(0.0, -faster),
            )
        if shared:
            staged, after = after, predict(self._apply((*rest, *shared)), self._costs)
            slower = after.metrics.step_seconds.value - staged.metrics.step_seconds.value
            yield SelectedTrade(
                trade=_STATES,
                label=f"{tensors(shared)} in shares on {self._layout.batch} ranks",
                rules=shared,
                buys_bytes=staged.peak.nbytes - after.peak.nbytes,
                buys_seconds=max(0.0, -slower),
                pays_seconds=max(0.0, slower),
            )
        if again:
            whole = predict(self._apply(way.rules), self._costs)
            count = sum(rule.count for rule in again)
            yield SelectedTrade(
                trade=_RECOMPUTE,
                label=f"{count} operators of all stages",
                rules=again,
                buys_bytes=after.peak.nbytes - whole.peak.nbytes,
                pays_seconds=whole.metrics.step_seconds.value - after.metrics.step_seconds.value,
            )

    def _why_not_others(self, best: _ScheduleCandidate) -> Iterator[Rejection]:
        """The other schedules, each by its fastest way; and slots, where there are any."""
        yield from self._why_no_slots(best)
        for schedule in dict.fromkeys(way.schedule for way in self.ways):
            way = next(way for way in self.ways if way.schedule == schedule)
            if schedule != best.schedule:
                said = f"{format_seconds(way.seconds)} and {format_bytes(way.nbytes)}"
                beside = f"{format_seconds(best.seconds)} and {format_bytes(best.nbytes)}"
                alike = ", which cannot be told apart" if way.seconds < best.seconds else ""
                yield Rejection(
                    trade=_PIPELINE,
                    label=f"{schedule} {on_ranks(self._layout)}",
                    reason=f"takes ~{said} a step, the plan's schedule ~{beside}{alike}",
                )

    def _why_no_slots(self, best: _ScheduleCandidate) -> Iterator[Rejection]:
        if best.is_pinned:
            return
        label = "messages of stages through slots"
        if PINNED not in self._costs.links:
            reason = "these ranks are not known to share memory, or to reach one another's by RDMA"
            yield Rejection(trade=_PINNED, label=label, reason=reason, left=Remaining.NEVER)
        for way in self._through_slots(best):
            said = f"{format_seconds(way.seconds)} a step and {format_bytes(way.nbytes)}"
            beside = f"{format_seconds(best.seconds)} and {format_bytes(best.nbytes)}"
            reason = f"would take ~{said}, the plan takes ~{beside}"
            yield Rejection(trade=_PINNED, label=label, reason=reason)

    def _trade(self, name: str) -> Trade:
        return next(trade for trade in self._trades if trade.name == name)

    def _apply(self, rules: Sequence[Rule]) -> Program:
        return apply_rules(self._program, rules, trades=self._trades, source=self._source)


def _computing(prediction: Prediction) -> float:
    return prediction.metrics.computation_seconds.value


def _waiting(prediction: Prediction) -> float:
    return prediction.metrics.exposed_communication_seconds.value


def _nothing(nbytes: int) -> float:  # noqa: ARG001 - of what is handed on
    return 0.0
