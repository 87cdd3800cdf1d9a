"""What is done to a step before anything is recomputed; each variant is a graph of its own.

Not for choosing among them: see search.py.
"""

from dataclasses import dataclass, replace

from steelyard.ir.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Variant:
    """The batch in ``parts`` micro-batches; ``streams`` are rules for the whole batch, ``states``
    rules for weights, gradients and what the optimizer keeps."""

    parts: int = 1
    streams: tuple[Rule, ...] = ()
    states: tuple[Rule, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """A micro-batch has fewer rows, and so takes fewer slices."""
        split = (Rule(trade="accumulate", degree=self.parts),) if self.parts > 1 else ()
        fewer = (replace(r, degree=max(2, round(r.degree / self.parts))) for r in self.streams)
        return (*split, *fewer, *self.states)

    @property
    def at_home(self) -> "Variant":
        return replace(self, states=())

    @property
    def moves_in_passes(self) -> bool:
        """Whether more than the update is another: weights or gradients come and go in a pass."""
        return any(rule.op != "optimizer" for rule in self.states)

    @property
    def whole(self) -> "Variant":
        return replace(self, parts=1)

    @property
    def unsliced(self) -> "Variant":
        return replace(self, streams=())
