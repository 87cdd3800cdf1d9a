"""The settings that flags of other training tools can express, as read from the rules of a plan.

They are coarse: a tool checkpoints whole blocks, and shards or offloads the state of all
parameters. Not for what gets lost on the way: see omissions.py. Not for a tool's own keys: see its
file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.errors import BadInput
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import of_kind
from steelyard.ir.rule_kinds import (
    BatchSharding,
    MicroBatches,
    PipelineStageEnd,
    Recomputation,
    SlicedComputation,
    StateOffload,
    StatePart,
    StateSharding,
    ValueOffload,
)
from steelyard.plans.plan import Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormats:
    """The dtypes of the weights and of matrix products; empty if they are not known."""

    weights: str = ""
    products: str = ""

    @property
    def mixed_precision(self) -> str:
        """The autocast that the step uses, as most tools call it: ``no``, ``bf16`` or ``fp16``."""
        if self.weights != "float32":
            return "no"
        return {"bfloat16": "bf16", "float16": "fp16"}.get(self.products, "no")


UNKNOWN_FORMATS = NumberFormats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The coarse settings of a training step.

    ``batch`` are the samples of a step on all ranks together, ``sequence`` the tokens of a sample,
    0 if the batch has no such dim. ``offloaded_state`` are the parts of the state in host memory.
    ``regathers``: sharded weights are gathered for each pass, not once a step. ``chunks`` is the
    number of chunks in which the loss is computed, 0 for the whole. ``device`` is the type of the
    device in torch, or empty if it is not known. ``nodes`` are the machines of the ranks.
    """

    batch: int
    layout: ParallelLayout
    sequence: int = 0
    micro_batches: int = 1
    recomputes_blocks: bool = False
    offloads_activations: bool = False
    offloaded_state: frozenset[StatePart] = frozenset()
    zero_stage: int = 0
    regathers: bool = False
    chunks: int = 0
    bucket_bytes: int = 0
    schedule: str = ""
    compiles: bool = False
    formats: NumberFormats = field(default=UNKNOWN_FORMATS)
    device: str = ""
    nodes: int = 1

    @property
    def ranks_of_a_node(self) -> int:
        return -(-self.layout.num_ranks // self.nodes)

    @property
    def torchrun(self) -> str:
        """The command that starts a script on one node; plain Python for one rank."""
        if self.layout.num_ranks == 1:
            return "python"
        nodes = f"--nnodes {self.nodes} " if self.nodes > 1 else ""
        return f"torchrun {nodes}--nproc-per-node {self.ranks_of_a_node}"

    @property
    def per_device_batch(self) -> int:
        """The samples of one micro-batch on one device."""
        return self.batch // (self.layout.data * self.micro_batches)

    @property
    def shards_state(self) -> bool:
        return self.zero_stage > 0

    def described(self) -> tuple[str, ...]:
        """Return the settings in words, one each."""
        layout = self.layout
        size = self.per_device_batch
        found = [
            f"{size} sample{'s' * (size != 1)} per device and micro-batch",
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}",
            "each block recomputed" if self.recomputes_blocks else "nothing recomputed",
        ]
        if self.offloads_activations:
            found.append("saved activations in host memory")
        if self.offloaded_state:
            found.append(f"{_listed(sorted(self.offloaded_state))} state in host memory")
        if layout.num_ranks > 1:
            axes = (("data", layout.data), ("tensor", layout.tensor), ("pipeline", layout.pipeline))
            found.append(f"mesh of {' x '.join(f'{n} {axis}' for axis, n in axes if n > 1)}")
            found.append(f"ZeRO stage {self.zero_stage}")
        if self.chunks:
            found.append(f"loss in {self.chunks} chunks")
        if self.compiles:
            found.append("compiled")
        found.append(f"mixed precision: {self.formats.mixed_precision}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "per_device_batch": self.per_device_batch,
            "micro_batches": self.micro_batches,
            "recomputes_blocks": self.recomputes_blocks,
            "offloads_activations": self.offloads_activations,
            "offloaded_state": sorted(self.offloaded_state),
            "zero_stage": self.zero_stage,
            "mesh": {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline},
            "loss_chunks": self.chunks,
            "compiles": self.compiles,
            "mixed_precision": self.formats.mixed_precision,
        }


def settings_of(
    decisions: Decisions,
    *,
    formats: NumberFormats = UNKNOWN_FORMATS,
    device: str = "",
    nodes: int = 1,
) -> Settings:
    """Return the nearest coarse settings to these decisions.

    Raise BadInput if the batch has no size, or does not divide among ranks and micro-batches.
    """
    rules = decisions.rules
    layout = replace(ParallelLayout.of(rules), shares=())
    sharded = of_kind(rules, StateSharding)
    offloaded = frozenset(rule.what for rule in of_kind(rules, StateOffload))
    slices = [rule.slices for rule in of_kind(rules, SlicedComputation) if is_in_the_loss(rule)]
    settings = Settings(
        batch=_batch_size(decisions),
        sequence=_sequence(decisions),
        layout=layout,
        micro_batches=max((r.micro_batches for r in of_kind(rules, MicroBatches)), default=1),
        recomputes_blocks=bool(of_kind(rules, Recomputation)),
        offloads_activations=bool(of_kind(rules, ValueOffload)),
        offloaded_state=offloaded,
        zero_stage=max((_STAGES[rule.what] for rule in sharded), default=0),
        regathers=any(rule.gathers > 1 for rule in sharded),
        chunks=max(slices, default=0),
        bucket_bytes=max((rule.bucket for rule in of_kind(rules, BatchSharding)), default=0),
        schedule=next((rule.schedule for rule in of_kind(rules, PipelineStageEnd)), ""),
        compiles=decisions.target.runner == "inductor",
        formats=formats,
        device=device or ("cuda" if decisions.target.declared else ""),
        nodes=nodes,
    )
    _refuse_uneven(settings)
    return settings


# The ZeRO stage that shards this part of the state, and the parts before it.
_STAGES = {"optimizer": 1, "gradient": 2, "": 3}


def is_in_the_loss(rule: SlicedComputation) -> bool:
    """True if the slices are outside the model's blocks, as those of a chunked loss are."""
    return not any(part == "*" or part.isdigit() for part in rule.module.split("."))


def _batch_size(decisions: Decisions) -> int:
    """Return dim 0 of all tensors of the batch."""
    sizes = {entry.shape[0] if entry.shape else None for entry in decisions.target.batch}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        shapes = ", ".join(str(list(entry.shape)) for entry in decisions.target.batch[:4])
        raise BadInput(
            f"the batch of the plan has no size: its tensors have the shapes {shapes or 'none'}",
            expected="tensors that have as many rows as the batch has samples",
            remedy="give the batch as tensors of equal first dims, and plan again",
        )
    return size


def _sequence(decisions: Decisions) -> int:
    """Return the tokens of a sample, if the batch begins with rows of whole numbers."""
    first = decisions.target.batch[0]
    return first.shape[1] if len(first.shape) == 2 and first.dtype.startswith("int") else 0


def _refuse_uneven(settings: Settings) -> None:
    parts = settings.layout.data * settings.micro_batches
    if settings.batch % parts:
        raise BadInput(
            f"the batch of {settings.batch} does not divide into {settings.micro_batches} "
            f"micro-batches on each of {settings.layout.data} ranks",
            expected="the same number of samples on each rank and in each micro-batch: other "
            "tools have no other shares",
            remedy=f"plan with a batch that is a multiple of {parts}",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
