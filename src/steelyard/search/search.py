"""Which trades to strike: the fastest program within the budget, from one exploration of all.

Not for looking at single plans (explore.py) or for saying why (explain.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard.core.budget import Budget
from steelyard.core.costs import Costs
from steelyard.core.plan import FrontierPoint, NextCent
from steelyard.core.program import Program
from steelyard.core.rules import Rule, matching, to_rules
from steelyard.core.trade import Left, Offer, Refusal, Source, Trade, strike
from steelyard.predict import predict
from steelyard.search.archive import Archive, Point
from steelyard.search.bound import least_seconds
from steelyard.search.cut import Cut
from steelyard.search.explain import refused, taken
from steelyard.search.explore import Explored, explore
from steelyard.search.found import Found, Gap
from steelyard.search.infeasible import beyond_budget, too_slow

_POINTS = 16
# Each number of micro-batches is another capture, which takes seconds.
_SPLITS = 6
_RECOMPUTE, _ACCUMULATE = "recompute", "accumulate"


def search(
    program: Program, *, trades: Sequence[Trade], source: Source, costs: Costs, budget: Budget
) -> Found:
    """The fastest program within the budget; raises Infeasible where there is none."""
    return Search(program, trades=trades, source=source, costs=costs).find(budget)


class Search:
    """One training step, explored once for all budgets; more micro-batches only when asked for."""

    def __init__(
        self, program: Program, *, trades: Sequence[Trade], source: Source, costs: Costs
    ) -> None:
        self.program = program
        self._trades = {trade.name: trade for trade in trades}
        self._source = source
        self._costs = costs
        self.offers: list[Offer] = []
        self.refusals: list[Refusal] = []
        for trade in trades:
            offers, refusals = trade.offers(program, source)
            self.offers += offers
            self.refusals += [replace(refusal, left=Left.NEVER) for refusal in refusals]
        self._splits = _spread([r.degree for o in self.offers for r in o.rules if r.degree > 1])
        self._explored: dict[int, Explored] = {}

    def explored(self, micro_batches: int = 1) -> Explored:
        """The plans of recomputation at this number of micro-batches."""
        known = self._explored.get(micro_batches)
        if known is None:
            known = self._explored[micro_batches] = self._explore(micro_batches)
        return known

    def find(self, budget: Budget) -> Found:
        """The plan for one budget, in the same words for any."""
        parts, point = self._best(budget)
        rules = self._rules(parts, point)
        program = self._strike(rules)
        prediction = predict(program, self._costs)
        explored = self._explored[parts]
        assert prediction.quad.memory_bytes.value <= point.peak_bytes, "the tally is off"
        slow = too_slow(prediction, budget)
        if slow is not None:
            raise slow
        least_parts, least = self._least()
        return Found(
            program=program,
            rules=rules,
            prediction=prediction,
            micro_batches=parts,
            taken=taken(self._explored, parts, point),
            refused=(
                *self.refusals,
                *refused(self.offers, self._explored, parts, point, budget),
            ),
            num_offers=len(self.offers),
            frontier=self.frontier(),
            least=predict(self._strike(self._rules(least_parts, least)), self._costs).peak,
            least_within=self._least_within(),
            next_cent=self._next_cent(point, budget),
            gap=_gap(explored, point, budget),
        )

    def explore_all(self) -> None:
        """Every number of micro-batches that is ever looked at, for the whole curve."""
        for parts in (1, *self._splits):
            self.explored(parts)

    def _least_within(self) -> int:
        untried = [parts for parts in self._splits if parts not in self._explored]
        return max(self._explored) if untried else 0

    def frontier(self, *, points: int = _POINTS) -> tuple[FrontierPoint, ...]:
        """The memory-time curve over all that was explored; more memory is never slower."""
        curve = self._curve()
        low, high = curve[0][1].peak_bytes, curve[-1][1].peak_bytes
        chosen: dict[int, tuple[int, Point]] = {}
        for step in range(points):
            limit = low + (high - low) * step // (points - 1)
            fitting = [at for at, (_, point) in enumerate(curve) if point.peak_bytes <= limit]
            chosen[fitting[-1]] = curve[fitting[-1]]
        return tuple(self._frontier_point(parts, point) for parts, point in chosen.values())

    def _frontier_point(self, parts: int, point: Point) -> FrontierPoint:
        explored = self._explored[parts]
        return FrontierPoint(
            memory_bytes=point.peak_bytes,
            step_seconds=point.seconds,
            flops=explored.tally.flops_of(point.again),
            micro_batches=parts,
            rules=self._rules(parts, point),
        )

    def _best(self, budget: Budget) -> tuple[int, Point]:
        """The fastest over all numbers of micro-batches that could be it.

        Cutting the batch costs time even where nothing is recomputed, and from some number on the
        more the finer it is cut: once that alone is no faster than the best, finer cuts are not
        looked at.
        """
        limit = budget.memory_bytes
        best: tuple[int, Point] | None = None
        for parts in (1, *self._splits):
            explored = self.explored(parts)
            if best is not None and explored.plain.seconds >= best[1].seconds:
                break
            point = explored.within(limit)
            if point is not None and (best is None or point.seconds < best[1].seconds):
                best = parts, point
            if budget == Budget():
                break  # nothing is asked for, so nothing is traded
        if best is None:
            parts, least = self._least()
            program = self._strike(self._rules(parts, least))
            peak = predict(program, self._costs).peak
            raise beyond_budget(peak, budget, parts=parts, refusals=self.refusals)
        return best

    def _least(self) -> tuple[int, Point]:
        leasts = [(parts, e.least) for parts, e in self._explored.items()]
        return min(leasts, key=lambda found: (found[1].peak_bytes, found[0]))

    def _curve(self) -> list[tuple[int, Point]]:
        """All numbers of micro-batches that were explored, in one chain."""
        owner: dict[int, tuple[int, Point]] = {}
        archive = Archive()
        for parts, explored in sorted(self._explored.items() or [(1, self.explored())]):
            for point in explored.chain:
                if archive.add(point):
                    owner[id(point)] = parts, point
        return [owner[id(point)] for point in archive]

    def _next_cent(self, point: Point, budget: Budget) -> NextCent | None:
        """The steepest way up from here: most seconds for each further byte."""
        limit = budget.memory_bytes
        if limit is None:
            return None
        ways = [
            NextCent(more_bytes=p.peak_bytes - limit, saved_seconds=point.seconds - p.seconds)
            for _, p in self._curve()
            if p.peak_bytes > limit and p.seconds < point.seconds
        ]
        return max(ways, key=lambda w: (w.saved_seconds / w.more_bytes, w.more_bytes), default=None)

    def _explore(self, parts: int) -> Explored:
        program = self._strike((Rule(trade=_ACCUMULATE, degree=parts),) if parts > 1 else ())
        recompute = self._trades.get(_RECOMPUTE)
        values: frozenset[str] = frozenset()
        if recompute is not None:
            offers, _ = recompute.offers(program, self._source)
            values = matching(program.graph, sorted({r for o in offers for r in o.rules}))
        known = self.explored() if parts > 1 else None
        return explore(program, self._costs, values, known=known, thorough=parts == 1)

    def _rules(self, parts: int, point: Point) -> tuple[Rule, ...]:
        explored = self._explored[parts]
        values = explored.values(point)
        rules = to_rules(explored.tally.program.graph, values, trade=_RECOMPUTE)
        split = (Rule(trade=_ACCUMULATE, degree=parts),) if parts > 1 else ()
        return (*split, *rules)

    def _strike(self, rules: Sequence[Rule]) -> Program:
        trades = tuple(self._trades.values())
        return strike(self.program, rules, trades=trades, source=self._source)


def _spread(degrees: Sequence[int]) -> tuple[int, ...]:
    """Few numbers of parts from all that are possible, the coarsest and the finest among them."""
    ordered = sorted(set(degrees))
    if len(ordered) <= _SPLITS:
        return tuple(ordered)
    places = {round(i * (len(ordered) - 1) / (_SPLITS - 1)) for i in range(_SPLITS)}
    return tuple(ordered[place] for place in sorted(places))


def _gap(explored: Explored, point: Point, budget: Budget) -> Gap | None:
    """None where no memory is bounded."""
    if budget.memory_bytes is None or not explored.tally.unit_of:
        return None
    tally = explored.tally
    least = least_seconds(
        tally, Cut(tally), limit_bytes=budget.memory_bytes, within_seconds=point.seconds
    )
    return Gap(step_seconds=point.seconds, least_seconds=least)
