"""A lower bound on the memory of every plan: the bytes that are resident for the whole step.

It needs no costs and no search, so a budget below it is refused at once. Not for the least memory
that a plan reaches: see search/single/explore.py.
"""

from dataclasses import dataclass

from steelyard.errors import Infeasible
from steelyard.ir.graph import Role
from steelyard.ir.program import Program
from steelyard.plans.budget import Budget
from steelyard.units import format_bytes

# A budget below this was probably written without its unit.
_SMALLEST_LIKELY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The bytes of one training step that no trade on a single device can free.

    All gradients are alive when the backward pass ends, together with the parameters and the
    optimizer state. Offload memory may hold all three, and ranks may hold shards of everything.
    """

    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    gradient_bytes: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, program: Program) -> "Floor":
        """Return the floor of a captured step, including its optimizer's state if that was
        captured.
        """
        graph, update = program.graph, program.update
        return cls(
            parameter_bytes=graph.resident_bytes(Role.PARAMETER),
            buffer_bytes=graph.resident_bytes(Role.BUFFER),
            batch_bytes=graph.resident_bytes(Role.BATCH),
            gradient_bytes=graph.gradient_bytes,
            state_bytes=0 if update is None else update.graph.resident_bytes(Role.STATE),
        )

    @property
    def movable_bytes(self) -> int:
        """The bytes that offload memory may hold instead of device memory."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes

    def least_bytes(self, *, ranks: int = 1, offload_bytes: int = 0) -> int:
        """Return the least bytes on the fullest rank if each rank has ``offload_bytes`` of offload
        memory.
        """
        resident_bytes = max(0, self.movable_bytes // ranks - offload_bytes)
        return resident_bytes + (self.buffer_bytes + self.batch_bytes) // ranks

    def check(self, budget: Budget, *, ranks: int = 1, offload_bytes: int = 0) -> None:
        """Raise Infeasible if the memory budget is below the floor."""
        limit = budget.memory_bytes
        least = self.least_bytes(ranks=ranks, offload_bytes=offload_bytes)
        if limit is None or least <= limit:
            return
        sizes = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.state_bytes,
            "buffers": self.buffer_bytes,
            "the batch": self.batch_bytes,
        }
        listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in sizes.items() if n)
        by_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
        offload_text = (
            f", with {format_bytes(offload_bytes)} in offload memory" if offload_bytes else ""
        )
        raise Infeasible(
            f"no plan fits memory <= {format_bytes(limit)}{by_rank}: memory that is resident for "
            f"the whole step takes at least {format_bytes(least)}{by_rank}{offload_text}, which "
            f"is {format_bytes(least - limit)} more",
            expected=f"at least {format_bytes(least)}, before any activation: {listed}",
            remedy=self._remedy(limit, ranks=ranks, offload_bytes=offload_bytes),
            least_bytes=least,
        )

    def _remedy(self, limit_bytes: int, *, ranks: int, offload_bytes: int) -> str:
        if limit_bytes < _SMALLEST_LIKELY_BYTES < self.least_bytes(ranks=ranks):
            return "write the budget with its unit, such as 2GiB: a number without one is bytes"
        remedies = ["use a smaller model"]
        if self.batch_bytes > self.movable_bytes:
            remedies = ["use a smaller batch"]
        elif self.state_bytes:
            remedies.append("an optimizer with less state")
        if ranks == 1 and not offload_bytes:
            remedies.append("offload memory for weights and optimizer state (--offload-dir)")
            remedies.append("more ranks that each hold a share (--ranks)")
        elif offload_bytes:
            remedies.append("larger offload memory")
        else:
            remedies.append("more ranks")
        return f"allow more memory, or {', '.join(remedies[:-1])} or {remedies[-1]}"
