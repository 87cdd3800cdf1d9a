"""The changes made to a step before any recomputation; each variant has a graph of its own.

Not for choosing among variants: see search.py.
"""

from dataclasses import dataclass, replace

from steelyard.ir.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Variant:
    """A step in ``parts`` micro-batches, with optional chunks and offloaded state.

    ``chunks`` are rules for the whole batch; ``states`` are rules for parameters, gradients and
    optimizer state.
    """

    parts: int = 1
    chunks: tuple[Rule, ...] = ()
    states: tuple[Rule, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of the variant.

        A micro-batch has fewer rows than the batch, so its chunks take fewer slices.
        """
        split = (Rule(trade="accumulate", degree=self.parts),) if self.parts > 1 else ()
        fewer = (replace(r, degree=max(2, round(r.degree / self.parts))) for r in self.chunks)
        return (*split, *fewer, *self.states)

    @property
    def unoffloaded(self) -> "Variant":
        return replace(self, states=())

    @property
    def offloads_in_passes(self) -> bool:
        """True if a pass transfers parameters or gradients; False if only the update does."""
        return any(rule.op != "optimizer" for rule in self.states)

    @property
    def unsplit(self) -> "Variant":
        return replace(self, parts=1)

    @property
    def unchunked(self) -> "Variant":
        return replace(self, chunks=())
