"""What is said about a layout of a deep model: its price, what each trade in it pays and buys, and
why the others were not taken.

Not for choosing it: see search.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.ir.rule import Rule
from steelyard.plans.plan import Prediction, SelectedTrade
from steelyard.plans.trade import Rejection, Remaining
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.stage_assignment import KEPT
from steelyard.units import format_bytes, format_seconds

_BATCH, _TENSOR, _PIPELINE, _STATES = (
    "shard_batch", "shard_tensor", "shard_pipeline", "shard_states",
)  # fmt: skip
_IN_SHARES = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "weights, gradients and optimizer state",
}
_NOT_WEIGHED = ("chunk", "quantize_activations")
_OFFLOAD, _OFFLOAD_STATE = "offload", "offload_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterExplanation:
    taken: tuple[SelectedTrade, ...]
    refused: tuple[Rejection, ...]
    num_offers: int


def told(
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
    """Each beside the same layout without it, nothing being computed again in either; and what is,
    beside the layout with everything kept."""
    layout = best.layout
    whole = search.with_all_kept(best)
    for trade, label, without in _parts_of(layout, best.micro_batch):
        own = tuple(rule for rule in rules if rule.trade == trade)
        before = search.with_all_kept(replace(best, layout=without))
        yield _beside(trade, label, own, before, whole)
    again = Counter[int]()
    num_moved = 0
    for fate, count in chain.from_iterable(best.stages):
        again[len(fate.again)] += count * bool(fate.again)
        num_moved += count * fate.moved
    near = search.prediction(_with_nothing_moved(best))
    if any(again.values()):
        sets = ", ".join(
            f"{calls} calls in {n} block{'s' * (n > 1)}" for calls, n in again.items() if n
        )
        own = tuple(rule for rule in rules if rule.trade == "recompute")
        yield _beside("recompute", sets, own, whole, near)
    if num_moved:
        own = tuple(rule for rule in rules if rule.trade == _OFFLOAD)
        of = f"{num_moved} blocks keep" if num_moved > 1 else "one block keeps"
        label = f"what {of}, to the hosts' memory"
        yield _beside(_OFFLOAD, label, own, near, search.prediction(best))


def _with_nothing_moved(best: ClusterPlan) -> ClusterPlan:
    stages = (tuple((replace(f, moved=False), n) for f, n in stage) for stage in best.stages)
    return replace(best, stages=tuple(stages))


def _parts_of(layout: ClusterLayout, samples: int) -> Iterator[tuple[str, str, ClusterLayout]]:
    """Each trade that lays the step so, in words, and the layout without it."""
    cut = f"{layout.micro_batches} micro-batches of {samples}"
    plain = replace(layout, virtual=1)
    if layout.data > 1:
        alone = replace(
            layout, data=1, state_stage=0, overlaps=False,
            micro_batches=layout.micro_batches * layout.data,
        )  # fmt: skip
        yield _BATCH, f"among {layout.data} ranks", alone
    if layout.tensor > 1:
        label = f"tensors in parts on {layout.tensor} ranks each"
        yield _TENSOR, label, replace(layout, tensor=1)
    if layout.pipeline > 1:
        runs = f", {layout.virtual} runs of blocks each" if layout.virtual > 1 else ""
        label = f"layers on {layout.pipeline} ranks{runs}, {cut}"
        yield _PIPELINE, label, replace(plain, pipeline=1)
    if layout.state_stage:
        what = {
            1: "optimizer state",
            2: "optimizer state and gradients",
            3: "weights and their own",
        }
        label = f"{what[layout.state_stage]} in shares on {layout.data} ranks"
        yield _STATES, label, replace(layout, state_stage=0)
    if layout.far_states:
        label = "what the optimizer keeps, in the hosts' memory"
        yield _OFFLOAD_STATE, label, replace(layout, far_states=False)
    if layout.overlaps:
        label = "gradients exchanged beside the last backward pass"
        yield "overlap", label, replace(layout, overlaps=False)


def _beside(
    trade: str, label: str, rules: tuple[Rule, ...], before: Prediction, after: Prediction
) -> SelectedTrade:
    quicker = before.metrics.computation_seconds.value - after.metrics.computation_seconds.value
    waits = (
        after.metrics.exposed_communication_seconds.value
        - before.metrics.exposed_communication_seconds.value
    )
    return SelectedTrade(
        trade=trade,
        label=label,
        rules=rules,
        buys_bytes=before.peak.nbytes - after.peak.nbytes,
        buys_seconds=max(quicker, 0.0),
        pays_seconds=waits + max(-quicker, 0.0),
    )


def _refused(search: ClusterSearch, best: ClusterPlan, limit_bytes: int) -> Iterator[Rejection]:
    for trade, label, fits in _others(search, best.layout):
        yield _why_not(search, best, limit_bytes, trade, label, fits)
    fates = {fate for stage in best.stages for fate, _ in stage}
    all_fits = "everything that the backward pass reads fits as it is"
    if not any(fate.again for fate in fates):
        reason = all_fits if fates == {KEPT} else "moving what blocks keep is faster"
        yield Rejection(trade="recompute", label="blocks", reason=reason)
    if not any(fate.moved for fate in fates):
        yield _not_moved(search, best, "what blocks keep", all_fits if fates == {KEPT} else "")
    if not best.layout.far_states:
        yield _states_not_moved(search, best, limit_bytes, is_needed=fates != {KEPT})
    for trade in _NOT_WEIGHED:
        reason = "is not weighed for several devices that are not here"
        yield Rejection(trade=trade, label="the step", reason=reason, left=Remaining.NEVER)
    if search.why_indivisible:
        yield Rejection(
            trade=_BATCH, label="the batch", reason=search.why_indivisible, left=Remaining.NEVER
        )


def _not_moved(search: ClusterSearch, best: ClusterPlan, label: str, reason: str) -> Rejection:
    if not search.leads_to_hosts(best.layout):
        reason = "the cluster says of no memory of hosts, or of no link there"
        return Rejection(trade=_OFFLOAD, label=label, reason=reason, left=Remaining.NEVER)
    slower = "computing again is faster than moving, or the hosts have no room"
    return Rejection(trade=_OFFLOAD, label=label, reason=reason or slower)


def _states_not_moved(
    search: ClusterSearch, best: ClusterPlan, limit_bytes: int, *, is_needed: bool
) -> Rejection:
    label = "what the optimizer keeps"
    if not search.leads_to_hosts(best.layout):
        return replace(_not_moved(search, best, label, ""), trade=_OFFLOAD_STATE)
    reason = "it fits, and everything that the backward pass reads beside it"
    if is_needed:
        other = search.with_far_states(best, limit_bytes)
        reason = "the hosts have no room for it"
        if other is not None:
            takes = format_seconds(other.step.step_seconds)
            reason = f"takes ~{takes} a step, the plan ~{format_seconds(best.step.step_seconds)}"
    return Rejection(trade=_OFFLOAD_STATE, label=label, reason=reason)


def _others(
    search: ClusterSearch, layout: ClusterLayout
) -> Iterator[tuple[str, str, Callable[[ClusterLayout], bool]]]:
    """One way of sharing alone; and each way that is taken left out, each that is not put in."""
    ranks = layout.num_ranks
    if ranks == 1:
        return
    mine = layout.data, layout.tensor, layout.pipeline
    if mine != (ranks, 1, 1) or layout.state_stage:
        yield _BATCH, f"alone, among {ranks} ranks", lambda x: x.data == ranks and not x.state_stage
    if mine != (1, ranks, 1) and ranks in search.tensor_degrees():
        yield _TENSOR, f"alone, on {ranks} ranks", lambda x: x.tensor == ranks
    if mine != (1, 1, ranks) and ranks <= search.num_blocks:
        yield _PIPELINE, f"alone, on {ranks} ranks", lambda x: x.pipeline == ranks
    if layout.tensor == 1 and len(search.tensor_degrees()) > 1:
        yield _TENSOR, "on some of the ranks", lambda x: x.tensor > 1
    if layout.pipeline == 1 and search.num_blocks > 1:
        yield _PIPELINE, "on some of the ranks", lambda x: x.pipeline > 1
    if layout.data == 1 and not search.why_indivisible:
        yield _BATCH, "among some of the ranks", lambda x: x.data > 1
    for stage, label in _IN_SHARES.items():
        if layout.state_stage != stage and layout.data > 1:
            yield _STATES, f"{label} in shares", _with_states(stage)


def _with_states(stage: int) -> Callable[[ClusterLayout], bool]:
    return lambda layout: layout.state_stage == stage


def _why_not(
    search: ClusterSearch,
    best: ClusterPlan,
    limit_bytes: int,
    trade: str,
    label: str,
    fits: Callable[[ClusterLayout], bool],
) -> Rejection:
    ranks = best.layout.num_ranks
    other = search.fastest(ranks, limit_bytes, fits=fits)
    if other is not None:
        takes = format_seconds(other.step.step_seconds)
        reason = (
            f"takes ~{takes} a step at least, the plan ~{format_seconds(best.step.step_seconds)}"
            if other.step.step_seconds > best.step.step_seconds * (1 + ALIKE)
            else f"takes ~{takes} a step too, and the plan is simpler"
        )
    else:
        leanest = search.leanest_bytes(ranks, fits=fits)
        reason = "no such layout divides the batch and the blocks"
        if label.startswith(_IN_SHARES[2]):
            reason = f"is weighed for one micro-batch a rank alone, and {reason}"
        if leanest is not None:
            held = max(leanest, limit_bytes + 1)
            reason = f"holds ~{format_bytes(held)} at least, {format_bytes(limit_bytes)} is allowed"
            if leanest <= limit_bytes:
                reason = f"holds more than the {format_bytes(limit_bytes)} that is allowed"
    return Rejection(trade=trade, label=label, reason=reason)
