"""How one training step lies on many devices, as the rules of a plan say it.

Not for what each rank then does: that is its program, after all rules were struck.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.core.rules import Rule

# The mesh axis of ranks that hold the same weights and work on different samples.
DATA = "data"
# Trades whose rules say where the step lies, and what goes on while ranks exchange.
LAYOUT_TRADES = frozenset({"shard_batch", "overlap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``batch``: so many ranks share the batch equally, each with a model of its own."""

    batch: int = 1

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "Layout":
        degrees = [rule.degree for rule in rules if rule.trade == "shard_batch"]
        return cls(batch=max(degrees, default=1))

    @property
    def num_ranks(self) -> int:
        return self.batch

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: the number of ranks along each axis that has more than one."""
        return {DATA: self.batch} if self.batch > 1 else {}


ALONE = Layout()
