"""The changes that are tried if a step does not fit, with their memory and what they cost.

Not for measuring steps: see step_memory.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from steelyard.hardware.device import Device
from steelyard.planner.fit.step_memory import FitStep, MeasuredStep, ModelSizes
from steelyard.plans.memory_fit import UTILIZATION, FitVerdict, Lever
from steelyard.units import format_bytes

# The numbers of devices that are tried.
_DEVICES = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
MICRO_BATCHES = "micro-batches of one sample"
CHECKPOINTING = "activation checkpointing of each block"
_PAYS = {MICRO_BATCHES: "time of smaller operators", CHECKPOINTING: "one more forward pass"}
# How a step can be run, from the cheapest to the most expensive.
_WAYS = ((), (MICRO_BATCHES,), (CHECKPOINTING,), (MICRO_BATCHES, CHECKPOINTING))
_Way = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVariant:
    """Another way to make the step: its name, what it costs, and the function that makes it.

    ``keeps_model``: weights, gradients and state are those of the step.
    """

    name: str
    pays: str
    make: Callable[[], FitStep]
    keeps_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A change to the step. ``step_share`` is the time it adds; None if that is unknown."""

    name: str = ""
    pays: str = ""
    step_share: float | None = 0.0
    offloads_state: bool = False
    keeps_model: bool = True


