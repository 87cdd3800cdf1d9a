"""On which class of device each stage of a layout lies, on a cluster of one class or of several.

Not for what it takes there: see predict/analytic/step.py.
"""

from dataclasses import dataclass

from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.ir.cluster_layout import ClusterLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevice:
    """``stage`` stands for those of its class, or for itself where the next lies on another.

    Ranks of one stage wait for one another, so that of several classes the slowest counts, and
    the smallest memory.
    """

    device: Device
    memory_bytes: int
    stage: int


class StageDevices:
    """Stages take the devices of a cluster in their order."""

    def __init__(self, cluster: Cluster) -> None:
        self._devices = cluster.devices or (cluster.fastest,)
        # The first rank of each class.
        self.first_of = {device: self._devices.index(device) for device in self.classes}
        self._known: dict[tuple[int, int], tuple[StageDevice, ...]] = {}

    @property
    def classes(self) -> tuple[Device, ...]:
        return tuple(dict.fromkeys(self._devices))

    def of(self, layout: ClusterLayout) -> tuple[StageDevice, ...]:
        """Of each stage."""
        if len(self._devices) == 1:
            return (_place(self._devices, 0),) * layout.pipeline
        width = layout.tensor * layout.data
        key = width, layout.pipeline
        if key not in self._known:
            self._known[key] = self._found(width, layout.pipeline)
        return self._known[key]

    def _found(self, width: int, stages: int) -> tuple[StageDevice, ...]:
        own = [
            _place(self._devices[stage * width : (stage + 1) * width], stage)
            for stage in range(stages)
        ]
        first: dict[tuple[Device, int], StageDevice] = {}
        found = []
        for place, following in zip(own, [*own[1:], own[-1]], strict=True):
            of_class = first.setdefault((place.device, place.memory_bytes), place)
            found.append(of_class if following.device == place.device else place)
        return tuple(found)


def _place(devices: tuple[Device, ...], stage: int) -> StageDevice:
    several = dict.fromkeys(devices)
    return StageDevice(
        device=min(several, key=lambda device: device.flops_per_second),
        memory_bytes=min(device.memory_bytes for device in several),
        stage=stage,
    )
