"""Say for people what a plan takes, what each part buys and pays, and why the rest was refused.

Parts are modules; each is priced by taking it out of the plan, or putting it in, and counting the
whole again. Not for deciding.
"""

from collections.abc import Iterable, Mapping

from steelyard.core.amounts import format_bytes, format_seconds
from steelyard.core.budget import Budget
from steelyard.core.graph import Graph
from steelyard.core.plan import Taken
from steelyard.core.rules import Rule, matching, spot_of, starred, to_rules
from steelyard.core.trade import Left, Offer, Refusal
from steelyard.search.archive import Point
from steelyard.search.explore import Explored, carried

# More lines than this are read by nobody; deeper modules are then told under their parents.
_MOST_PARTS = 10


def taken(explored: Mapping[int, Explored], parts: int, point: Point) -> tuple[Taken, ...]:
    """The plan by modules, what buys most first."""
    told: list[Taken] = []
    if parts > 1:
        told.append(_taken_split(explored, parts, point))
    told += sorted(_taken_modules(explored[parts], point), key=lambda t: (-t.buys_bytes, t.label))
    return tuple(told)


def _taken_split(explored: Mapping[int, Explored], parts: int, point: Point) -> Taken:
    """Beside the same recomputations on the whole batch."""
    cut, whole = explored[parts], explored[1].tally
    values = carried(cut.values(point), cut.tally.program.graph, whole)
    without = whole.count(whole.storages_of(values))
    return Taken(
        trade="accumulate",
        label=f"{parts} micro-batches",
        rules=(Rule(trade="accumulate", degree=parts),),
        buys_bytes=without.peak_bytes - point.peak_bytes,
        pays_seconds=point.seconds - without.seconds,
    )


def _taken_modules(explored: Explored, point: Point) -> list[Taken]:
    tally = explored.tally
    graph = tally.program.graph
    again = tally.storages_of(explored.values(point))
    with_all = tally.count(again)
    offered = _by_module(graph, tally.value_on)
    chosen = _by_module(graph, {s: tally.value_on[s] for s in again})
    deepest = max((m.count(".") + 1 for m in chosen), default=0)
    depth = next(
        (d for d in range(deepest, 1, -1) if len({_cut(m, d) for m in chosen}) <= _MOST_PARTS), 1
    )
    told = []
    for module in sorted({_cut(m, depth) for m in chosen}):
        inside = {s for m, members in chosen.items() if _cut(m, depth) == module for s in members}
        possible = sum(len(members) for m, members in offered.items() if _cut(m, depth) == module)
        without = tally.count(again - inside)
        count = str(len(inside)) if len(inside) == possible else f"{len(inside)} of {possible}"
        told.append(
            Taken(
                trade="recompute",
                label=f"{module or 'top level'} ({count})",
                rules=to_rules(graph, (tally.value_on[s] for s in inside), trade="recompute"),
                buys_bytes=without.peak_bytes - with_all.peak_bytes,
                pays_seconds=with_all.seconds - without.seconds,
            )
        )
    return told


def _by_module(graph: Graph, values: Mapping[int, str]) -> dict[str, set[int]]:
    """Storages by module, blocks of a run under one name."""
    found: dict[str, set[int]] = {}
    for storage, value in values.items():
        spot = spot_of(graph, graph.by_name[value])
        assert spot is not None
        patterns = (starred(spot.module, run) for run in graph.runs)
        module = next((p for p in patterns if p is not None), spot.module)
        found.setdefault(module, set()).add(storage)
    return found


def _cut(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def refused(
    offers: Iterable[Offer],
    explored: Mapping[int, Explored],
    parts: int,
    point: Point,
    budget: Budget,
) -> tuple[Refusal, ...]:
    """Each offer that the plan leaves out, in whole or in part, and the reason that binds."""
    told = []
    for offer in offers:
        left = Left.WHOLE
        if offer.trade == "accumulate":
            reason = _why_not_split(offer, explored, parts, point)
        else:
            wanted = _wanted(offer, explored, parts)
            reason = _why_not_recompute(wanted, explored[parts], point, budget)
            left = Left.REST if wanted & point.again else Left.WHOLE
        if reason is not None:
            told.append(Refusal(trade=offer.trade, label=offer.label, reason=reason, left=left))
    return tuple(told)


def _why_not_split(
    offer: Offer, explored: Mapping[int, Explored], parts: int, point: Point
) -> str | None:
    degree = offer.rules[0].degree
    if degree == parts:
        return None
    known = explored.get(degree)
    if known is None:
        return f"not needed: {parts} micro-batches are enough" if parts > 1 else "not needed"
    if known.plain.seconds >= point.seconds:
        alone, plan = format_seconds(known.plain.seconds), format_seconds(point.seconds)
        return f"takes ~{alone} a step before anything else, the plan ~{plan} in all"
    return "with it no faster plan fits the budget"


def _wanted(offer: Offer, explored: Mapping[int, Explored], parts: int) -> frozenset[int]:
    whole, tally = explored[1].tally.program.graph, explored[parts].tally
    return tally.storages_of(carried(matching(whole, offer.rules), whole, tally))


def _why_not_recompute(
    wanted: frozenset[int], explored: Explored, point: Point, budget: Budget
) -> str | None:
    if wanted and wanted <= point.again:
        return None
    tally = explored.tally
    tried = tally.count(point.again | wanted)
    buys, pays = point.peak_bytes - tried.peak_bytes, tried.seconds - point.seconds
    if pays <= 0:
        return "the backward pass does not read it in this plan"
    price = f"would pay ~{format_seconds(pays)} a step"
    if buys <= 0:
        return f"{price} and buy no memory at the peak"
    if budget.memory_bytes is None:
        return f"{price} for ~{format_bytes(buys)} of memory, which is not bounded"
    return f"{price} for ~{format_bytes(buys)} of memory, which the budget does not ask for"
