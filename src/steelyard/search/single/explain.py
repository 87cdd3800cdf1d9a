"""Explains a plan: what it applies, what each part saves and costs, and why offers were refused.

Parts are modules. To price a part, it is removed from the plan, or added, and the whole plan is
estimated again. Not for deciding.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph
from steelyard.ir.rule import (
    CallRule,
    Rule,
    Stage,
    matching,
    of_kind,
    spot_of,
    starred,
    to_rules,
)
from steelyard.ir.rule_kinds import (
    MicroBatches,
    Recomputation,
    SlicedComputation,
    StateOffload,
    ValueCodec,
    ValueOffload,
)
from steelyard.plans.budget import Budget
from steelyard.plans.plan import SelectedTrade
from steelyard.plans.trade import Offer, Rejection, Remaining, Trade, rule_type, trade_of
from steelyard.search.pareto_front import Point
from steelyard.search.rejection import NOT_READ, alone_takes
from steelyard.search.single.estimator.estimate import PeakEstimate
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.estimator.transfer_timing import TransferMode
from steelyard.search.single.granularity import offloaded_bytes
from steelyard.search.single.plan_rules import recompute_rules
from steelyard.search.single.step_plans import (
    Explored,
    choices_in_trace,
    values_in_trace,
)
from steelyard.search.single.variant import Variant
from steelyard.units import format_bytes, format_seconds

# Nobody reads a longer list, so deeper modules are then merged into their parents.
_MAX_PARTS = 10


def explain_selected(
    explored: Mapping[Variant, Explored],
    variant: Variant,
    point: Point,
    trades: Sequence[Trade],
) -> tuple[SelectedTrade, ...]:
    """Return the applied trades by module; within a trade, the largest memory saving comes
    first.
    """
    selected: list[SelectedTrade] = []
    unoffloaded, offloaded_point = variant.unoffloaded, point
    if variant.states:
        # The other trades are priced with all state on the device.
        estimate = explored[unoffloaded].estimator.estimate(explored[variant].choices_of(point))
        point = replace(point, peak_bytes=estimate.peak_bytes, seconds=estimate.seconds)
    if variant.split:
        selected.append(_selected_accumulate(explored, unoffloaded, point))
    if variant.changes:
        selected += _selected_changes(explored, unoffloaded, point)
    if variant.chunks:
        selected.append(_selected_chunks(explored, unoffloaded, point))
    if variant.states:
        selected += _selected_states(
            explored[unoffloaded], variant, before=point, point=offloaded_point
        )
    for kind in (Recomputation, ValueCodec, ValueOffload):
        if trade_of(trades, kind) is None:
            continue
        modules = _selected_modules(rule_type(trades, kind), explored[variant], point)
        selected += sorted(modules, key=lambda t: (-t.buys_bytes, t.label))
    return tuple(selected)


def _selected_accumulate(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> SelectedTrade:
    """Return the split into micro-batches, compared with the same recomputations on the whole
    batch.
    """
    without = _estimate_on(explored, variant, point, variant.unsplit)
    return SelectedTrade(
        trade=variant.split[0].trade,
        label=f"{variant.parts} micro-batches",
        rules=variant.unchunked.unoffloaded.rules,
        buys_bytes=without.peak_bytes - point.peak_bytes,
        pays_seconds=point.seconds - without.seconds,
    )


def _selected_changes(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> list[SelectedTrade]:
    """Return the other changes of the graph, compared as a whole with the same step without them.

    The saving and cost of all of them are shown at the first trade.
    """
    changed = variant if variant.unchanged in explored else variant.unsplit.unchunked
    with_changes = _estimate_on(explored, variant, point, changed)
    without = _estimate_on(explored, variant, point, changed.unchanged)
    selected: list[SelectedTrade] = []
    for trade in dict.fromkeys(rule.trade for rule in variant.changes):
        rules = tuple(rule for rule in variant.changes if rule.trade == trade)
        is_first = not selected
        selected.append(
            SelectedTrade(
                trade=trade,
                label=rules[0].describe() if len(rules) == 1 else f"{len(rules)} places",
                rules=rules,
                buys_bytes=(without.peak_bytes - with_changes.peak_bytes) * is_first,
                pays_seconds=(with_changes.seconds - without.seconds) * is_first,
            )
        )
    return selected


def _selected_chunks(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> SelectedTrade:
    """Return the chunked computation, compared with the same recomputations without chunks.

    The comparison is made on the whole batch if micro-batches were never explored without chunks.
    """
    chunked = variant if variant.unchunked in explored else variant.unsplit
    with_chunks = _estimate_on(explored, variant, point, chunked)
    without = _estimate_on(explored, variant, point, chunked.unchunked)
    rules = of_kind(variant.rules, SlicedComputation)
    named = ", ".join(dict.fromkeys(rule.module or "the loss" for rule in rules))
    slices = " and ".join(dict.fromkeys(str(rule.slices) for rule in rules))
    return SelectedTrade(
        trade=rules[0].trade,
        label=f"{named} in {slices} slices",
        rules=rules,
        buys_bytes=without.peak_bytes - with_chunks.peak_bytes,
        pays_seconds=with_chunks.seconds - without.seconds,
    )


def _selected_states(
    unoffloaded: Explored, variant: Variant, *, before: Point, point: Point
) -> list[SelectedTrade]:
    """Return the offloaded state, compared with the same plan with all state on the device.

    The total saving and cost are split by bytes.
    """
    nbytes = offloaded_bytes(unoffloaded.estimator.program, variant.states)
    total = sum(nbytes.values())
    selected = []
    for what in dict.fromkeys(rule.what for rule in variant.states):
        rules = tuple(rule for rule in variant.states if rule.what == what)
        size, count = sum(nbytes[rule] for rule in rules), sum(rule.count for rule in rules)
        selected.append(
            SelectedTrade(
                trade=rules[0].trade,
                label=(
                    f"{what} of {count} parameter{'s' if count > 1 else ''}, {format_bytes(size)}"
                ),
                rules=rules,
                buys_bytes=round((before.peak_bytes - point.peak_bytes) * size / total),
                pays_seconds=(point.seconds - before.seconds) * size / total,
            )
        )
    return selected


def _estimate_on(
    explored: Mapping[Variant, Explored], variant: Variant, point: Point, to: Variant
) -> PeakEstimate:
    """Return the estimate of the same recomputations on another variant of the step."""
    source, target = explored[variant], explored[to].estimator
    return target.estimate(choices_in_trace(source.estimator, source.choices_of(point), target))


def _selected_modules(
    rule: type[CallRule], explored: Explored, point: Point
) -> list[SelectedTrade]:
    """Return one entry per module for its recomputed, offloaded or 8-bit values."""
    estimator = explored.estimator
    graph = estimator.program.graph
    choices = explored.choices_of(point)
    with_all = estimator.estimate(choices)
    value_on, is_of_trade = _values_of_trade(rule, estimator)
    is_recompute = issubclass(rule, Recomputation)
    offered = _by_module(graph, value_on)
    # If there are several choices for a value, only one takes effect; if the backward pass does not
    # read the value, none does.
    counted_choices = choices if is_recompute else frozenset(with_all.evicted)
    times = estimator.times_of(counted_choices)
    slices = estimator.slice_counts(choices) if issubclass(rule, ValueOffload) else {}
    chosen = _by_module(
        graph,
        {c: value_on[estimator.storage(c)] for c in sorted(counted_choices) if is_of_trade(c)},
    )
    max_depth = max((m.count(".") + 1 for m in chosen), default=0)
    depth = next(
        (
            d
            for d in range(max_depth, 1, -1)
            if len({_truncate(m, d) for m in chosen}) <= _MAX_PARTS
        ),
        1,
    )
    selected = []
    for module in sorted({_truncate(m, depth) for m in chosen}):
        group = {
            s for m, members in chosen.items() if _truncate(m, depth) == module for s in members
        }
        num_offered = sum(
            len(members) for m, members in offered.items() if _truncate(m, depth) == module
        )
        # Remove all evictions of these values; otherwise another choice would evict them.
        evicted_storages = set() if is_recompute else {estimator.storage(c) for c in group}
        without = estimator.estimate(
            frozenset(
                c
                for c in choices - group
                if estimator.is_recompute(c) or estimator.storage(c) not in evicted_storages
            )
        )
        count = str(len(group)) if len(group) == num_offered else f"{len(group)} of {num_offered}"
        count += _repeats_label(times[s] for s in group if s in times)
        selected.append(
            SelectedTrade(
                trade=rule.trade,
                label=f"{module or 'top level'} ({count}){_slices_label(estimator, group, slices)}",
                rules=_rules_for(rule, estimator, group, times),
                buys_bytes=without.peak_bytes - with_all.peak_bytes,
                pays_seconds=with_all.seconds - without.seconds,
            )
        )
    return selected


def _slices_label(
    estimator: FastEstimator, choices: Iterable[int], slices: Mapping[str, int]
) -> str:
    """Return a text: how many of the values are fetched in slices, and in how many slices."""
    values = [estimator.evicted_value(c) for c in choices] if slices else []
    counts = sorted(slices[value] for value in values if value in slices)
    if not counts:
        return ""
    prefix = "" if len(counts) == len(values) else f"{len(counts)} "
    return f", {prefix}in {' and '.join(map(str, dict.fromkeys(counts)))} slices"


def _repeats_label(times: Iterable[int]) -> str:
    """Return a text: how many values are recomputed more than once."""
    repeats = list(times)
    if not repeats:
        return ""
    max_times = max(repeats)
    return f", {len(repeats)} {'twice' if max_times == 2 else f'up to {max_times} times'}"


def _rules_for(
    rule: type[CallRule], estimator: FastEstimator, choices: Iterable[int], times: Mapping[int, int]
) -> tuple[Rule, ...]:
    graph = estimator.program.graph
    value_on, _ = _values_of_trade(rule, estimator)
    values = {value_on[estimator.storage(c)]: times.get(c, 1) for c in choices}
    if issubclass(rule, Recomputation):
        return recompute_rules(graph, values, rule)
    return to_rules(graph, values, rule)


def _values_of_trade(
    rule: type[Rule], estimator: FastEstimator
) -> tuple[Mapping[int, str], Callable[[int], bool]]:
    """Return the values to which the trade can be applied, by storage, and a test for its
    choices.
    """
    if issubclass(rule, ValueOffload):
        return estimator.offloadable, estimator.is_offload
    if issubclass(rule, ValueCodec):
        return estimator.quantizable, estimator.is_quantize
    return estimator.value_on, estimator.is_recompute


def _by_module(graph: Graph, values: Mapping[int, str]) -> dict[str, set[int]]:
    """Return the choices by module, with all blocks of a run under one name.

    ``values`` maps choices to values.
    """
    found: dict[str, set[int]] = {}
    for storage, value in values.items():
        spot = spot_of(graph, graph.by_name[value])
        assert spot is not None
        patterns = (starred(spot.module, run) for run in graph.runs)
        module = next((p for p in patterns if p is not None), spot.module)
        found.setdefault(module, set()).add(storage)
    return found


def _truncate(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def explain_rejected(
    offers: Iterable[Offer],
    explored: Mapping[Variant, Explored],
    variant: Variant,
    point: Point,
    budget: Budget,
) -> tuple[Rejection, ...]:
    """Return a rejection, with the decisive reason, for each offer that is not applied in full."""
    rejections = []
    for offer in offers:
        left = Remaining.WHOLE
        first = offer.rules[0]
        if isinstance(first, MicroBatches):
            reason = _why_not_split(first, explored, variant, point)
        elif isinstance(first, StateOffload):
            reason = _why_not_states(first, explored, variant, budget)
        elif first.stage is Stage.VARIANT:
            reason = _why_not_changed(first, explored, variant, point)
        elif isinstance(first, ValueOffload | ValueCodec):
            evictable = _evictable(offer, explored, variant)
            evicted = _evicted(offer, explored[variant], point)
            reason = _why_not_evict(offer, evictable, explored[variant], point, budget)
            left = Remaining.REST if evictable & evicted else Remaining.WHOLE
        else:
            storages = _recomputable(offer, explored, variant)
            reason = _why_not_recompute(storages, explored[variant], point, budget)
            left = Remaining.REST if storages & point.choices else Remaining.WHOLE
        if reason is not None:
            rejections.append(
                Rejection(trade=offer.trade, label=offer.label, reason=reason, left=left)
            )
    return tuple(rejections)


def _why_not_split(
    rule: MicroBatches, explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> str | None:
    degree, parts = rule.micro_batches, variant.parts
    if degree == parts:
        return None
    known = next((e for v, e in explored.items() if v.parts == degree and not v.states), None)
    if known is None:
        return f"not needed: {parts} micro-batches are enough" if parts > 1 else "not needed"
    return alone_takes(known.plain.seconds, point.seconds)


def _why_not_changed(
    rule: Rule, explored: Mapping[Variant, Explored], variant: Variant, point: Point
) -> str | None:
    """Return why the graph is not changed by this rule; None if it is."""
    if rule in (*variant.chunks, *variant.changes):
        return None
    known = next(
        (
            found
            for other, found in explored.items()
            if rule in (*other.chunks, *other.changes) and not other.states
        ),
        None,
    )
    if known is None:
        return "not needed"
    return alone_takes(known.plain.seconds, point.seconds)


def _why_not_states(
    rule: StateOffload, explored: Mapping[Variant, Explored], variant: Variant, budget: Budget
) -> str | None:
    if any(
        (rule.parameter, rule.what) == (state_rule.parameter, state_rule.what)
        for state_rule in variant.states
    ):
        return None
    nbytes = offloaded_bytes(explored[Variant()].estimator.program, [rule])[rule]
    reason = (
        "but memory is not bounded"
        if budget.memory_bytes is None
        else "which the budget does not require"
    )
    return (
        f"would transfer ~{format_bytes(nbytes)} to offload memory and back each step and free as "
        f"much memory, {reason}"
    )


def _recomputable(
    offer: Offer, explored: Mapping[Variant, Explored], variant: Variant
) -> frozenset[int]:
    base_graph, estimator = explored[Variant()].estimator.program.graph, explored[variant].estimator
    return estimator.storages_of(
        values_in_trace(matching(base_graph, of_kind(offer.rules, CallRule)), base_graph, estimator)
    )


def _evictable(
    offer: Offer, explored: Mapping[Variant, Explored], variant: Variant
) -> frozenset[int]:
    """Return the storages that the offer would offload or keep in 8 bits in this variant."""
    base, estimator = explored[Variant()].estimator, explored[variant].estimator
    value_on, _ = _values_of_trade(type(offer.rules[0]), base)
    storages = {value: s for s, value in value_on.items()}
    values = matching(base.program.graph, of_kind(offer.rules, CallRule))
    choices = frozenset(_evict_choice(offer, base, storages[v]) for v in values)
    return frozenset(estimator.storage(c) for c in choices_in_trace(base, choices, estimator))


def _evict_choice(offer: Offer, estimator: FastEstimator, storage: int) -> int:
    if isinstance(offer.rules[0], ValueCodec):
        return estimator.quantize_choice(storage)
    is_sliced = _is_sliced(offer) and storage in estimator.sliced
    return estimator.offload_choice(
        storage, TransferMode.SLICED if is_sliced else TransferMode.HIDDEN
    )


def _is_sliced(offer: Offer) -> bool:
    first = offer.rules[0]
    return isinstance(first, ValueOffload) and first.slices > 0


def _evicted(offer: Offer, explored: Explored, point: Point) -> frozenset[int]:
    """Return the storages that the plan offloads or keeps in 8 bits.

    For an offer of sliced fetches, these are only the storages that are fetched in slices.
    """
    estimator = explored.estimator
    _, is_of_trade = _values_of_trade(type(offer.rules[0]), estimator)
    choices = explored.choices_of(point)
    evicted = frozenset(
        estimator.storage(c) for c in estimator.estimate(choices).evicted if is_of_trade(c)
    )
    if not _is_sliced(offer):
        return evicted
    return evicted & estimator.storages_of(estimator.slice_counts(choices))


def _why_not_evict(
    offer: Offer, storages: frozenset[int], explored: Explored, point: Point, budget: Budget
) -> str | None:
    estimator, remaining = explored.estimator, storages - _evicted(offer, explored, point)
    if storages and not remaining:
        return None
    estimate = estimator.estimate(
        point.choices | {_evict_choice(offer, estimator, s) for s in remaining}
    )
    if not set(estimate.evicted) - point.choices:
        return NOT_READ
    return _not_worth_it(point, estimate, budget)


def _why_not_recompute(
    storages: frozenset[int], explored: Explored, point: Point, budget: Budget
) -> str | None:
    if storages and storages <= point.choices:
        return None
    estimator = explored.estimator
    estimate = estimator.estimate(point.choices | storages)
    if estimate.seconds <= point.seconds:
        return NOT_READ
    return _not_worth_it(point, estimate, budget)


def _not_worth_it(point: Point, estimate: PeakEstimate, budget: Budget) -> str:
    buys, pays = point.peak_bytes - estimate.peak_bytes, estimate.seconds - point.seconds
    price = f"would add ~{format_seconds(max(0.0, pays))} a step"
    if buys <= 0:
        return f"{price} and save no peak memory"
    if budget.memory_bytes is None:
        return f"{price} and save ~{format_bytes(buys)}, but memory is not bounded"
    return f"{price} and save ~{format_bytes(buys)}, which the budget does not require"
