"""The decisions of a plan that a tool's configuration cannot express, one line for each kind.

A kind of rule that nothing here knows is named as lost, so that no decision disappears silently.
Not for the settings themselves: see settings.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from steelyard.errors import BadInput
from steelyard.export.settings import Settings, is_in_the_loss
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.rule import Rule, of_kind, trade_name
from steelyard.ir.rule_kinds import (
    BatchSharding,
    MicroBatches,
    PipelineStageEnd,
    Recomputation,
    SlicedComputation,
    StateOffload,
    StateSharding,
    TensorSharding,
    ValueOffload,
)
from steelyard.plans.plan import Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The settings that a tool has. Every tool has micro-batches, and can recompute blocks."""

    tensor: bool = False
    pipeline: bool = False
    chunks: bool = False
    compiles: bool = True
    buckets: bool = False
    activation_offload: bool = False
    # What is offloaded are the inputs of blocks that are recomputed.
    offloads_block_inputs: bool = False
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)


def within(settings: Settings, abilities: Abilities) -> Settings:
    """Return the settings without those that the tool lacks."""
    offloads = settings.offloads_activations and abilities.activation_offload
    recomputes = settings.recomputes_blocks or (offloads and abilities.offloads_block_inputs)
    stage = next((s for s in abilities.zero_stages if s >= settings.zero_stage), 0)
    return replace(
        settings,
        zero_stage=stage,
        chunks=settings.chunks if abilities.chunks else 0,
        compiles=settings.compiles and abilities.compiles,
        bucket_bytes=settings.bucket_bytes if abilities.buckets else 0,
        offloads_activations=offloads,
        recomputes_blocks=recomputes,
    )


def refuse_inexpressible(decisions: Decisions, abilities: Abilities, *, tool: str) -> None:
    """Raise BadInput if the tool cannot lay out the step on ranks as the plan does."""
    layout = ParallelLayout.of(decisions.rules)
    for degree, can, kind, word in (
        (layout.tensor, abilities.tensor, TensorSharding, "tensors"),
        (layout.pipeline, abilities.pipeline, PipelineStageEnd, "layers"),
    ):
        if degree > 1 and not can:
            trade = trade_name(kind)
            others = "accelerate or torchtitan" if kind is TensorSharding else "torchtitan"
            raise BadInput(
                f"the plan divides {word} among {degree} ranks ({trade}), which a configuration of "
                f"{tool} cannot express",
                expected=f"a plan without {trade}",
                remedy=f"export it with --as {others}, or remove the {trade} rules from the plan",
            )


def omissions(decisions: Decisions, settings: Settings, abilities: Abilities) -> tuple[str, ...]:
    """Return what the settings lose against the decisions, one line for each kind of rule."""
    return tuple(_omissions(decisions, settings, abilities))


def _omissions(decisions: Decisions, settings: Settings, abilities: Abilities) -> Iterator[str]:
    rules = decisions.rules
    yield from _recomputation(of_kind(rules, Recomputation), settings)
    yield from _sliced(of_kind(rules, SlicedComputation), settings)
    yield from _offloads(rules, settings)
    yield from _sharding(decisions, settings, abilities)
    known = (
        MicroBatches, Recomputation, SlicedComputation, ValueOffload, StateOffload, BatchSharding,
        TensorSharding, StateSharding, PipelineStageEnd,
    )  # fmt: skip
    others: dict[str, list[Rule]] = {}
    for rule in rules:
        if not isinstance(rule, known):
            others.setdefault(rule.trade, []).append(rule)
    for trade, found in others.items():
        yield f"{trade}: {_some([rule.describe() for rule in found])}"
    if decisions.target.runner == "inductor" and not settings.compiles:
        yield "compilation: the tool has no setting for it"


def _recomputation(rules: Sequence[Recomputation], settings: Settings) -> Iterator[str]:
    if not rules:
        return
    count = sum(rule.count for rule in rules)
    values = f"{rules[0].trade} of {count} single value{'s' * (count != 1)}"
    if settings.recomputes_blocks:
        yield f"{values}: each block is recomputed as a whole"
    else:
        yield f"{values}: nothing is recomputed"


def _sliced(rules: Sequence[SlicedComputation], settings: Settings) -> Iterator[str]:
    for rule in rules:
        if not (settings.chunks and is_in_the_loss(rule)):
            yield f"{rule.trade}: {rule.describe()}"


def _offloads(rules: Sequence[Rule], settings: Settings) -> Iterator[str]:
    values, states = of_kind(rules, ValueOffload), of_kind(rules, StateOffload)
    if values:
        count = sum(rule.count for rule in values)
        lost = f"{values[0].trade} of {count} single value{'s' * (count != 1)}"
        kept = ": what the blocks save is in host memory"
        yield f"{lost}{kept if settings.offloads_activations else ''}"
    if states:
        named = _some([rule.describe() for rule in states])
        yield f"{states[0].trade} of {named}: that of all parameters is in host memory"


def _sharding(decisions: Decisions, settings: Settings, abilities: Abilities) -> Iterator[str]:
    rules, target = decisions.rules, decisions.target
    batch, sharded = of_kind(rules, BatchSharding), of_kind(rules, StateSharding)
    for rule in batch:
        if rule.shares:
            yield f"{rule.trade} in shares of {spelled(rule.shares)}: all ranks get the same"
        if not abilities.buckets:
            yield f"{rule.trade}: {rule.describe()}: the tool has its own buckets"
    if sharded:
        trade, count = sharded[0].trade, sum(rule.count for rule in sharded)
        yield f"{trade} of {count} parameter{'s' * (count != 1)}: all parameters are sharded"
    ends = of_kind(rules, PipelineStageEnd)
    if ends:
        places = _some([rule.behind for rule in ends])
        yield f"{ends[0].trade} behind {places}: the tool cuts stages of its own"
    tensors = of_kind(rules, TensorSharding)
    if tensors:
        dims = _some([f"{rule.parameter} by dim {rule.dim}" for rule in tensors])
        yield f"{tensors[0].trade} of {dims}: the model's own tensor-parallel plan is used"
    if decisions.used_ranks:
        yield f"the choice of ranks {_some([str(rank) for rank in decisions.used_ranks])}"
    if len(set(target.speeds)) > 1 and settings.layout.num_ranks > 1:
        yield "the speeds of the ranks: all are taken to be equal"


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
