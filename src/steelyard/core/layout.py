"""How one training step lies on many devices, as the rules of a plan say it.

Not for what each rank then does: that is its program, after all rules were struck.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.core.rules import Rule

# The mesh axis of ranks that hold the same weights and work on different samples, and that of ranks
# which hold parts of the same weights and work on the same samples; and that of ranks which hold
# different layers, and hand samples on.
DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"
# Trades whose rules say where the step lies, and what goes on while ranks exchange.
LAYOUT_TRADES = frozenset({
    "shard_tensor", "shard_states", "shard_batch", "shard_pipeline", "overlap",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``batch``: so many groups of ranks share the batch equally; ``tensor``: so many ranks to a
    group, which share tensors of one model. Ranks of a group are neighbours. ``pipeline``: so many
    ranks hold the layers of one model, some each."""

    batch: int = 1
    tensor: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "Layout":
        rules = tuple(rules)
        return cls(
            batch=_degree(rules, "shard_batch"),
            tensor=_degree(rules, "shard_tensor"),
            pipeline=_degree(rules, "shard_pipeline"),
        )

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.batch * self.tensor

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


def _degree(rules: tuple[Rule, ...], trade: str) -> int:
    return max((rule.degree for rule in rules if rule.trade == trade), default=1)


ALONE = Layout()
