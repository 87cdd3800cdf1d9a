"""Times each distinct operator of a step and meters its workspace on the local device, once.

An operator that is timed alone, over and over on the same tensors, finds its inputs in the caches
and may take half the time that it takes in a step. Therefore all operators are timed in turn, in
the order of the step, and before each call its inputs are brought to the cache levels where they
are in the step. The sum of such times differs from the time of a whole step by a few hundredths.
measure/step_calibration.py corrects the rest. Not for storing costs: see measure/cache.py.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from steelyard import _torch
from steelyard.hardware.cluster import Device
from steelyard.ir.analysis.sliced_body import body_workspace_bytes
from steelyard.ir.graph import Graph, Node
from steelyard.ir.metrics import Estimate
from steelyard.measure.cache import CostCache
from steelyard.measure.device_memory import free_bytes, random_devices
from steelyard.measure.malloc import is_kept
from steelyard.measure.operators.cache_warmth import distances, preparation
from steelyard.measure.operators.inputs import Arguments, InputFactory, nbytes_of, shortened
from steelyard.measure.operators.interpolate import declared_from
from steelyard.measure.operators.memory import is_profiled, meter_once
from steelyard.measure.operators.timer import Clock, spread
from steelyard.operators import callable_of
from steelyard.predict.cost_table import CostTable, Missing, OperatorCost, Survey, Unmeasured
from steelyard.units import format_bytes

_MOST_ROUNDS = 15
# Time budget for preparing the operators of a background load.
_BUSY_SECONDS = 10.0
_FEWEST_ROUNDS = 3
# Rounds end early if two halves of them, of this many rounds in all, give the same total time up to
# this share.
_ENOUGH_ROUNDS, _AGREEING = 6, 0.02
# One call to warm up, one to meter, and one timed round; fewer calls are not a measurement.
_FEWEST_CALLS = 3
# Large operators must leave this share of the time budget to the many small, fast ones.
_SHARE_OF_SMALL = 0.2
_SMALL = 0.01
# Rounds that took this long in total have sampled enough of the machine's noise.
_ROUNDS_SECONDS = 2.0
# Shares of the free memory: for the arguments of one group of interleaved operators, and for one
# operator.
_SHARE_OF_GROUP = 0.3
_SHARE_ALONE = 0.6
# More argument bytes than this do not make a round more similar to a step, and take time to fill.
_MOST_GROUP_BYTES = 4 << 30
# Smaller differences are rounding inside the kernel.
_PAGE_BYTES = 4096
# The CUDA caching allocator leaves up to this much of a larger block unsplit.
_GPU_SLACK_BYTES = 1 << 20
# The uncertainty of scaling a few slices up to all: each slice finds the caches in a slightly
# different state.
_PART_SHARE = 0.25
Calls = Callable[[Sequence[str]], Mapping[str, Callable[..., object]]]
# A context in which the others that share this machine run their background load.
BackgroundWork = Callable[[], contextlib.AbstractContextManager[None]]
_COLLECTIVES = ("_c10d_functional.", "steelyard.all_gather")


@dataclass(slots=True, kw_only=True, eq=False)
class _Subject:
    """One distinct operator, represented by one node of its signature."""

    graph: Graph
    node: Node
    position: int
    count: int = 0
    nbytes: int = 0
    ages: tuple[int, ...] = ()
    call: "_BoundCall | None" = None
    workspace_bytes: int = 0
    wall_seconds: float = 0.0
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BoundCall:
    """An operator bound to its arguments, with the cache preparation to run before each call."""

    run: Callable[[], object]
    prepare: Callable[[], None]


def measure_operators(
    graphs: Sequence[Graph],
    device: Device,
    *,
    cache: CostCache | None = None,
    seconds_budget: float = 20.0,
    torch_device: torch.device | None = None,
    is_wanted: Callable[[Node], bool] = lambda _: True,
    calls: Calls = lambda _: {},
    sharers: int = 1,
    hosts: int = 1,
    beside: BackgroundWork = contextlib.nullcontext,
) -> tuple[CostTable, Survey]:
    """Return each operator's cost on ``device``: cached, measured, or otherwise declared.

    ``calls`` makes implementations for signatures that are not torch operators. ``sharers`` ranks
    share the machine, which is one of ``hosts`` hosts.
    """
    begin = time.perf_counter()
    subjects = [s for s in distinct(graphs) if is_wanted(s.node)]
    context = context_of(device, sharers=sharers, hosts=hosts)
    known = cache.read(context, [s.node.signature for s in subjects]) if cache else {}
    new = [s for s in subjects if s.node.signature not in known]
    custom_calls = calls([s.node.signature for s in new])
    # Collectives are not timed here, so they are no reason to start the background load.
    is_timed = any(not s.node.op.startswith(_COLLECTIVES) for s in new)
    with beside() if is_timed else contextlib.nullcontext():
        table = _Table(
            device,
            torch_device or torch.device("cpu"),
            seconds_budget,
            custom_calls,
            sharers=sharers,
        )
        if is_timed and is_profiled(is_quick=True):
            new = table.give_up_timed(new, Missing.PROFILED)
        # An operator that reads offload memory would be run with its operand in device memory. Only
        # a part of it that fits there is measured.
        table.measure([s for s in new if not s.node.is_fetch_matmul])
        table.measure_parts([s for s in new if s.node.body is not None])
    found = cache.settle(context, table.costs) if cache and table.costs else table.costs
    costs = CostTable(device=device, operators={**known, **found})
    nodes = [s.node for s in subjects]
    operators = {**costs.operators, **declared_from(costs, nodes)}
    survey = Survey(
        measured=len(table.costs),
        known=len(known),
        unmeasured=tuple(table.unmeasured),
        seconds=time.perf_counter() - begin,
        notes=(*(cache.notes if cache else ()), *table.notes, *_notes(table.unmeasured)),
    )
    return replace(costs, operators=operators), survey


def make_load(
    graphs: Sequence[Graph], device: Device, *, sharers: int
) -> Callable[[Callable[[], bool]], None] | None:
    """Return a function that runs operators of ``graphs`` as background load until stopped.

    The load repeats the operators with the largest expected share of the step time. The function
    takes a callable, which it polls; the load ends when that returns True. None is returned if
    there is no room for any operator.
    """
    table = _Table(device, torch.device("cpu"), _BUSY_SECONDS, {}, sharers=sharers)
    return table.make_load([s for s in distinct(graphs) if not s.node.is_fetch_matmul])


def distinct(graphs: Sequence[Graph]) -> list[_Subject]:
    """Return one subject for each signature that computes something, in step order."""
    found: dict[str, _Subject] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.is_free or node.is_transfer:
                continue
            subject = found.get(node.signature)
            if subject is None:
                subject = _Subject(graph=graph, node=node, position=len(found))
                subject.nbytes = nbytes_of(graph, node)
                found[node.signature] = subject
            subject.count += 1
    ages = distances(graphs)
    for signature, subject in found.items():
        subject.ages = ages[signature]
    return list(found.values())


def context_of(device: Device, *, sharers: int = 1, hosts: int = 1) -> str:
    """Return the cache context: everything that decides an operator's cost besides its
    signature.
    """
    sharing = f", one of {sharers} at work" if sharers > 1 else ""
    sharing += f", one of {hosts} hosts at work" if hosts > 1 else ""
    return "|".join(
        (
            f"torch {torch.__version__}",
            f"{device.kind}{sharing}",
            f"heap kept {is_kept()}",
            # Gradient codecs now pack their codes into words, so costs of the older byte format
            # must not be reused.
            "codes in words",
            f"threads {torch.get_num_threads()}",
            f"matmul {torch.get_float32_matmul_precision()}",
            f"mkldnn {torch.backends.mkldnn.enabled}",
            f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        )
    )


class _Table:
    """Measures subjects until the deadline, those with the largest expected share of the step
    first.
    """

    def __init__(
        self,
        device: Device,
        torch_device: torch.device,
        seconds_budget: float,
        calls: Mapping[str, Callable[..., object]],
        *,
        sharers: int = 1,
    ) -> None:
        self._calls, self._sharers = calls, sharers
        self._roofline = CostTable(device=device)
        self._device = torch_device
        self._budget = seconds_budget
        self._deadline = time.perf_counter() + seconds_budget
        self._slowness = 1.0
        self._source = InputFactory(torch_device)
        self._clock = Clock(torch_device, is_enqueued_ahead=True)
        self.costs: dict[str, OperatorCost] = {}
        self.unmeasured: list[Unmeasured] = []
        self.notes: list[str] = []

    def measure(self, subjects: list[_Subject]) -> None:
        with _step_conditions(self._device):
            for group in self._groups(subjects):
                ready = [s for s in group if self._prepare(s, group)]
                self._take_turns(sorted(ready, key=lambda s: s.position))
                for subject in ready:
                    subject.call = None

    def make_load(self, subjects: list[_Subject]) -> Callable[[Callable[[], bool]], None] | None:
        with _step_conditions(self._device):
            group = next(self._groups(subjects), [])
            ready = [s for s in group if self._prepare(s, group)]
        calls = [s.call for s in sorted(ready, key=lambda s: s.position) if s.call]

        def work(is_over: Callable[[], bool]) -> None:
            with _step_conditions(self._device):
                for call in itertools.cycle(calls):
                    if is_over():
                        return
                    call.prepare()
                    call.run()

        return work if calls else None

    def _groups(self, subjects: list[_Subject]) -> Iterator[list[_Subject]]:
        """Yield groups of subjects whose arguments fit into memory together, the costliest
        first.
        """
        free = free_bytes(self._device) // self._sharers
        group_bytes = min(int(free * _SHARE_OF_GROUP), _MOST_GROUP_BYTES)
        fitting = [s for s in subjects if self._fits(s, int(free * _SHARE_ALONE))]
        fitting.sort(key=lambda s: -s.count * self._roofline.declared_seconds(s.node).value)
        return _groups(fitting, group_bytes)

    def give_up_timed(self, subjects: Sequence[_Subject], why: Missing) -> list[_Subject]:
        """Give up all subjects except collectives, which are not timed here; return the
        collectives.
        """
        for subject in subjects:
            if not subject.node.op.startswith(_COLLECTIVES):
                self._give_up(subject, why)
        return [s for s in subjects if s.node.op.startswith(_COLLECTIVES)]

    def measure_parts(self, subjects: list[_Subject]) -> None:
        """Measure one or two slices of each sliced operator and scale them up to all slices.

        These are operators that take too long as a whole, or whose operands do not fit into device
        memory as a whole.
        """
        late = {u.signature for u in self.unmeasured if u.why is Missing.NO_TIME}
        for subject in subjects:
            body, signature = subject.node.body, subject.node.signature
            is_transfer = subject.node.is_fetch_matmul
            if body is None or not (is_transfer or signature in late):
                continue
            few = body.parts < 4 and not is_transfer
            part = shortened(subject.graph, subject.node, parts=1 if few else 2)
            part_table = _Table(
                self._roofline.device,
                self._device,
                self._budget,
                self._calls,
                sharers=self._sharers,
            )
            part_table.measure(distinct([part]))
            (node,) = (n for n in part.nodes if n.body is not None)
            cost = part_table.costs.get(node.signature)
            if cost is None or node.body is None:
                continue
            scale = body.rows / node.body.rows
            self.costs[signature] = OperatorCost(
                seconds=Estimate.within(cost.seconds.value * scale, share=_PART_SHARE),
                workspace_bytes=cost.workspace_bytes
                if is_transfer
                else max(cost.workspace_bytes, body_workspace_bytes(body)),
            )
            self.unmeasured = [u for u in self.unmeasured if u.signature != signature]

    def _fits(self, subject: _Subject, most_bytes: int) -> bool:
        if subject.node.op.startswith(_COLLECTIVES):
            self._give_up(subject, Missing.EXCHANGES)
        elif subject.nbytes > most_bytes:
            detail = f"needs {format_bytes(subject.nbytes)}, may use {format_bytes(most_bytes)}"
            self._give_up(subject, Missing.TOO_LARGE, detail)
        else:
            return True
        return False

    def _prepare(self, subject: _Subject, group: list[_Subject]) -> bool:
        """Fill the arguments, then call once to warm up and once to meter; return False on
        failure.
        """
        if not self._has_time_for(subject, group):
            self._give_up(subject, Missing.NO_TIME)
            return False
        try:
            # The first call also builds permanent state of kernels, which is neither timed nor
            # metered.
            subject.call = self._warm_call(subject)
            begin = time.perf_counter()
            metered = meter_once(subject.call.run, device=self._device)
            subject.wall_seconds = time.perf_counter() - begin
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            subject.call = None
            reason = (str(error).strip().splitlines() or [""])[0]
            self._give_up(subject, Missing.FAILED, f"{type(error).__name__}: {reason}"[:200])
            return False
        result = _result_bytes(subject)
        extra = metered.left_bytes - result
        # Result bytes that the graph does not list are allocated at least during the call.
        unknown = extra if extra > self._rounding_bytes(result) else 0
        subject.workspace_bytes = max(0, metered.peak_bytes - metered.left_bytes + unknown)
        if unknown:
            self.notes.append(
                f"results of {subject.node.op} take {format_bytes(extra)} more than the graph "
                "states; a predicted peak may be too low by that much"
            )
        return True

    def _rounding_bytes(self, result_bytes: int) -> int:
        has_slack = self._device.type != "cpu" and result_bytes > _GPU_SLACK_BYTES
        return _GPU_SLACK_BYTES if has_slack else _PAGE_BYTES

    def _has_time_for(self, subject: _Subject, group: list[_Subject]) -> bool:
        """True if one round of this subject and the prepared ones would end before the deadline."""
        declared = self._roofline.declared_seconds(subject.node).value
        ready = [s for s in group if s.wall_seconds]
        pending = sum(s.wall_seconds for s in ready)
        if ready:
            declared_total = sum(self._roofline.declared_seconds(s.node).value for s in ready)
            self._slowness = max(1.0, pending / declared_total)
        needed = _FEWEST_CALLS * declared * self._slowness
        reserved = _SHARE_OF_SMALL if needed > _SMALL * self._budget else 0.0
        return time.perf_counter() + pending + needed < self._deadline - reserved * self._budget

    def _warm_call(self, subject: _Subject) -> _BoundCall:
        graph, node = subject.graph, subject.node
        try:
            call = self._bound_call(subject, self._source.arguments(graph, node))
            results = call.run()
        except RuntimeError:
            # If this fails too, the caller reports it.
            call = self._bound_call(subject, self._source.produced_arguments(graph, node))
            results = call.run()
        if not _layout_matches(results, node):
            self.notes.append(
                f"{node.op} returns results in another layout than the graph states; a predicted "
                "peak may omit a copy of them"
            )
        return call

    def _bound_call(self, subject: _Subject, given: Arguments) -> _BoundCall:
        operator = self._calls.get(subject.node.signature) or callable_of(subject.node)
        inputs = [given.tensors[name] for name in subject.node.inputs]
        return _BoundCall(
            run=lambda: operator(*given.args, **given.kwargs),
            prepare=preparation(list(zip(inputs, subject.ages, strict=True))),
        )

    def _take_turns(self, subjects: list[_Subject]) -> None:
        begin = time.perf_counter()
        for done in range(_MOST_ROUNDS):
            now = time.perf_counter()
            if done >= _FEWEST_ROUNDS and now - begin > _ROUNDS_SECONDS:
                break
            if done >= _ENOUGH_ROUNDS and _difference_of_halves(subjects) <= _AGREEING:
                break
            if done and now > self._deadline:
                break
            for subject in subjects:
                assert subject.call is not None
                subject.call.prepare()
                subject.samples.append(self._clock.seconds(subject.call.run))
        for subject in subjects:
            self.costs[subject.node.signature] = OperatorCost(
                seconds=spread(subject.samples), workspace_bytes=subject.workspace_bytes
            )

    def _give_up(self, subject: _Subject, why: Missing, detail: str = "") -> None:
        self.unmeasured.append(Unmeasured(signature=subject.node.signature, why=why, detail=detail))


def _difference_of_halves(subjects: Sequence[_Subject]) -> float:
    """Return by how much the even and the odd rounds differ, as a share of the time of all
    operators.
    """
    halves = [
        [subject.count * median(subject.samples[first::2]) for subject in subjects]
        for first in (0, 1)
    ]
    difference = sum(abs(even - odd) for even, odd in zip(*halves, strict=True))
    return float(difference / max(sum(map(sum, halves)) / 2, sys.float_info.min))


def _result_bytes(subject: _Subject) -> int:
    """Return the bytes of results that do not alias inputs, according to the graph."""
    graph, node = subject.graph, subject.node
    input_storages = {s for name in node.inputs for s in graph.storages_of(name)}
    return sum(
        graph.storages[s].nbytes for s in graph.storages_of(node.name) if s not in input_storages
    )


def _layout_matches(results: object, node: Node) -> bool:
    """True if the results have the layout that the graph assumes, so that views of them are
    free.
    """
    tensors = [t for t in _torch.tree_leaves(results) if isinstance(t, torch.Tensor)]
    return len(tensors) != len(node.outputs) or all(
        _significant_strides(tuple(real.shape), real.stride())
        == _significant_strides(described.shape, described.stride)
        for real, described in zip(tensors, node.outputs, strict=True)
    )


def _significant_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the strides that affect the address of an element."""
    return [step for size, step in zip(shape, stride) if size > 1] if 0 not in shape else []


def _groups(subjects: list[_Subject], most_bytes: int) -> Iterator[list[_Subject]]:
    """Yield subjects in order, grouped so that the arguments of a group fit into ``most_bytes``."""
    group: list[_Subject] = []
    nbytes = 0
    for subject in subjects:
        if group and nbytes + subject.nbytes > most_bytes:
            yield group
            group, nbytes = [], 0
        group.append(subject)
        nbytes += subject.nbytes
    if group:
        yield group


@contextlib.contextmanager
def _step_conditions(device: torch.device) -> Iterator[None]:
    """Call operators as a step does, and restore the user's random state at the end."""
    devices = random_devices(device)
    with torch.random.fork_rng(devices=devices), torch.no_grad(), _torch.below_autograd():
        yield


def _notes(unmeasured: list[Unmeasured]) -> list[str]:
    notes = []
    for why in Missing:
        if why is Missing.EXCHANGES:
            continue  # the link that carries them was measured
        found = [u for u in unmeasured if u.why is why]
        if found:
            which = found[0].signature[:60] + (f": {found[0].detail}" if found[0].detail else "")
            notes.append(f"{len(found)} operators not measured ({why}), first {which}")
    return notes
