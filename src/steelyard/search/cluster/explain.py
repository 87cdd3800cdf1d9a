"""The explanation of a cluster plan: costs and gains of each trade, and reasons against others.

Not for choosing the plan: see search.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from steelyard.ir.model_blocks import SAVE_ALL
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import (
    BatchSharding,
    CollectiveOverlap,
    PipelineStageEnd,
    Recomputation,
    SlicedComputation,
    StateOffload,
    StateSharding,
    TensorSharding,
    ValueCodec,
    ValueOffload,
)
from steelyard.plans.plan import SelectedTrade
from steelyard.plans.trade import Rejection, Remaining
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.rejection import impossible, rejected, takes
from steelyard.search.trade_price import price_without
from steelyard.units import format_bytes, format_seconds

_STATES_BY_STAGE = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "weights, gradients and optimizer state",
}
_NOT_SEARCHED = (SlicedComputation, ValueCodec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterExplanation:
    taken: tuple[SelectedTrade, ...]
    refused: tuple[Rejection, ...]
    num_offers: int


def explain_plan(
    search: ClusterSearch, best: ClusterPlan, limit_bytes: int, rules: Sequence[Rule]
) -> ClusterExplanation:
    taken = tuple(_taken(search, best, rules))
    refused = tuple(_refused(search, best, limit_bytes))
    never = sum(refusal.left is Remaining.NEVER for refusal in refused)
    return ClusterExplanation(
        taken=taken, refused=refused, num_offers=len(taken) + len(refused) - never
    )


def _taken(
    search: ClusterSearch, best: ClusterPlan, rules: Sequence[Rule]
) -> Iterator[SelectedTrade]:
    """Yield the trades of the plan.

    Layout trades are compared with the layout without them, both without recompute. Recompute is
    compared with the same layout saving all activations, and offload with recompute alone.
    """
    layout = best.layout
    saving_all = search.predict_saving_all(best)
    for kind, label, without in _layout_trades(layout, best.micro_batch):
        trade_rules = of_kind(rules, kind)
        before = search.predict_saving_all(replace(best, layout=without))
        yield price_without(kind, label, trade_rules, without=before, with_it=saving_all)
    recomputed_calls = Counter[int]()
    num_offloaded = 0
    for policy, count in chain.from_iterable(best.stages):
        recomputed_calls[len(policy.recomputed)] += count * bool(policy.recomputed)
        num_offloaded += count * policy.is_offloaded
    recompute_only = search.prediction(_without_offload(best))
    if any(recomputed_calls.values()):
        sets = ", ".join(
            f"{calls} calls in {n} block{'s' * (n > 1)}"
            for calls, n in recomputed_calls.items()
            if n
        )
        trade_rules = of_kind(rules, Recomputation)
        yield price_without(
            Recomputation, sets, trade_rules, without=saving_all, with_it=recompute_only
        )
    if num_offloaded:
        trade_rules = of_kind(rules, ValueOffload)
        subject = f"{num_offloaded} blocks" if num_offloaded > 1 else "one block"
        label = f"saved activations of {subject}, to host memory"
        yield price_without(
            ValueOffload,
            label,
            trade_rules,
            without=recompute_only,
            with_it=search.prediction(best),
        )


def _without_offload(best: ClusterPlan) -> ClusterPlan:
    stages = (tuple((replace(f, is_offloaded=False), n) for f, n in stage) for stage in best.stages)
    return replace(best, stages=tuple(stages))


def _layout_trades(
    layout: ParallelLayout, samples: int
) -> Iterator[tuple[type[Rule], str, ParallelLayout]]:
    """Yield each trade of the layout, with its label and the layout without it."""
    cut = f"{layout.micro_batches} micro-batches of {samples}"
    without_virtual = replace(layout, virtual=1)
    if layout.data > 1:
        without_batch = replace(
            layout, data=1, state_stage=0, overlaps=False,
            micro_batches=layout.micro_batches * layout.data,
        )  # fmt: skip
        yield BatchSharding, f"among {layout.data} ranks", without_batch
    if layout.tensor > 1:
        label = f"tensors sharded over {layout.tensor} ranks each"
        yield TensorSharding, label, replace(layout, tensor=1)
    if layout.pipeline > 1:
        runs = f", {layout.virtual} virtual stages each" if layout.virtual > 1 else ""
        label = f"layers on {layout.pipeline} ranks{runs}, {cut}"
        yield PipelineStageEnd, label, replace(without_virtual, pipeline=1)
    if layout.state_stage:
        label = f"{_STATES_BY_STAGE[layout.state_stage]} sharded over {layout.data} ranks"
        yield StateSharding, label, replace(layout, state_stage=0)
    if layout.offloads_state:
        label = "optimizer state, in host memory"
        yield StateOffload, label, replace(layout, offloads_state=False)
    if layout.overlaps:
        label = "gradient reduction during the last backward pass"
        yield CollectiveOverlap, label, replace(layout, overlaps=False)


def _refused(search: ClusterSearch, best: ClusterPlan, limit_bytes: int) -> Iterator[Rejection]:
    for kind, label, fits in _alternatives(search, best.layout):
        yield _why_not(search, best, limit_bytes, kind, label, fits)
    policies = {policy for stage in best.stages for policy, _ in stage}
    all_fits = "all saved activations fit in memory"
    if not any(policy.recomputed for policy in policies):
        reason = all_fits if policies == {SAVE_ALL} else "offloading saved activations is faster"
        yield rejected(Recomputation, "blocks", reason)
    if not any(policy.is_offloaded for policy in policies):
        reason = "recomputing is faster than offloading, or host memory is too small"
        reason = all_fits if policies == {SAVE_ALL} else reason
        yield _not_offloaded(search, best, ValueOffload, "saved activations", lambda: reason)
    if not best.layout.offloads_state:
        why_not = partial(_why_not_states, search, best, limit_bytes, policies != {SAVE_ALL})
        yield _not_offloaded(search, best, StateOffload, "optimizer state", why_not)
    for kind in _NOT_SEARCHED:
        yield impossible(kind, "the step", "is not searched for declared clusters")
    if search.why_indivisible:
        yield impossible(BatchSharding, "the batch", search.why_indivisible)


def _not_offloaded(
    search: ClusterSearch,
    best: ClusterPlan,
    kind: type[Rule],
    label: str,
    why_not: Callable[[], str],
) -> Rejection:
    if not search.pricing.has_host_memory(best.layout):
        return impossible(kind, label, "the cluster declares no host memory, or no link to it")
    return rejected(kind, label, why_not())


def _why_not_states(
    search: ClusterSearch, best: ClusterPlan, limit_bytes: int, is_needed: bool
) -> str:
    if not is_needed:
        return "it fits, together with all saved activations"
    other = search.with_offloaded_states(best, limit_bytes)
    if other is None:
        return "no plan with it fits"
    return takes(other.step.step_seconds, best.step.step_seconds)


def _alternatives(
    search: ClusterSearch, layout: ParallelLayout
) -> Iterator[tuple[type[Rule], str, Callable[[ParallelLayout], bool]]]:
    """Yield each alternative to be explained: trade, label, and a condition that its layouts
    fulfil.

    The alternatives are each kind of parallelism alone, each kind that the plan does not use, and
    each other ZeRO stage.
    """
    ranks = layout.num_ranks
    if ranks == 1:
        return
    own_degrees = layout.data, layout.tensor, layout.pipeline
    if own_degrees != (ranks, 1, 1) or layout.state_stage:
        yield (
            BatchSharding,
            f"alone, among {ranks} ranks",
            lambda x: x.data == ranks and not x.state_stage,
        )
    if own_degrees != (1, ranks, 1) and ranks in search.tensor_degrees():
        yield TensorSharding, f"alone, on {ranks} ranks", lambda x: x.tensor == ranks
    if own_degrees != (1, 1, ranks) and ranks <= search.num_blocks:
        yield PipelineStageEnd, f"alone, on {ranks} ranks", lambda x: x.pipeline == ranks
    if layout.tensor == 1 and len(search.tensor_degrees()) > 1:
        yield TensorSharding, "on some of the ranks", lambda x: x.tensor > 1
    if layout.pipeline == 1 and search.num_blocks > 1:
        yield PipelineStageEnd, "on some of the ranks", lambda x: x.pipeline > 1
    if layout.data == 1 and not search.why_indivisible:
        yield BatchSharding, "among some of the ranks", lambda x: x.data > 1
    for stage, label in _STATES_BY_STAGE.items():
        if layout.state_stage != stage and layout.data > 1:
            yield StateSharding, f"{label} sharded", _with_states(stage)


def _with_states(stage: int) -> Callable[[ParallelLayout], bool]:
    return lambda layout: layout.state_stage == stage


def _why_not(
    search: ClusterSearch,
    best: ClusterPlan,
    limit_bytes: int,
    kind: type[Rule],
    label: str,
    fits: Callable[[ParallelLayout], bool],
) -> Rejection:
    ranks = best.layout.num_ranks
    other = search.fastest(ranks, limit_bytes, fits=fits)
    if other is not None:
        other_seconds, plan_seconds = other.step.step_seconds, best.step.step_seconds
        reason = (
            takes(other_seconds, plan_seconds, bound="at least")
            if other_seconds > plan_seconds * (1 + ALIKE)
            else f"also takes ~{format_seconds(other_seconds)} a step, and the plan is simpler"
        )
    else:
        leanest = search.leanest_bytes(ranks, fits=fits)
        reason = "no such layout divides the batch and the blocks"
        if label.startswith(_STATES_BY_STAGE[2]):
            reason = f"is searched only with one micro-batch a rank, and {reason}"
        if leanest is not None:
            least = max(leanest, limit_bytes + 1)
            reason = (
                f"needs at least ~{format_bytes(least)} a rank; {format_bytes(limit_bytes)} is "
                "allowed"
            )
            if leanest <= limit_bytes:
                reason = f"needs more than the {format_bytes(limit_bytes)} a rank that is allowed"
    return rejected(kind, label, reason)
