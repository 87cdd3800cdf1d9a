"""How the ranks of a mixed cluster compare, by what each would take for the whole step alone.

Not for what each takes of the batch: see shares.py.
"""

from dataclasses import replace

from steelyard.core.costs import Costs
from steelyard.core.program import Program
from steelyard.predict import step_seconds
from steelyard.search.shares import speeds_said


class Unlike:
    """Where the costs know one device for all ranks, all of them are alike."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._devices = costs.devices
        own = {device: replace(costs, device=device, devices=()) for device in {*costs.devices}}
        seconds = {device: step_seconds(program, known).value for device, known in own.items()}
        self.whole_seconds = [seconds[device] for device in self._devices]

    def is_alike(self, ranks: int) -> bool:
        """Whether the first so many are of one class."""
        return len({*self._devices[:ranks]}) <= 1

    def said(self, ranks: int) -> str:
        return speeds_said(self.whole_seconds[:ranks])
