"""The relative speeds of the ranks of a heterogeneous cluster, from their time for a whole step.

Not for the share of the batch that each rank gets: see batch_shares.py.
"""

from dataclasses import replace

from steelyard.hardware.device import Device
from steelyard.ir.program import Program
from steelyard.predict import step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.ranks.batch_shares import describe_speeds


class RankSpeeds:
    """The predicted seconds of the whole step on each class of device.

    If the costs name no devices for the ranks, all ranks are equally fast.
    """

    def __init__(self, program: Program, costs: CostTable) -> None:
        self._costs = costs
        own = {device: replace(costs, device=device, devices=()) for device in {*costs.devices}}
        self._seconds = {
            device: step_seconds(program, known).value for device, known in own.items()
        }

    def is_homogeneous(self, ranks: int) -> bool:
        """True if a step on this many ranks uses only ranks with the same class of device."""
        return len({*self._devices(ranks)}) <= 1

    def full_step_seconds(self, ranks: int) -> list[float]:
        """Return the seconds of the whole step on each of the ranks that a step on ``ranks`` ranks
        uses.
        """
        if not self._costs.devices:
            return [1.0] * ranks
        return [self._seconds[device] for device in self._devices(ranks)]

    def speed(self, ranks: int) -> float:
        """Return the total speed of these ranks, in units of the fastest device of the cluster."""
        if not self._costs.devices:
            return float(ranks)
        return sum(min(self._seconds.values()) / own for own in self.full_step_seconds(ranks))

    def describe(self, ranks: int) -> str:
        subset = self._costs.subsets.get(ranks)
        return describe_speeds(self.full_step_seconds(ranks), subset.ranks if subset else ())

    def _devices(self, ranks: int) -> tuple[Device, ...]:
        return self._costs.on(ranks).devices[:ranks]
