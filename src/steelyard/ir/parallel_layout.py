"""The distribution of a training step over devices, here or on a declared cluster.

Not for the work of each rank: that is its program after all rules were applied, or the cost of its
stage (predict/analytic/step.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from steelyard.errors import BadInput
from steelyard.ir.rule import Rule, of_kind, trade_name
from steelyard.ir.rule_kinds import BatchSharding, PipelineStageEnd, TensorSharding

# The mesh axes. Data-parallel ranks have the same weights and different samples. Tensor-parallel
# ranks have shards of the same weights, and the same samples. Pipeline-parallel ranks have
# different layers, and pass samples on.
DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"
_MOST_SHARES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The degrees of data, tensor and pipeline parallelism, and the schedule of a step.

    ``tensor`` ranks shard the tensors of one model; they are neighbours. ``data`` groups of ranks
    share the batch equally, or in proportion to ``shares`` if these are given. ``pipeline`` ranks
    divide the layers of one model.

    Each pipeline rank has ``virtual`` runs of blocks and processes ``micro_batches``.
    ``state_stage`` is the ZeRO stage. ``overlaps``: gradients are reduced during the last backward
    pass. ``offloads_state``: the optimizer state is in host memory and is fetched for the update.
    ``draws_parts``: each tensor rank draws only its own part of random values (Steelyard's own
    ranks draw them whole). ``regathers_activations``: values gathered from tensor ranks are not
    saved, but gathered again for the backward pass, as sequence parallelism does.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shares: tuple[int, ...] = ()
    micro_batches: int = 1
    virtual: int = 1
    state_stage: int = 0
    overlaps: bool = False
    offloads_state: bool = False
    draws_parts: bool = False
    regathers_activations: bool = False

    def __post_init__(self) -> None:
        degrees = (self.tensor, self.pipeline, self.data, self.micro_batches, self.virtual)
        if min(degrees) < 1 or self.state_stage not in range(4):
            raise BadInput(
                f"the layout has the degrees {degrees} and the state stage {self.state_stage}",
                expected="degrees of 1 and more, and a stage from 0 to 3",
                remedy="correct the layout",
            )
        if self.shares and (len(self.shares) != self.data or min(self.shares) < 1):
            raise BadInput(
                f"the shares {spelled(self.shares)} do not match {self.data} ranks",
                expected="a whole number above 0 for each rank",
                remedy="write, for example, shares = [2, 1] under "
                f"[[{trade_name(BatchSharding)}]] for two ranks",
            )
        # Equal layouts must compare equal: equal shares become empty, and others are divided by
        # their gcd.
        common = gcd(*self.shares) if len(set(self.shares)) > 1 else 0
        object.__setattr__(self, "shares", tuple(s // common for s in self.shares if common))

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "ParallelLayout":
        """Return the degrees and the shares that follow from these rules, without the schedule."""
        rules = tuple(rules)
        batch = of_kind(rules, BatchSharding)
        return cls(
            data=_most_ranks(batch),
            tensor=_most_ranks(of_kind(rules, TensorSharding)),
            pipeline=_most_ranks(of_kind(rules, PipelineStageEnd)),
            shares=next((rule.shares for rule in batch if rule.shares), ()),
        )

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def portions(self) -> tuple[int, ...]:
        """The number of equal units of the batch that each group has."""
        return self.shares or (1,) * self.data

    def share_of(self, rank: int) -> int:
        return self.portions[self.place(rank, DATA)]

    @property
    def unequal_ranks(self) -> tuple[int, ...]:
        """The first rank of each distinct batch share, the largest share first."""
        sizes = sorted(set(self.portions), reverse=True)
        return tuple(self.portions.index(size) * self.tensor for size in sizes)

    @property
    def units(self) -> int:
        """The number of equal units in the batch; each group takes some."""
        return sum(self.shares) or self.data

    @property
    def axes(self) -> dict[str, int]:
        """The mesh, innermost axis last: the number of ranks along each axis that has several."""
        sizes = {PIPELINE: self.pipeline, DATA: self.data, TENSOR: self.tensor}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def place(self, rank: int, axis: str) -> int:
        """Return the index of a rank along an axis."""
        match axis:
            case "pipeline":
                return rank // (self.data * self.tensor)
            case "data":
                return rank // self.tensor % self.data
        return rank % self.tensor

    @property
    def schedule(self) -> str:
        """The name of the schedule in torch."""
        return "Interleaved1F1B" if self.virtual > 1 else "1F1B"


def spelled(shares: Sequence[int]) -> str:
    """Format shares; if there are many, only the first ones, since the plan contains them all."""
    more = ["..."] if len(shares) > _MOST_SHARES_SHOWN else []
    return " : ".join([*map(str, shares[:_MOST_SHARES_SHOWN]), *more])


def _most_ranks(rules: Iterable[BatchSharding | TensorSharding | PipelineStageEnd]) -> int:
    return max((rule.ranks for rule in rules), default=1)


ALONE = ParallelLayout()
