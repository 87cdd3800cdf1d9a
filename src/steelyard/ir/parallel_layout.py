"""The distribution of a training step over devices, as derived from a plan's rules.

Not for the work of each rank: that is its program, after all rules were applied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from steelyard.errors import BadInput
from steelyard.ir.rule import Rule, of_kind, trade_name
from steelyard.ir.rule_kinds import BatchSharding, PipelineStageEnd, TensorSharding

# The mesh axes: data-parallel ranks have the same weights and different samples; tensor-parallel
# ranks have shards of the same weights and the same samples; pipeline-parallel ranks have
# different layers and pass samples on.
DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"
_MOST_SHARES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The degrees of data, tensor and pipeline parallelism.

    ``batch`` groups of ranks share the batch: equally, or with ``shares`` in proportion to these
    numbers. ``tensor`` is the number of ranks in a group, which shard the tensors of one model;
    they are neighbours. ``pipeline`` is the number of ranks that divide the layers of one model.
    """

    batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != self.batch or min(self.shares) < 1):
            raise BadInput(
                f"the shares {spelled(self.shares)} do not match {self.batch} ranks",
                expected="a whole number above 0 for each rank",
                remedy="write, for example, shares = [2, 1] under "
                f"[[{trade_name(BatchSharding)}]] for two ranks",
            )
        # Equal layouts compare equal: equal shares become empty, and others are divided by their
        # gcd.
        common = gcd(*self.shares) if len(set(self.shares)) > 1 else 0
        object.__setattr__(self, "shares", tuple(s // common for s in self.shares if common))

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "ParallelLayout":
        rules = tuple(rules)
        batch = of_kind(rules, BatchSharding)
        return cls(
            batch=_most_ranks(batch),
            tensor=_most_ranks(of_kind(rules, TensorSharding)),
            pipeline=_most_ranks(of_kind(rules, PipelineStageEnd)),
            shares=next((rule.shares for rule in batch if rule.shares), ()),
        )

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.batch * self.tensor

    @property
    def portions(self) -> tuple[int, ...]:
        """The number of batch units of each group."""
        return self.shares or (1,) * self.batch

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
        return sum(self.shares) or self.batch

    @property
    def axes(self) -> dict[str, int]:
        """The mesh, innermost axis last: the number of ranks along each axis that has several."""
        sizes = {PIPELINE: self.pipeline, DATA: self.batch, TENSOR: self.tensor}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def place(self, rank: int, axis: str) -> int:
        """Return the index of a rank along an axis."""
        match axis:
            case "pipeline":
                return rank // (self.batch * self.tensor)
            case "data":
                return rank // self.tensor % self.batch
        return rank % self.tensor


def spelled(shares: Sequence[int]) -> str:
    """Format shares; only the first of many, since the plan has them all."""
    more = ["..."] if len(shares) > _MOST_SHARES_SHOWN else []
    return " : ".join([*map(str, shares[:_MOST_SHARES_SHOWN]), *more])


def _most_ranks(rules: Iterable[BatchSharding | TensorSharding | PipelineStageEnd]) -> int:
    return max((rule.ranks for rule in rules), default=1)


ALONE = ParallelLayout()
