"""How the ranks of a mixed cluster compare, by what each would take for the whole step alone.

Not for what each takes of the batch: see batch_shares.py.
"""

from dataclasses import replace

from steelyard.hardware.device import Device
from steelyard.ir.program import Program
from steelyard.predict import step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.ranks.batch_shares import speeds_said


class RankSpeeds:
    """Where the costs know one device for all ranks, all of them are alike."""

    def __init__(self, program: Program, costs: CostTable) -> None:
        self._costs = costs
        own = {device: replace(costs, device=device, devices=()) for device in {*costs.devices}}
        self._seconds = {
            device: step_seconds(program, known).value for device, known in own.items()
        }

    def is_alike(self, ranks: int) -> bool:
        """Whether the so many that a step would lie on are of one class."""
        return len({*self._devices(ranks)}) <= 1

    def whole_seconds(self, ranks: int) -> list[float]:
        """The time of the whole step alone, of each rank that a step on so many lies on."""
        if not self._costs.devices:
            return [1.0] * ranks
        return [self._seconds[device] for device in self._devices(ranks)]

    def speed(self, ranks: int) -> float:
        """Of all that a step on so many lies on, beside the fastest of the cluster."""
        if not self._costs.devices:
            return float(ranks)
        return sum(min(self._seconds.values()) / own for own in self.whole_seconds(ranks))

    def said(self, ranks: int) -> str:
        subset = self._costs.subsets.get(ranks)
        return speeds_said(self.whole_seconds(ranks), subset.ranks if subset else ())

    def _devices(self, ranks: int) -> tuple[Device, ...]:
        return self._costs.on(ranks).devices[:ranks]
