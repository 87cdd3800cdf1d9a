"""Time the operators of a step and meter their workspace on the device at hand, each once.

An operator timed alone, over and over on the same tensors, runs on a warm cache and may take half
of what it takes in a step. So they are run in turns, in the order of the step, and each input is
first made as warm as it is there: such times add up to whole steps within a few hundredths. What
remains is measure/step_calibration.py's. Not for remembering costs: see cache.py.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from steelyard import _torch
from steelyard.hardware.cluster import Device
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
# To make what operators read that are only to be at work.
_BUSY_SECONDS = 10.0
_FEWEST_ROUNDS = 3
# To warm up, to meter, and one round to be timed: less than this is no measurement.
_FEWEST_CALLS = 3
# The many small operators are cheap to measure; large ones must leave them this share of the time.
_SHARE_OF_SMALL = 0.2
_SMALL = 0.01
# Rounds that took this long together have seen enough of the machine's noise.
_ROUNDS_SECONDS = 2.0
# Of the free memory: the arguments of the operators that take turns, and one operator alone.
_SHARE_TOGETHER = 0.3
_SHARE_ALONE = 0.6
# Arguments beyond this do not make a round more like a step; they only take time to fill.
_MOST_TOGETHER_BYTES = 4 << 30
# Smaller differences are a kernel's own rounding.
_PAGE_BYTES = 4096
# Torch's allocator of a GPU leaves so much of a block beside what was asked for, of what is larger.
_BESIDE_ON_GPU = 1 << 20
# A part of a sliced call, times the rest: what each slice finds in the caches differs a little.
_PART_SHARE = 0.25
Calls = Callable[[Sequence[str]], Mapping[str, Callable[..., object]]]
# Within it the others of as many sharers of this machine are at work.
Beside = Callable[[], contextlib.AbstractContextManager[None]]
_EXCHANGES = ("_c10d_functional.", "steelyard.all_gather")


@dataclass(slots=True, kw_only=True, eq=False)
class _Subject:
    """One distinct operator: a node that stands for all of its signature."""

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
    """One operator on its arguments, and what to do before each call."""

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
    beside: Beside = contextlib.nullcontext,
) -> tuple[CostTable, Survey]:
    """Every operator of ``graphs`` on ``device``: from the cache, measured, or else declared.
    ``calls`` makes, of signatures, what no operator of torch carries out. The machine is of so many
    ``sharers``, and one of so many ``hosts``."""
    begin = time.perf_counter()
    subjects = [s for s in distinct(graphs) if is_wanted(s.node)]
    context = context_of(device, sharers=sharers, hosts=hosts)
    known = cache.read(context, [s.node.signature for s in subjects]) if cache else {}
    new = [s for s in subjects if s.node.signature not in known]
    made = calls([s.node.signature for s in new])
    # Nobody is called to work where exchanges alone are new, which are not timed here.
    is_timed = any(not s.node.op.startswith(_EXCHANGES) for s in new)
    with beside() if is_timed else contextlib.nullcontext():
        table = _Table(
            device, torch_device or torch.device("cpu"), seconds_budget, made, sharers=sharers
        )
        if is_timed and is_profiled(is_quick=True):
            new = table.given_up(new, Missing.PROFILED)
        # What reads offload memory is called with what lies there near: a part of it has room.
        table.measure([s for s in new if not s.node.is_far_product])
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


def busy_with(
    graphs: Sequence[Graph], device: Device, *, sharers: int
) -> Callable[[Callable[[], bool]], None] | None:
    """What carries out the operators of ``graphs`` over and over, those in which most time is
    thought to go, until what it is given says that it is over; None where there is no room for
    any."""
    table = _Table(device, torch.device("cpu"), _BUSY_SECONDS, {}, sharers=sharers)
    return table.busy_with([s for s in distinct(graphs) if not s.node.is_far_product])


def distinct(graphs: Sequence[Graph]) -> list[_Subject]:
    """One subject for each signature that computes, in the order of the step."""
    found: dict[str, _Subject] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.is_free or node.is_far:
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
    """What besides its signature decides what an operator costs."""
    among = f", one of {sharers} at work" if sharers > 1 else ""
    among += f", one of {hosts} hosts at work" if hosts > 1 else ""
    return "|".join(
        (
            f"torch {torch.__version__}",
            f"{device.kind}{among}",
            f"heap kept {is_kept()}",
            # Of gradients: what they took as bytes is remembered otherwise.
            "codes in words",
            f"threads {torch.get_num_threads()}",
            f"matmul {torch.get_float32_matmul_precision()}",
            f"mkldnn {torch.backends.mkldnn.enabled}",
            f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        )
    )


class _Table:
    """Measures subjects until the deadline, those first in which most time is thought to go."""

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
        self._plain = CostTable(device=device)
        self._device = torch_device
        self._budget = seconds_budget
        self._deadline = time.perf_counter() + seconds_budget
        self._slowness = 1.0
        self._source = InputFactory(torch_device)
        self._clock = Clock(torch_device, is_told_ahead=True)
        self.costs: dict[str, OperatorCost] = {}
        self.unmeasured: list[Unmeasured] = []
        self.notes: list[str] = []

    def measure(self, subjects: list[_Subject]) -> None:
        with _undisturbed(self._device):
            for group in self._groups(subjects):
                ready = [s for s in group if self._prepare(s, group)]
                self._take_turns(sorted(ready, key=lambda s: s.position))
                for subject in ready:
                    subject.call = None

    def busy_with(self, subjects: list[_Subject]) -> Callable[[Callable[[], bool]], None] | None:
        with _undisturbed(self._device):
            group = next(self._groups(subjects), [])
            ready = [s for s in group if self._prepare(s, group)]
        calls = [s.call for s in sorted(ready, key=lambda s: s.position) if s.call]

        def work(is_over: Callable[[], bool]) -> None:
            with _undisturbed(self._device):
                for call in itertools.cycle(calls):
                    if is_over():
                        return
                    call.prepare()
                    call.run()

        return work if calls else None

    def _groups(self, subjects: list[_Subject]) -> Iterator[list[_Subject]]:
        """As many together as have room, those first in which most time is thought to go."""
        free = free_bytes(self._device) // self._sharers
        together = min(int(free * _SHARE_TOGETHER), _MOST_TOGETHER_BYTES)
        able = [s for s in subjects if self._is_able(s, int(free * _SHARE_ALONE))]
        able.sort(key=lambda s: -s.count * self._plain.declared_seconds(s.node).value)
        return _groups(able, together)

    def given_up(self, subjects: Sequence[_Subject], why: Missing) -> list[_Subject]:
        """What is left of ``subjects``: exchanges, which are not timed here."""
        for subject in subjects:
            if not subject.node.op.startswith(_EXCHANGES):
                self._give_up(subject, why)
        return [s for s in subjects if s.node.op.startswith(_EXCHANGES)]

    def measure_parts(self, subjects: list[_Subject]) -> None:
        """What is carried out in slices and takes too long as a whole, or never is there whole: a
        slice or two of it."""
        late = {u.signature for u in self.unmeasured if u.why is Missing.NO_TIME}
        for subject in subjects:
            body, signature = subject.node.body, subject.node.signature
            is_far = subject.node.is_far_product
            if body is None or not (is_far or signature in late):
                continue
            few = body.parts < 4 and not is_far
            part = shortened(subject.graph, subject.node, parts=1 if few else 2)
            alone = _Table(
                self._plain.device, self._device, self._budget, self._calls, sharers=self._sharers
            )
            alone.measure(distinct([part]))
            (node,) = (n for n in part.nodes if n.body is not None)
            cost = alone.costs.get(node.signature)
            if cost is None or node.body is None:
                continue
            times = body.rows / node.body.rows
            self.costs[signature] = OperatorCost(
                seconds=Estimate.within(cost.seconds.value * times, share=_PART_SHARE),
                workspace_bytes=cost.workspace_bytes
                if is_far
                else max(cost.workspace_bytes, body.workspace_bytes),
            )
            self.unmeasured = [u for u in self.unmeasured if u.signature != signature]

    def _is_able(self, subject: _Subject, most_bytes: int) -> bool:
        if subject.node.op.startswith(_EXCHANGES):
            self._give_up(subject, Missing.EXCHANGES)
        elif subject.nbytes > most_bytes:
            detail = f"needs {format_bytes(subject.nbytes)}, may use {format_bytes(most_bytes)}"
            self._give_up(subject, Missing.TOO_LARGE, detail)
        else:
            return True
        return False

    def _prepare(self, subject: _Subject, group: list[_Subject]) -> bool:
        """Fill the arguments, call once to warm up, call once to meter; False: given up."""
        if not self._has_time_for(subject, group):
            self._give_up(subject, Missing.NO_TIME)
            return False
        try:
            # The first call also builds what kernels keep for ever: neither timed nor metered.
            subject.call = self._called(subject)
            begin = time.perf_counter()
            metered = meter_once(subject.call.run, device=self._device)
            subject.wall_seconds = time.perf_counter() - begin
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            subject.call = None
            reason = (str(error).strip().splitlines() or [""])[0]
            self._give_up(subject, Missing.FAILED, f"{type(error).__name__}: {reason}"[:200])
            return False
        result = _result_bytes(subject)
        more = metered.left_bytes - result
        # What the graph does not know of a result is at least there while the call lasts.
        unknown = more if more > self._rounding_bytes(result) else 0
        subject.workspace_bytes = max(0, metered.peak_bytes - metered.left_bytes + unknown)
        if unknown:
            self.notes.append(
                f"results of {subject.node.op} hold {format_bytes(more)} more than the graph says;"
                " a predicted peak may be as much too low"
            )
        return True

    def _rounding_bytes(self, result_bytes: int) -> int:
        is_beside = self._device.type != "cpu" and result_bytes > _BESIDE_ON_GPU
        return _BESIDE_ON_GPU if is_beside else _PAGE_BYTES

    def _has_time_for(self, subject: _Subject, group: list[_Subject]) -> bool:
        """Whether it, and a round of those that are ready, would end before the deadline."""
        declared = self._plain.declared_seconds(subject.node).value
        ready = [s for s in group if s.wall_seconds]
        owed = sum(s.wall_seconds for s in ready)
        if ready:
            said = sum(self._plain.declared_seconds(s.node).value for s in ready)
            self._slowness = max(1.0, owed / said)
        needed = _FEWEST_CALLS * declared * self._slowness
        kept = _SHARE_OF_SMALL if needed > _SMALL * self._budget else 0.0
        return time.perf_counter() + owed + needed < self._deadline - kept * self._budget

    def _called(self, subject: _Subject) -> _BoundCall:
        graph, node = subject.graph, subject.node
        try:
            call = self._call_of(subject, self._source.arguments(graph, node))
            results = call.run()
        except RuntimeError:
            # What fails here for good is reported by the caller.
            call = self._call_of(subject, self._source.produced_arguments(graph, node))
            results = call.run()
        if not _lie_as_described(results, node):
            self.notes.append(
                f"{node.op} lays its results out otherwise than the graph says; a predicted peak"
                " may lack a copy of them"
            )
        return call

    def _call_of(self, subject: _Subject, given: Arguments) -> _BoundCall:
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


def _result_bytes(subject: _Subject) -> int:
    """What the graph says the call leaves behind: its results, less those that lie on inputs."""
    graph, node = subject.graph, subject.node
    given = {s for name in node.inputs for s in graph.storages_of(name)}
    return sum(graph.storages[s].nbytes for s in graph.storages_of(node.name) if s not in given)


def _lie_as_described(results: object, node: Node) -> bool:
    """Whether views of the results are what the graph takes them for: free."""
    made = [t for t in _torch.tree_leaves(results) if isinstance(t, torch.Tensor)]
    return len(made) != len(node.outputs) or all(
        _steps(tuple(real.shape), real.stride()) == _steps(said.shape, said.stride)
        for real, said in zip(made, node.outputs, strict=True)
    )


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The strides that say where an element lies."""
    return [step for size, step in zip(shape, stride) if size > 1] if 0 not in shape else []


def _groups(subjects: list[_Subject], most_bytes: int) -> Iterator[list[_Subject]]:
    """Subjects in their order, as many together as their arguments fit into ``most_bytes``."""
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
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Call operators as a step does, and leave the user's random stream where it was."""
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
