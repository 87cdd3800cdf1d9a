"""How one training step lies on many devices, as the rules of a plan say it.

Not for what each rank then does: that is its program, after all rules were applied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from steelyard.errors import BadInput
from steelyard.ir.gradient_codec import CODE_TRADES
from steelyard.ir.rule import Rule

# The mesh axis of ranks that hold the same weights and work on different samples, and that of ranks
# which hold parts of the same weights and work on the same samples; and that of ranks which hold
# different layers, and hand samples on.
DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"
_MOST_SPELLED = 8
# Trades whose rules say where the step lies, and what goes on while ranks exchange.
LAYOUT_TRADES = frozenset({
    "shard_tensor", "shard_states", "shard_batch", "shard_pipeline", "sparse_gradients",
    "overlap", "shared_memory_transfer", *CODE_TRADES,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """``batch``: so many groups of ranks share the batch, equally where no ``shares`` say how many
    samples each takes of as many as they add up to; ``tensor``: so many ranks to a group, which
    share tensors of one model. Ranks of a group are neighbours. ``pipeline``: so many ranks hold
    the layers of one model, some each."""

    batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != self.batch or min(self.shares) < 1):
            raise BadInput(
                f"the batch is shared as {spelled(self.shares)} among {self.batch} ranks",
                expected="a share for each rank, each a whole number above 0",
                remedy="write shares = [2, 1] under [[shard_batch]] for two ranks, for example",
            )
        # One way of lying is one value: equal shares go unsaid, others are as small as they can be.
        common = gcd(*self.shares) if len(set(self.shares)) > 1 else 0
        object.__setattr__(self, "shares", tuple(s // common for s in self.shares if common))

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "ParallelLayout":
        rules = tuple(rules)
        return cls(
            batch=_degree(rules, "shard_batch"),
            tensor=_degree(rules, "shard_tensor"),
            pipeline=_degree(rules, "shard_pipeline"),
            shares=next((rule.shares for rule in rules if rule.shares), ()),
        )

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.batch * self.tensor

    @property
    def portions(self) -> tuple[int, ...]:
        """How many units of the batch each of the groups takes."""
        return self.shares or (1,) * self.batch

    def share_of(self, rank: int) -> int:
        return self.portions[self.place(rank, DATA)]

    @property
    def unequal_ranks(self) -> tuple[int, ...]:
        """The first rank of each share of the batch, the largest first."""
        sizes = sorted(set(self.portions), reverse=True)
        return tuple(self.portions.index(size) * self.tensor for size in sizes)

    @property
    def units(self) -> int:
        """Into how many equal units the batch is cut, of which some go to each."""
        return sum(self.shares) or self.batch

    @property
    def axes(self) -> dict[str, int]:
        """The mesh, neighbours last: the number of ranks along each axis that has several."""
        sizes = {PIPELINE: self.pipeline, DATA: self.batch, TENSOR: self.tensor}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def place(self, rank: int, axis: str) -> int:
        """Which of the ranks along this axis it is."""
        match axis:
            case "pipeline":
                return rank // (self.batch * self.tensor)
            case "data":
                return rank // self.tensor % self.batch
        return rank % self.tensor


def spelled(shares: Sequence[int]) -> str:
    """Of many ranks only the first; the plan has them all."""
    more = ["..."] if len(shares) > _MOST_SPELLED else []
    return " : ".join([*map(str, shares[:_MOST_SPELLED]), *more])


def _degree(rules: tuple[Rule, ...], trade: str) -> int:
    return max((rule.degree for rule in rules if rule.trade == trade), default=1)


ALONE = ParallelLayout()
