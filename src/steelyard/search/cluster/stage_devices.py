"""The device of each pipeline stage, on homogeneous and heterogeneous clusters.

Not for the cost of a stage on its device: see predict/analytic/step.py.
"""

from dataclasses import dataclass

from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.ir.parallel_layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevice:
    """The device class that determines the speed and the memory of a stage.

    Ranks of one stage wait for one another. If they have several classes of device, the slowest
    device and the smallest memory decide. ``stage`` is the first stage of the same class, or the
    stage itself if the next stage has another class.
    """

    device: Device
    memory_bytes: int
    stage: int


class StageDevices:
    """The devices of stages, which are assigned in the order of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._devices = cluster.devices or (cluster.fastest,)
        # The first rank of each class.
        self.first_of = {device: self._devices.index(device) for device in self.classes}
        self._cache: dict[tuple[int, int], tuple[StageDevice, ...]] = {}

    @property
    def classes(self) -> tuple[Device, ...]:
        return tuple(dict.fromkeys(self._devices))

    def of(self, layout: ParallelLayout) -> tuple[StageDevice, ...]:
        """Return the device of each stage of ``layout``."""
        if len(self._devices) == 1:
            return (_stage_device(self._devices, 0),) * layout.pipeline
        width = layout.tensor * layout.data
        key = width, layout.pipeline
        if key not in self._cache:
            self._cache[key] = self._assigned(width, layout.pipeline)
        return self._cache[key]

    def _assigned(self, width: int, stages: int) -> tuple[StageDevice, ...]:
        stages_devices = [
            _stage_device(self._devices[stage * width : (stage + 1) * width], stage)
            for stage in range(stages)
        ]
        first_of_class: dict[tuple[Device, int], StageDevice] = {}
        chosen = []
        for device, following in zip(
            stages_devices, [*stages_devices[1:], stages_devices[-1]], strict=True
        ):
            representative = first_of_class.setdefault((device.device, device.memory_bytes), device)
            chosen.append(representative if following.device == device.device else device)
        return tuple(chosen)


def _stage_device(devices: tuple[Device, ...], stage: int) -> StageDevice:
    classes = dict.fromkeys(devices)
    return StageDevice(
        device=min(classes, key=lambda device: device.flops_per_second),
        memory_bytes=min(device.memory_bytes for device in classes),
        stage=stage,
    )