@dataclass(frozen=True, kw_only=True)
class Levers:
    """The changes to a step; ``whole`` is the step of all devices together."""

    whole: FitStep
    plain: MeasuredStep
    device: Device
    variants: tuple[StepVariant, ...]
    on_progress: Callable[[str], None]
    # By model, samples, and whether activations are recomputed.
    _measured: dict[tuple[int, int | None, bool], MeasuredStep] = field(
        default_factory=dict, init=False
    )

    def tried(self) -> Iterator[Lever]:
        """Yield the changes from the cheapest to the most expensive."""
        plain, capacity = self.plain, self.plain.capacity
        self._measured[_key(plain.step)] = plain
        if plain.need.in_update and capacity.is_gpu:
            yield Lever(
                changes=("the optimizer with fused=True",),
                pays="nothing: it has no temporary results",
                nbytes=plain.with_fused_optimizer().need.nbytes,
            )
        yield from self._ways(plain.step, _Change())
        if plain.levels.state_bytes:
            yield from self._ways(plain.step, self._offload())
        for variant in self.variants:
            self.on_progress(f"trying: {variant.name}")
            change = _Change(name=variant.name, pays=variant.pays, keeps_model=variant.keeps_model)
            yield from self._ways(variant.make().of_each(capacity.count), change)
        for recomputes in (False, True):
            yield from self._more_devices(recomputes=recomputes)

    def _ways(self, step: FitStep, change: _Change) -> Iterator[Lever]:
        """Yield a changed step in the ways of running it, except those that contain one that fits.

        If it cannot fit without activations, only the way with the least memory is measured.
        """
        capacity, enough = self.plain.capacity, list[set[str]]()
        is_possible = capacity.verdict(self._floor(step, change)) is not FitVerdict.DOES_NOT_FIT
        has_samples = (step.num_samples or 0) > 1
        ways = [way for way in _WAYS if has_samples or MICRO_BATCHES not in way]
        for way in ways if is_possible else ways[-1:]:
            changes = tuple(filter(None, (change.name, *way)))
            if not changes or any(found < set(way) for found in enough):
                continue
            measured = self._run(step, way, name=" and ".join(changes))
            nbytes = (measured.without_state() if change.offloads_state else measured).need.nbytes
            if capacity.verdict(nbytes) is FitVerdict.FITS:
                enough.append(set(way))
            yield Lever(
                changes=changes,
                pays="; ".join(filter(None, (change.pays, *(_PAYS[name] for name in way)))),
                nbytes=nbytes,
                step_share=self._step_share(step, way, change.step_share),
            )

    def _floor(self, step: FitStep, change: _Change) -> int:
        if change.keeps_model:
            plain = self.plain
            return (plain.without_state() if change.offloads_state else plain).floor.nbytes
        return -(-ModelSizes.of(step.model).weight_bytes // self.plain.capacity.count)

    def _run(self, step: FitStep, way: _Way, *, name: str) -> MeasuredStep:
        if MICRO_BATCHES in way:
            step = replace(step.with_samples(1), accumulates=True)
        step = replace(step, recomputes=CHECKPOINTING in way)
        key = _key(step)
        if key not in self._measured:
            self.on_progress(f"trying: {name}")
            self._measured[key] = MeasuredStep.of(step, self.plain.capacity)
        return replace(self._measured[key], step=step)

    def _step_share(self, step: FitStep, way: _Way, added: float | None) -> float | None:
        """Return the time that a change and checkpointing add, as a share of the changed step."""
        if added is None or CHECKPOINTING not in way:
            return added or None
        plain = self._measured.get(_key(replace(step, recomputes=False)))
        key = _key(replace(step, recomputes=True))
        recomputed = self._measured.get(key)
        share = None if plain is None or recomputed is None else _recomputed(plain, recomputed)
        return None if share is None else share + added

    def _offload(self) -> _Change:
        """Return the change that keeps the optimizer's state in host memory."""
        state_bytes, link = self.plain.need.state_bytes, self.device.host_link
        pays, share = f"transfers of {format_bytes(state_bytes)} to host memory and back", None
        if link is not None:
            pays += f" over {link.kind}"
            step = step_seconds(self.plain.flops, self.device)
            # Out after an update, and in before the next one.
            moved = 2 * state_bytes / link.bytes_per_second
            share = None if step is None else moved / step
        return _Change(
            name="optimizer state in host memory",
            pays=pays,
            step_share=share,
            offloads_state=True,
        )

    def _more_devices(self, *, recomputes: bool) -> Iterator[Lever]:
        """Yield the smallest number of devices that is enough, if there is one."""
        capacity, kind = self.plain.capacity, self.plain.capacity.kind
        for count in _DEVICES:
            if count <= capacity.count:
                continue
            floor = self.plain.on(count).floor.nbytes
            if capacity.verdict(floor) is FitVerdict.DOES_NOT_FIT:
                continue
            way = (CHECKPOINTING,) if recomputes else ()
            each = self._run(self.whole.of_each(count), way, name=f"{count} x {kind}").on(count)
            needed = each.need.nbytes
            if each.capacity.verdict(needed) is not FitVerdict.FITS:
                continue
            name = f"{count} x {kind} that shard weights, gradients and state (FSDP, ZeRO-3)"
            pays = "devices, and the gathering of weights"
            yield Lever(
                changes=(f"{name}{self._samples_said(count)}", *way),
                pays="; ".join((pays, *(_PAYS[name] for name in way))),
                nbytes=needed,
            )
            return

    def _samples_said(self, count: int) -> str:
        samples = self.whole.num_samples
        if samples is None:
            return ", each with the whole batch"
        each = -(-samples // count)
        return f", {each} sample{'s' if each > 1 else ''} each"


def _key(step: FitStep) -> tuple[int, int | None, bool]:
    # A measured step keeps its model, so that no other one gets its id.
    return id(step.model), step.num_samples, step.recomputes


def _recomputed(plain: MeasuredStep, recomputed: MeasuredStep) -> float | None:
    """Return the FLOPs of the recomputation, as a share of those of the step."""
    before, after = sum(plain.flops.values()), sum(recomputed.flops.values())
    return after / before - 1 if before else None


def step_seconds(flops: Mapping[str, int], device: Device) -> float | None:
    """Return the time of forward and backward pass at a stated share of the device's peaks.

    None if a peak is not declared, or the step has no FLOPs that are counted.
    """
    known = {"float32": device.flops_per_second, **dict(device.peaks)}
    if not flops or device.is_here or any(kind not in known for kind in flops):
        return None
    return sum(count / known[kind] for kind, count in flops.items()) / UTILIZATION
