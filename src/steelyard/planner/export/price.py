"""Chooses and prices the coarse settings that other tools can express, with a captured step.

The peak is that of an eager step on fake tensors, with the micro-batches and the checkpointing of
the settings: other tools run eager PyTorch. The time is that of the captured graph, in which every
value of a block is recomputed that can be. Not for the settings themselves: see export/settings.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from steelyard.capture.batch.splitting import part
from steelyard.capture.deep.eager_levels import block_names
from steelyard.comm.devices import torch_device_of
from steelyard.export.exported import ExportPrice
from steelyard.export.settings import NumberFormats, Settings, is_in_the_loss
from steelyard.ir.graph import Graph, Phase
from steelyard.ir.metrics import Estimate
from steelyard.ir.rule import Rule, matching, of_kind, to_rules
from steelyard.ir.rule_kinds import MicroBatches, Recomputation, SlicedComputation
from steelyard.planner.fit.step_memory import FitStep, need_of
from steelyard.planner.session import PlanningSession
from steelyard.plans.memory_fit import Capacity
from steelyard.plans.plan import Decisions
from steelyard.plans.trade import rule_type, trade_of
from steelyard.trades import TRADES

# As for the eager baseline of a plan: workspaces of kernels are not counted.
_MEMORY_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSettings:
    """Settings with their price, and what has to be said about it."""

    settings: Settings
    price: ExportPrice | None
    notes: tuple[str, ...] = ()


def formats_of(session: PlanningSession) -> NumberFormats:
    """Return the dtypes in which the captured step keeps its weights and multiplies."""
    weights = {str(p.dtype).removeprefix("torch.") for p in session.source.model.parameters()}
    products = {n.product_format for n in session.base.graph.nodes if n.flops}
    half = sorted(products & {"bfloat16", "float16"})
    return NumberFormats(
        weights=weights.pop() if len(weights) == 1 else "mixed",
        products=half[0] if half else next(iter(sorted(products)), ""),
    )


def priced_settings(
    session: PlanningSession, decisions: Decisions, wanted: Settings
) -> PricedSettings:
    """Return the settings nearest to ``wanted`` that keep the plan's memory budget, priced.

    Other numbers of micro-batches and checkpointing are tried if need be. If nothing keeps the
    budget, the settings with the least memory are returned. Only steps on one rank are priced.
    """
    if wanted.layout.num_ranks > 1:
        note = "peak and step of these settings are not predicted: they are for several ranks"
        return PricedSettings(settings=wanted, price=None, notes=(note,))
    limit = decisions.budget.memory_bytes
    tried: list[tuple[int, Settings]] = []
    for settings in _candidates(session, wanted, is_bounded=limit is not None):
        tried.append((_peak_bytes(session, settings), settings))
        if limit is None or tried[-1][0] <= limit:
            break
    nbytes, chosen = tried[-1]
    if limit is not None and nbytes > limit:
        nbytes, chosen = min(tried, key=lambda pair: pair[0])
    notes = tuple(_notes(session, chosen, wanted))
    reason = session.source.why_not_split()
    if limit is not None and nbytes > limit and reason is not None:
        notes += (f"no other number of micro-batches was tried: {reason}",)
    moves = chosen.offloads_activations or chosen.offloaded_state
    seconds = None if moves else _step_seconds(session, decisions, chosen)
    price = ExportPrice(
        memory_bytes=Estimate.within(nbytes, share=_MEMORY_ERROR), step_seconds=seconds
    )
    return PricedSettings(settings=chosen, price=price, notes=notes)


def _candidates(
    session: PlanningSession, wanted: Settings, *, is_bounded: bool
) -> Iterator[Settings]:
    """Yield settings from the nearest to the farthest."""
    if not is_bounded:
        yield wanted
        return
    can_split = session.source.why_not_split() is None
    counts = [wanted.micro_batches]
    if can_split:
        counts += [k for k in session.source.divisors() if k > wanted.micro_batches]
    for count in counts:
        for recomputes in (False, True):
            if recomputes or not wanted.offloads_activations:
                yield replace(wanted, micro_batches=count, recomputes_blocks=recomputes)


def _notes(session: PlanningSession, chosen: Settings, wanted: Settings) -> Iterator[str]:
    if chosen.micro_batches != wanted.micro_batches:
        yield f"{chosen.micro_batches} micro-batches instead of the plan's {wanted.micro_batches}"
    if wanted.recomputes_blocks and not chosen.recomputes_blocks:
        yield "nothing has to be recomputed"
    if chosen.recomputes_blocks and not wanted.recomputes_blocks:
        yield "blocks are recomputed, which the plan does not need"
    if chosen.recomputes_blocks and not block_names(session.source.model):
        yield "the model has no list of blocks of one class: nothing is recomputed"
    if chosen.offloads_activations:
        yield "the memory is that without offload of activations, and therefore an upper bound"
    if chosen.offloads_activations or chosen.offloaded_state:
        yield "the step is not predicted: transfers to host memory are not priced"
    if chosen.chunks:
        yield "the memory is that of the loss in one piece, and therefore an upper bound"


def _peak_bytes(session: PlanningSession, settings: Settings) -> int:
    """Return the peak of the eager step with these settings, the optimizer included."""
    source = session.source
    batch = source.batch
    if settings.micro_batches > 1:
        batch = part(batch, start=0, size=settings.per_device_batch)
    step = FitStep(
        model=source.model,
        loss=source.loss,
        batch=batch,
        # The optimizer's state and step are in host memory then.
        optimizer=None if settings.offloaded_state else source.optimizer,
        accumulates=settings.micro_batches > 1,
        recomputes=settings.recomputes_blocks,
    )
    is_gpu = not session.request.cluster.is_here or torch_device_of(source.model).type != "cpu"
    # What a caching allocator reserves beyond the tensors is not part of a plan's prediction.
    return need_of(step, Capacity(kind="", memory_bytes=0, is_gpu=is_gpu)).tensor_bytes


def _step_seconds(session: PlanningSession, decisions: Decisions, settings: Settings) -> Estimate:
    """Predict the time of the captured step under the rules that are nearest to the settings."""
    rules = _rules_of(session, decisions, settings)
    program = session.apply_rules(rules) if rules else session.base
    return session.priced(program).metrics.step_seconds


def _rules_of(
    session: PlanningSession, decisions: Decisions, settings: Settings
) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    if settings.micro_batches > 1:
        kind = rule_type(TRADES, MicroBatches)
        rules.append(kind(micro_batches=settings.micro_batches))
    if settings.chunks:
        sliced = of_kind(decisions.rules, SlicedComputation)
        rules += [rule for rule in sliced if is_in_the_loss(rule)]
    if settings.recomputes_blocks:
        rules += _recomputation_of_blocks(session, rules)
    return tuple(rules)


def _recomputation_of_blocks(session: PlanningSession, rules: list[Rule]) -> tuple[Rule, ...]:
    """Return rules that recompute each value of a block that does not leave it."""
    program = session.apply_rules(rules)
    graph = program.graph
    trade = trade_of(TRADES, Recomputation)
    assert trade is not None
    offers, _ = trade.offers(program, session.source)
    offered = {rule for offer in offers for rule in of_kind(offer.rules, Recomputation)}
    blocks = block_names(session.source.model)
    inner = [v for v in matching(graph, sorted(offered)) if _stays_inside(graph, v, blocks)]
    return to_rules(graph, inner, rule_type(TRADES, Recomputation))


def _stays_inside(graph: Graph, value: str, blocks: tuple[str, ...]) -> bool:
    """True if the value is made in a block, and only this block reads it in the forward pass."""
    own = _block_of(graph.by_name[value].path, blocks)
    pending, seen = [value], set()
    while pending and own:
        for name in graph.users[pending.pop()]:
            user = graph.by_name[name]
            if user.phase is not Phase.FORWARD or name in seen:
                continue
            seen.add(name)
            if _block_of(user.path, blocks) != own:
                return False
            if graph.is_alias(user):
                pending.append(name)
    return bool(own)


def _block_of(path: str, blocks: tuple[str, ...]) -> str:
    return next((b for b in blocks if path == b or path.startswith(f"{b}.")), "")
