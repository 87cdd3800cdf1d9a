"""Say for people what a plan takes, what each part buys and pays, and why the rest was refused.

Parts are modules; each is priced by taking it out of the plan, or putting it in, and counting the
whole again. Not for deciding.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from steelyard.ir.graph import Graph
from steelyard.ir.rule import Rule, matching, spot_of, starred, to_rules
from steelyard.plans.budget import Budget
from steelyard.plans.plan import SelectedTrade
from steelyard.plans.trade import Offer, Rejection, Remaining
from steelyard.search.pareto_front import Point
from steelyard.search.single.estimate import PeakEstimate
from steelyard.search.single.explore import Explored, again_rules, carried, carried_choice
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.granularity import moved_bytes
from steelyard.search.single.transfer_timing import TransferMode
from steelyard.search.single.variant import Variant
from steelyard.units import format_bytes, format_seconds

# More lines than this are read by nobody; deeper modules are then told under their parents.
_MOST_PARTS = 10


def taken(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> tuple[SelectedTrade, ...]:
    """The plan by modules, what buys most first."""
    told: list[SelectedTrade] = []
    home, moving = variant.at_home, point
    if variant.states:
        # Of the pass itself all is told with the optimizer's state near.
        counted = explored[home].tally.count(explored[variant].choice(point))
        point = replace(point, peak_bytes=counted.peak_bytes, seconds=counted.seconds)
    if variant.parts > 1:
        told.append(_taken_split(explored, home, point))
    if variant.streams:
        told.append(_taken_streams(explored, home, point))
    if variant.states:
        told += _taken_states(explored[home], variant, before=point, point=moving)
    for trade in ("recompute", "quantize_activations", "offload"):
        modules = _taken_modules(trade, explored[variant], point)
        told += sorted(modules, key=lambda t: (-t.buys_bytes, t.label))
    return tuple(told)


def _taken_split(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> SelectedTrade:
    """Beside the same recomputations on the whole batch."""
    without = _carried_to(explored, variant, point, variant.whole)
    return SelectedTrade(
        trade="accumulate",
        label=f"{variant.parts} micro-batches",
        rules=variant.unsliced.at_home.rules,
        buys_bytes=without.peak_bytes - point.peak_bytes,
        pays_seconds=point.seconds - without.seconds,
    )


def _taken_streams(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> SelectedTrade:
    """Beside the same recomputations without slices, of the whole batch where parts were never
    looked at without.
    """
    sliced = variant if variant.unsliced in explored else variant.whole
    with_them = _carried_to(explored, variant, point, sliced)
    without = _carried_to(explored, variant, point, sliced.unsliced)
    rules = tuple(rule for rule in variant.rules if rule.trade == "chunk")
    named = ", ".join(dict.fromkeys(rule.module or "the loss" for rule in rules))
    slices = " and ".join(dict.fromkeys(str(rule.degree) for rule in rules))
    return SelectedTrade(
        trade="chunk",
        label=f"{named} in {slices} slices",
        rules=rules,
        buys_bytes=without.peak_bytes - with_them.peak_bytes,
        pays_seconds=with_them.seconds - without.seconds,
    )


def _taken_states(
    home: Explored, variant: Variant, *, before: Point, point: Point
) -> list[SelectedTrade]:
    """Beside the same plan with all of it near; priced as one, and shared out by bytes."""
    nbytes = moved_bytes(home.tally.program, variant.states)
    total = sum(nbytes.values())
    told = []
    for what in dict.fromkeys(rule.op for rule in variant.states):
        rules = tuple(rule for rule in variant.states if rule.op == what)
        own, count = sum(nbytes[rule] for rule in rules), sum(rule.count for rule in rules)
        told.append(
            SelectedTrade(
                trade="offload_state",
                label=f"{what} of {count} parameter{'s' if count > 1 else ''}, {format_bytes(own)}",
                rules=rules,
                buys_bytes=round((before.peak_bytes - point.peak_bytes) * own / total),
                pays_seconds=(point.seconds - before.seconds) * own / total,
            )
        )
    return told


def _carried_to(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point, other: Variant
) -> PeakEstimate:
    """The same recomputations on another variant of the step."""
    ours, theirs = explored[variant], explored[other].tally
    return theirs.count(carried_choice(ours.tally, ours.choice(point), theirs))


def _taken_modules(trade: str, explored: Explored, point: Point) -> list[SelectedTrade]:
    """What is recomputed, moved or kept in 8 bits, by modules."""
    tally = explored.tally
    graph = tally.program.graph
    choice = explored.choice(point)
    with_all = tally.count(choice)
    value_on, is_of_trade = _fate(trade, tally)
    offered = _by_module(graph, value_on)
    # Of a value chosen in several ways only one counts; of one that nothing reads late, none.
    own = choice if trade == "recompute" else frozenset(with_all.away)
    times = tally.times_of(own)
    slices = tally.in_slices(choice) if trade == "offload" else {}
    chosen = _by_module(
        graph, {c: value_on[tally.storage(c)] for c in sorted(own) if is_of_trade(c)}
    )
    deepest = max((m.count(".") + 1 for m in chosen), default=0)
    depth = next(
        (d for d in range(deepest, 1, -1) if len({_cut(m, d) for m in chosen}) <= _MOST_PARTS), 1
    )
    told = []
    for module in sorted({_cut(m, depth) for m in chosen}):
        inside = {s for m, members in chosen.items() if _cut(m, depth) == module for s in members}
        possible = sum(len(members) for m, members in offered.items() if _cut(m, depth) == module)
        # Without one of its ways, a value would be moved in another.
        gone = set() if trade == "recompute" else {tally.storage(c) for c in inside}
        without = tally.count(
            frozenset(
                c for c in choice - inside if tally.is_again(c) or tally.storage(c) not in gone
            )
        )
        count = str(len(inside)) if len(inside) == possible else f"{len(inside)} of {possible}"
        count += _oftener(times[s] for s in inside if s in times)
        told.append(
            SelectedTrade(
                trade=trade,
                label=f"{module or 'top level'} ({count}){_in_slices(tally, inside, slices)}",
                rules=_rules_for(trade, tally, inside, times),
                buys_bytes=without.peak_bytes - with_all.peak_bytes,
                pays_seconds=with_all.seconds - without.seconds,
            )
        )
    return told


def _in_slices(tally: FastEstimator, inside: Iterable[int], slices: Mapping[str, int]) -> str:
    """How many of them come back in slices, and in how many."""
    values = [tally.value_away(c) for c in inside] if slices else []
    counts = sorted(slices[value] for value in values if value in slices)
    if not counts:
        return ""
    some = "" if len(counts) == len(values) else f"{len(counts)} "
    return f", {some}in {' and '.join(map(str, dict.fromkeys(counts)))} slices"


def _oftener(times: Iterable[int]) -> str:
    """How many values are made again more than once."""
    several = list(times)
    if not several:
        return ""
    most = max(several)
    return f", {len(several)} {'twice' if most == 2 else f'up to {most} times'}"


def _rules_for(
    trade: str, tally: FastEstimator, inside: Iterable[int], times: Mapping[int, int]
) -> tuple[Rule, ...]:
    graph = tally.program.graph
    value_on, _ = _fate(trade, tally)
    values = {value_on[tally.storage(c)]: times.get(c, 1) for c in inside}
    if trade == "recompute":
        return again_rules(graph, values)
    return to_rules(graph, values, trade=trade)


def _fate(trade: str, tally: FastEstimator) -> tuple[Mapping[int, str], Callable[[int], bool]]:
    """The values that may have it, by their storage; and which choices are of it."""
    if trade == "offload":
        return tally.far_value_on, tally.is_far
    if trade == "quantize_activations":
        return tally.coded_value_on, tally.is_coded
    return tally.value_on, tally.is_again


def _by_module(graph: Graph, values: Mapping[int, str]) -> dict[str, set[int]]:
    """Choices, each with its value, by module; blocks of a run under one name."""
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
    explored: Mapping[Variant, Explored],
    variant: Variant,
    point: Point,
    budget: Budget,
) -> tuple[Rejection, ...]:
    """Each offer that the plan leaves out, in whole or in part, and the reason that binds."""
    told = []
    for offer in offers:
        left = Remaining.WHOLE
        if offer.trade == "accumulate":
            reason = _why_not_split(offer, explored, variant, point)
        elif offer.trade == "chunk":
            reason = _why_not_stream(offer, explored, variant, point)
        elif offer.trade == "offload_state":
            reason = _why_not_states(offer, explored, variant, budget)
        elif offer.trade in ("offload", "quantize_activations"):
            able = _able_to_wait(offer, explored, variant)
            away = _away(offer, explored[variant], point)
            reason = _why_not_away(offer, able, explored[variant], point, budget)
            left = Remaining.REST if able & away else Remaining.WHOLE
        else:
            wanted = _wanted(offer, explored, variant)
            reason = _why_not_recompute(wanted, explored[variant], point, budget)
            left = Remaining.REST if wanted & point.again else Remaining.WHOLE
        if reason is not None:
            told.append(Rejection(trade=offer.trade, label=offer.label, reason=reason, left=left))
    return tuple(told)


def _why_not_split(
    offer: Offer, explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> str | None:
    degree, parts = offer.rules[0].degree, variant.parts
    if degree == parts:
        return None
    known = next((e for v, e in explored.items() if v.parts == degree and not v.states), None)
    if known is None:
        return f"not needed: {parts} micro-batches are enough" if parts > 1 else "not needed"
    return _why_slower(known, point)


def _why_not_stream(
    offer: Offer, explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> str | None:
    (rule,) = offer.rules
    if rule in variant.streams:
        return None
    known = next((e for v, e in explored.items() if rule in v.streams and not v.states), None)
    return "not needed" if known is None else _why_slower(known, point)


def _why_not_states(
    offer: Offer, explored: Mapping[Variant, Explored], variant: Variant, budget: Budget
) -> str | None:
    (rule,) = offer.rules
    if any((rule.module, rule.op) == (taken.module, taken.op) for taken in variant.states):
        return None
    nbytes = moved_bytes(explored[Variant()].tally.program, offer.rules)[rule]
    asked = "is not bounded" if budget.memory_bytes is None else "the budget does not ask for"
    return (
        f"would move ~{format_bytes(nbytes)} there and back in each step, and free as much memory, "
        f"which {asked}"
    )


def _why_slower(known: Explored, point: Point) -> str:
    if known.plain.seconds >= point.seconds:
        alone, plan = format_seconds(known.plain.seconds), format_seconds(point.seconds)
        return f"takes ~{alone} a step before anything else, the plan ~{plan} in all"
    return "with it no faster plan fits the budget"


def _wanted(offer: Offer, explored: Mapping[Variant, Explored], variant: Variant) -> frozenset[int]:
    whole, tally = explored[Variant()].tally.program.graph, explored[variant].tally
    return tally.storages_of(carried(matching(whole, offer.rules), whole, tally))


def _able_to_wait(
    offer: Offer, explored: Mapping[Variant, Explored], variant: Variant
) -> frozenset[int]:
    """The storages that the offer would move, or keep in 8 bits, in this variant."""
    whole, tally = explored[Variant()].tally, explored[variant].tally
    value_on, _ = _fate(offer.trade, whole)
    storages = {value: s for s, value in value_on.items()}
    values = matching(whole.program.graph, offer.rules)
    choice = frozenset(_waiting(offer, whole, storages[v]) for v in values)
    return frozenset(tally.storage(c) for c in carried_choice(whole, choice, tally))


def _waiting(offer: Offer, tally: FastEstimator, storage: int) -> int:
    if offer.trade == "quantize_activations":
        return tally.coded(storage)
    is_sliced = offer.rules[0].degree and storage in tally.sliced
    return tally.far(storage, TransferMode.IN_SLICES if is_sliced else TransferMode.EASY)


def _away(offer: Offer, explored: Explored, point: Point) -> frozenset[int]:
    """The storages that the plan moves, or keeps in 8 bits; those in slices alone, where the offer
    is of such."""
    tally = explored.tally
    _, is_of_trade = _fate(offer.trade, tally)
    choice = explored.choice(point)
    away = frozenset(tally.storage(c) for c in tally.count(choice).away if is_of_trade(c))
    if not offer.rules[0].degree:
        return away
    return away & tally.storages_of(tally.in_slices(choice))


def _why_not_away(
    offer: Offer, storages: frozenset[int], explored: Explored, point: Point, budget: Budget
) -> str | None:
    tally, rest = explored.tally, storages - _away(offer, explored, point)
    if storages and not rest:
        return None
    tried = tally.count(point.again | {_waiting(offer, tally, s) for s in rest})
    if not set(tried.away) - point.again:
        return "the backward pass does not read it in this plan"
    return _not_worth(point, tried, budget)


def _why_not_recompute(
    wanted: frozenset[int], explored: Explored, point: Point, budget: Budget
) -> str | None:
    if wanted and wanted <= point.again:
        return None
    tally = explored.tally
    tried = tally.count(point.again | wanted)
    if tried.seconds <= point.seconds:
        return "the backward pass does not read it in this plan"
    return _not_worth(point, tried, budget)


def _not_worth(point: Point, tried: PeakEstimate, budget: Budget) -> str:
    buys, pays = point.peak_bytes - tried.peak_bytes, tried.seconds - point.seconds
    price = f"would pay ~{format_seconds(max(0.0, pays))} a step"
    if buys <= 0:
        return f"{price} and buy no memory at the peak"
    if budget.memory_bytes is None:
        return f"{price} for ~{format_bytes(buys)} of memory, which is not bounded"
    return f"{price} for ~{format_bytes(buys)} of memory, which the budget does not ask for"
