"""The kinds of rules: everything that a search, a layout and a report may know about a trade.

Each trade in trades/ derives its own type of rule from one of these kinds. Several trades may be of
one kind, such as the gradient codecs. Not for rules in general: see rule.py.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from steelyard.ir.gradient_codec import Codec
from steelyard.ir.rule import (
    IN_BYTES,
    LARGEST,
    MOST_RANKS,
    OMITTED,
    Bytes,
    CallRule,
    Positive,
    Rule,
    Stage,
    Whole,
    with_units,
)
from steelyard.units import parse_bytes

MOST_PARAMETERS = 100_000
# Prefetch only while this does not raise the peak above that without prefetching.
WITHIN_PEAK: Literal["peak"] = "peak"

StatePart = Literal["optimizer", "gradient", "weight"]
MessageKind = Literal["stages", "exchanges"]
Ranks = Annotated[int, Field(ge=2, le=MOST_RANKS)]
BytesOrNone = Annotated[int, with_units(parse_bytes, "memory"), Field(ge=0, le=LARGEST), IN_BYTES]


def _as_tuple(given: object) -> object:
    """Turn a TOML list into a tuple, which can be hashed."""
    return tuple(given) if isinstance(given, list) else given


Shares = Annotated[
    tuple[Positive, ...], BeforeValidator(_as_tuple), Field(max_length=MOST_RANKS), OMITTED
]


@dataclass(frozen=True, kw_only=True)
class Recomputation(CallRule):
    """Recomputes a value at most ``times`` times."""

    # More than even a chain of a thousand blocks could use.
    times: Annotated[int, Field(ge=1, le=16), OMITTED] = 1


@dataclass(frozen=True, kw_only=True)
class ValueOffload(CallRule):
    """Moves a value to offload memory and back.

    ``slices`` is the number of slices in which it is fetched, 0 for the whole value. ``lag`` and
    ``lead`` are the numbers of operators that run while it is sent and while it is fetched.
    """

    needs_offload_memory: ClassVar[bool] = True
    paid_in: ClassVar[str] = "communication"

    slices: Annotated[Whole, OMITTED] = 0
    lag: Whole = 0
    lead: Whole = 0


@dataclass(frozen=True, kw_only=True)
class ValueCodec(CallRule):
    """Saves a value in fewer bits until the backward pass reads it."""


@dataclass(frozen=True, kw_only=True)
class SlicedComputation(CallRule):
    """Computes the region around a large value in ``slices``, so that it is never whole."""

    most: ClassVar[int] = 100
    stage: ClassVar[Stage] = Stage.VARIANT

    slices: Annotated[int, Field(ge=2, le=LARGEST)]

    def describe(self) -> str:
        return f"{self.op} in {self.module or 'the loss'}, {self.slices} slices"


@dataclass(frozen=True, kw_only=True)
class MicroBatches(Rule):
    """Divides the batch of a step into micro-batches."""

    micro_batches: Positive

    def describe(self) -> str:
        return f"micro_batches {self.micro_batches}"


class ParameterRule(Rule):
    """A rule for ``count`` parameters whose names match the pattern ``parameter``."""

    most: ClassVar[int] = MOST_PARAMETERS
    parameter: str
    count: Positive


@dataclass(frozen=True, kw_only=True)
class StateOffload(ParameterRule):
    """Moves a part of a parameter's state to offload memory, in ``slices``, 0 for whole tensors.

    ``lead`` is the number of operators that run while it is fetched.
    """

    needs_offload_memory: ClassVar[bool] = True
    paid_in: ClassVar[str] = "communication"

    parameter: str
    what: StatePart = "optimizer"
    count: Positive = 1
    slices: Whole = 0
    lead: Whole = 0

    def describe(self) -> str:
        return f"{self.what} of {self.parameter} ({self.count})"


@dataclass(frozen=True, kw_only=True)
class BatchSharding(Rule):
    """Data parallelism. ``shares`` are unequal parts of the batch; gradients are reduced in buckets
    of ``bucket`` bytes.
    """

    stage: ClassVar[Stage] = Stage.LAYOUT
    paid_in: ClassVar[str] = "communication"

    ranks: Ranks
    shares: Shares = ()
    bucket: Bytes


@dataclass(frozen=True, kw_only=True)
class TensorSharding(ParameterRule):
    """Tensor parallelism: a parameter in equal shards along ``dim``, in each of its ``groups``."""

    stage: ClassVar[Stage] = Stage.LAYOUT
    paid_in: ClassVar[str] = "communication"

    ranks: Ranks
    parameter: str
    dim: Annotated[int, Field(ge=0, le=63)]
    groups: Annotated[Positive, OMITTED] = 1
    count: Positive = 1

    def describe(self) -> str:
        return f"{self.parameter} by dim {self.dim} on {self.ranks} ranks"


@dataclass(frozen=True, kw_only=True)
class StateSharding(ParameterRule):
    """ZeRO: the state of a parameter in shards; by default weight, gradient and optimizer state.

    ``gathers`` is how often the weight is gathered, ``bucket`` how many bytes are gathered
    together.
    """

    stage: ClassVar[Stage] = Stage.LAYOUT
    paid_in: ClassVar[str] = "communication"

    ranks: Ranks
    parameter: str
    what: Annotated[Literal["optimizer", "gradient", ""], OMITTED] = ""
    gathers: Annotated[int, Field(ge=1, le=2), OMITTED] = 1
    # By default each parameter is gathered by itself.
    bucket: Annotated[BytesOrNone, OMITTED] = 0
    count: Positive = 1


@dataclass(frozen=True, kw_only=True)
class PipelineStageEnd(Rule):
    """Pipeline parallelism: a stage ends after the module ``behind``."""

    stage: ClassVar[Stage] = Stage.LAYOUT
    most: ClassVar[int] = 10_000
    paid_in: ClassVar[str] = "communication"

    ranks: Ranks
    schedule: str
    behind: str

    def describe(self) -> str:
        return f"{self.schedule} on {self.ranks} ranks, a stage ends after {self.behind}"


class GradientRule(ParameterRule):
    """A rule for the all-reduce of the gradients of some parameters."""

    stage: ClassVar[Stage] = Stage.LAYOUT
    buys_communication: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class GradientCompression(GradientRule):
    """Sends gradients in the codec of the trade, after ``warm_up`` uncompressed steps."""

    parameter: str
    count: Positive = 1
    warm_up: Annotated[Whole, OMITTED] = 0

    @property
    def codec(self) -> Codec:
        """The codec in which these gradients are sent."""
        raise NotImplementedError

    @property
    def less_lossy(self) -> "GradientCompression | None":
        """The rule with the next codec that is less lossy; None if there is none."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SparseRows(GradientRule):
    """Sends only the looked-up rows of an embedding's gradient."""

    parameter: str
    count: Positive = 1
    format: Literal["rows"] = "rows"


@dataclass(frozen=True, kw_only=True)
class CollectiveOverlap(Rule):
    """Delays the waits for collectives, and issues collectives earlier.

    ``window`` is the number of collectives by which waits are delayed, ``ahead`` the number of
    operators by which a collective is issued earlier. ``within`` can forbid to exceed the peak that
    the step has without this.
    """

    stage: ClassVar[Stage] = Stage.ORDER

    window: Positive
    ahead: Annotated[Whole, OMITTED] = 0
    within: Annotated[Literal["", "peak"], OMITTED] = ""


@dataclass(frozen=True, kw_only=True)
class SharedMemoryMessages(Rule):
    """Sends messages between stages, or exchanges between ranks, through shared memory."""

    stage: ClassVar[Stage] = Stage.ORDER
    buys_communication: ClassVar[bool] = True

    messages: MessageKind = "stages"
