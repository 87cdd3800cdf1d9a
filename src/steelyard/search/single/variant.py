"""The changes made to a step before any recomputation; each variant has a graph of its own.

Not for choosing among variants: see search.py.
"""

from dataclasses import dataclass, replace

from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import MicroBatches, SlicedComputation, StateOffload


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Variant:
    """A step in micro-batches, with optional chunks, offloaded state and other graph changes.

    ``split`` is empty for the whole batch. ``chunks`` are rules for the whole batch; ``states`` are
    rules for parameters, gradients and optimizer state. ``changes`` are the rules of trades about
    which the search knows nothing else.
    """

    split: tuple[MicroBatches, ...] = ()
    chunks: tuple[SlicedComputation, ...] = ()
    states: tuple[StateOffload, ...] = ()
    changes: tuple[Rule, ...] = ()

    @property
    def parts(self) -> int:
        """The number of micro-batches."""
        return self.split[0].micro_batches if self.split else 1

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of the variant.

        A micro-batch has fewer rows than the batch, so its chunks take fewer slices.
        """
        fewer = (replace(r, slices=max(2, round(r.slices / self.parts))) for r in self.chunks)
        return (*self.split, *self.changes, *fewer, *self.states)

    @property
    def unoffloaded(self) -> "Variant":
        return replace(self, states=())

    @property
    def offloads_in_passes(self) -> bool:
        """True if a pass transfers parameters or gradients; False if only the update does."""
        return any(rule.what != "optimizer" for rule in self.states)

    @property
    def unsplit(self) -> "Variant":
        return replace(self, split=())

    @property
    def unchunked(self) -> "Variant":
        return replace(self, chunks=())

    @property
    def unchanged(self) -> "Variant":
        return replace(self, changes=())


# The step without changes.
PLAIN = Variant()
