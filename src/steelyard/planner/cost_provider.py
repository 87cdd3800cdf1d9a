"""Operator costs of a step on this machine: measured, cached, and calibrated against a whole step.

Not for the measurements themselves: see measure/.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, Mismatch
from steelyard.hardware.cluster import Cluster, Link
from steelyard.hardware.host_os import is_virtual, quota_cores
from steelyard.ir.collective import SLOTS, Exchange, Transport
from steelyard.ir.graph import Graph, Node
from steelyard.ir.message_slots import PINNED
from steelyard.ir.metrics import Estimate
from steelyard.ir.optimizer_update import update_digest
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR
from steelyard.ir.program import Pipeline, Program
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.measure.cache import CostCache
from steelyard.measure.device_memory import free_bytes, random_devices
from steelyard.measure.links.background_load import BackgroundLoad
from steelyard.measure.links.probe import Joined, measured_ranks
from steelyard.measure.offload_bandwidth import measured_links
from steelyard.measure.operators.benchmark import Calls, context_of, measure_operators
from steelyard.measure.operators.memory import is_profiled
from steelyard.measure.operators.optimizer_overhead import update_call_seconds
from steelyard.measure.step_calibration import Runnable, host_lead, step_time_ratio, whole_step
from steelyard.predict import collective_curves, peak_bytes
from steelyard.predict.collectives.host_groups import RanksPerHost
from steelyard.predict.cost_table import CostTable, Missing, OperatorCost, Survey
from steelyard.predict.rank_subsets import Subset, best_joined, declared_seconds, numbers_of_ranks
from steelyard.run.codegen import emit
from steelyard.run.compiled.inductor import compile_program
from steelyard.run.launch.environment import rank_info
from steelyard.run.step import LiveStep

Progress = Callable[[str], None]

# Time budget of the calibration against a whole step, and of one calibration for each number of
# micro-batches. If a step takes longer, it is not calibrated.
_CALIBRATION_SECONDS, _SPLIT_CALIBRATION_SECONDS = 12.0, 8.0
_SHARE_OF_FREE_MEMORY = 0.5
# Declared clusters with more devices than this use the first ones in order, without comparing
# subsets.
_MAX_DEVICES_COMPARED = 64
_UNCALIBRATED = Estimate(value=1.0, low=0.8, high=1.25)
# These concatenate the tensors that one collective sends together.
_JOIN = "aten.cat.default"


class CostProvider:
    """The operator costs on this machine: one table that grows with each graph that is measured.

    A search must not compare measured operators with declared ones.
    """

    def __init__(
        self, cluster: Cluster, *, on_progress: Progress, torch_device: torch.device = CPU
    ) -> None:
        self._is_here, self._torch_device = cluster.is_here, torch_device
        self._on_progress = on_progress
        self._cache = CostCache()
        self._operators: dict[str, OperatorCost] = {}
        self._known: set[str] = set()
        self._split_calibrations: dict[int, Estimate] = {}
        # The step time at each number of micro-batches, relative to the undivided step.
        self._split_times: dict[int, Estimate] = {}
        self._update_calls = 0
        # Speed of this host relative to the fastest one: times measured here are scaled by it.
        self._host_speed = 1.0
        self._base: Program
        self.notes: list[str] = []
        # A rank gets its share of the cores; a rank that is alone on a host keeps the user's
        # setting.
        self._threads = cluster.fastest.threads if cluster.ranks_of_a_host > 1 else None
        links: dict[str, Link] = {}
        spread = None
        # Bandwidth of each host's link in bytes per second, if known.
        self.host_rates: tuple[float, ...] = ()
        subsets = _declared_subsets(cluster)
        skew = None
        if cluster.num_devices > 1 and self._is_here:
            on_progress("measuring the links between ranks")
            measured = measured_ranks(
                cluster.num_devices, hosts=cluster.hosts, torch_device=torch_device,
                speeds=cluster.speeds, cache=self._cache,
            )  # fmt: skip
            # Ranks of one machine, or of hosts with one rank each, all have the same distance.
            if measured.near is not None:
                each = cluster.ranks_of_a_host
                spread = RanksPerHost(num_ranks=cluster.num_devices, each=each, near=measured.near)
            links |= dict.fromkeys((DATA, TENSOR), measured.link) | {PIPELINE: measured.handing}
            self.host_rates, skew = measured.host_rates, measured.skew
            subsets = {n: _subset_of(joined) for n, joined in measured.subsets.items()}
            if measured.slots is not None:
                links[PINNED] = measured.slots
            if measured.slotted is not None:
                links[SLOTS] = measured.slotted
            if measured.speeds and not cluster.speeds:
                cluster = cluster.at_speeds(measured.speeds)
            if cluster.hosts > 1 and cluster.speeds:
                own = rank_info(os.environ).rank
                self._host_speed = cluster.speeds[own] / max(cluster.speeds)
        self.cluster = cluster
        self._device = cluster.fastest
        ranks_per_host, hosts = (
            (cluster.ranks_of_a_host, cluster.hosts) if self._is_here else (1, 1)
        )
        if torch_device.type != "cpu":
            # Ranks that have their own GPUs do not slow each other down.
            ranks_per_host = hosts = 1
        self._background_load = BackgroundLoad(ranks_per_host, self._device, hosts=hosts)
        if cluster.offload_memory is not None:
            on_progress("measuring offload memory")
            far_links, notes = measured_links(cluster.offload_memory, cache=self._cache)
            links |= far_links
            self.notes += notes
        self.costs = CostTable(
            device=cluster.fastest,
            devices=cluster.devices,
            operators=self._operators,
            cut_steps=self._split_calibrations,
            links=links,
            far_bytes=cluster.offload_memory.size_bytes if cluster.offload_memory else 0,
            collective_curves=_collective_curves(cluster),
            spread=spread,
            subsets=subsets,
            skew=skew,
            shares_cores=ranks_per_host * hosts > 1 and is_virtual(),
        )
        self._cpu_quota_slowdown = (
            self._slowdown_of_cpu_quota(ranks_per_host) if torch_device.type == "cpu" else 1.0
        )
        uncalibrated = self.costs.whole_step.scaled(self._cpu_quota_slowdown)
        self.costs = replace(self.costs, whole_step=uncalibrated)
        self.compiled_step = self.costs.whole_step
        # Signatures of operators that cannot be called outside of the step.
        self.failed: set[str] = set()

    def _slowdown_of_cpu_quota(self, ranks_per_host: int) -> float:
        """Return the ratio of wall-clock time to CPU time under the CPU quota of this process.

        It exceeds 1 if the control group has less than one core for each rank here and each rank
        runs one thread. Wall-clock measurements already include this effect.
        """
        threads = self._threads or torch.get_num_threads()
        if not self._is_here or threads > 1:
            return 1.0
        slowdown = max(1.0, ranks_per_host / quota_cores())
        if slowdown > 1:
            self.notes.append(
                f"the control group of this process may use {quota_cores():.2g} of the cores: "
                f"computation is predicted to take {slowdown:.2f} times its processor time"
            )
        return slowdown

    def with_link(self, link: Link) -> "CostProvider":
        """Return the same costs with another link between ranks; the two share later
        measurements.
        """
        other = copy.copy(self)
        links = {**self.costs.links, DATA: link, TENSOR: link}
        other.costs = replace(self.costs, links=links)
        return other

    def use_ranks(self, ranks: Sequence[int]) -> None:
        """Price a step on ``len(ranks)`` ranks as a step on these ranks, which a plan file
        names.
        """
        if 1 < len(ranks) < self.cluster.num_devices:
            known = self.costs.subsets.get(len(ranks))
            links = known.links if known is not None else {}
            subset = Subset(ranks=tuple(ranks), links=links)
            subsets = {**self.costs.subsets, len(ranks): subset}
            self.costs = replace(self.costs, subsets=subsets)

    def without_measuring(self) -> "CostProvider":
        """Return the same costs, with measuring disabled; see ``has_costs``."""
        other = copy.copy(self)
        other._is_here = False
        return other

    def has_costs(self, graph: Graph) -> bool:
        """True if every operator of the graph that takes time was measured, or could not be.

        This excludes collectives and the copies that join tensors for them, which are priced by the
        bytes that they move.
        """
        sent = {name for node in graph.nodes if node.collective for name in node.inputs}
        return all(
            node.is_free or node.is_transfer or node.collective or node.waits_for or node.is_packing
            or (node.name in sent and node.op == _JOIN)
            or node.signature in self._known
            for node in graph.nodes
        )  # fmt: skip

    def measure(self, *graphs: Graph, may_lack: bool = False) -> int:
        """Measure the operators of these graphs that are not in the table yet.

        Nothing is measured while a profiler of the user is active. This is an error, unless costs
        ``may_lack``. Return the number of operators without a cost.
        """
        self._background_load.is_given(graphs)
        new = {
            n.signature for g in graphs for n in g.nodes if not n.is_free and not n.is_transfer
        } - self._known
        if not new or not self._is_here:
            return 0
        self._on_progress("measuring operators")
        self._known |= new
        with self.threads_of_rank():
            costs, survey = self._measure_operators(graphs)
        self._operators.update(costs.operators)
        self.failed |= {u.signature for u in survey.unmeasured if u.why is Missing.FAILED}
        profiled = {u.signature for u in survey.unmeasured if u.why is Missing.PROFILED}
        self._known -= profiled
        if profiled and not may_lack:
            raise _profiled(f"{len(profiled)} operators")
        return len(profiled)

    def measure_compiled(self, graph: Graph, calls: Calls) -> None:
        """Measure the kernels in ``calls``, which the compiler generated for this graph.

        Backward calls of convolutions are skipped, because Inductor changes the layouts of their
        arguments: torch 2.13 crashes in the backward pass of a 1x1 convolution with a stride.
        """

        def is_wanted(node: Node) -> bool:
            is_known = node.signature in self._known
            return not is_known and node.op != "aten.convolution_backward.default"

        if not self._is_here or not any(is_wanted(n) for n in graph.nodes if not n.is_free):
            return
        self._on_progress("compiling and measuring kernels")
        with self.threads_of_rank():
            costs, survey = self._measure_operators([graph], is_wanted=is_wanted, calls=calls)
        if count := survey.count(Missing.PROFILED):
            raise _profiled(f"{count} compiled kernels")
        self._operators.update(costs.operators)
        self._known |= costs.operators.keys()

    def _measure_operators(
        self, graphs: Sequence[Graph], **options: Any
    ) -> tuple[CostTable, Survey]:
        """Measure operators, under the background load of as many ranks as the step will have."""
        costs, survey = measure_operators(
            graphs,
            self._device,
            cache=self._cache,
            sharers=self._background_load.num_ranks,
            hosts=self._background_load.hosts,
            beside=self._background_load.at_work,
            torch_device=self._torch_device,
            **options,
        )
        notes = (*survey.notes, *self._background_load.notes)
        self.notes += [note for note in notes if note not in self.notes]
        operators = {
            signature: replace(cost, seconds=cost.seconds.scaled(self._host_speed))
            for signature, cost in costs.operators.items()
        }
        return replace(costs, operators=operators), survey

    def stop_background_load(self) -> None:
        """Stop the background load until the next measurement."""
        self._background_load.dismiss()

    def measure_update(self, make: OptimizerFactory, update: Program) -> None:
        """Measure the optimizer's operators, and its Python overhead between them."""
        self.measure(update.graph)
        if not self._is_here:
            return
        dims = dims_of(update)
        calls = sum(not update.graph.by_name[i.node].is_free for i in update.instructions)
        self._update_calls = calls
        name = f"between the calls of {update_digest(update)}"
        with self.threads_of_rank():
            context = self._context()
            seconds = self._cache.read_whole(context, name)
            if seconds is None:
                if is_profiled(is_quick=True):
                    raise _profiled("the optimizer's step")
                with self._background_load.at_work():
                    seconds = update_call_seconds(
                        make, dims=dims, calls=calls, device=self._torch_device
                    )
                seconds = self._cache.settle_whole(context, name, seconds)
        seconds = seconds.scaled(self._host_speed)
        self.costs = replace(self.costs, update_call_seconds=seconds)

    def check(self, source: CapturedStep, base: Program) -> None:
        """Calibrate the costs against a whole step, if one can be run in reasonable time."""
        self._base = base
        if not self._can_run(source, base):
            return
        whole = self._calibrated(
            source,
            base.graph.fingerprint,
            "calibrating them with a whole step",
            lambda: whole_step(
                self._runnable(source, base),
                seconds_budget=_CALIBRATION_SECONDS,
                device=self._torch_device,
            ),
            operators=self._operator_seconds(base),
            scale=self._host_speed,
        )
        if whole is None:
            return
        self.costs = replace(self.costs, whole_step=whole.scaled(self._cpu_quota_slowdown))
        if self._torch_device.type != "cpu" and self._update_calls:
            self._subtract_overlapped_update(source, base)

    def _subtract_overlapped_update(self, source: CapturedStep, base: Program) -> None:
        """Subtract the optimizer's Python time that overlaps with the backward pass on the GPU."""
        run = self._runnable(source, base).run
        lead = self._calibrated(
            source,
            f"lead of the host in {base.graph.fingerprint}",
            "measuring how far the host runs ahead",
            lambda: host_lead(run, device=self._torch_device),
            operators=1.0,
        )
        if lead is None:
            return
        each, hidden = self.costs.update_call_seconds, lead.value / self._update_calls
        left = Estimate(
            value=max(0.0, each.value - hidden), low=max(0.0, each.low - hidden), high=each.high
        )
        self.costs = replace(self.costs, update_call_seconds=left)

    def check_compiled(self, source: CapturedStep, base: Program, lowered: Program) -> None:
        """Calibrate the costs of the compiled step against a whole compiled step."""
        if not self._can_run(source, lowered):
            return
        found = self._calibrated(
            source,
            f"{base.graph.fingerprint} compiled",
            "compiling a whole step and calibrating them with it",
            lambda: whole_step(
                self._runnable(source, base, lowered=lowered),
                seconds_budget=_CALIBRATION_SECONDS,
                device=self._torch_device,
            ),
            operators=self._operator_seconds(lowered),
            scale=self._host_speed,
        )
        if found is not None:
            self.compiled_step = found.scaled(self._cpu_quota_slowdown)

    @property
    def compiled_costs(self) -> CostTable:
        """The costs of the compiled program, which has a calibration factor of its own."""
        return replace(self.costs, whole_step=self.compiled_step, cut_steps={})

    def are_no_faster(self, cut: Program, whole: Program) -> bool:
        """True if the operators of ``cut`` take at least as long in total as those of ``whole``."""
        return self._operator_seconds(cut) >= self._operator_seconds(whole)

    def check_cut(self, source: CapturedStep, cut: Program) -> None:
        """Calibrate the step in micro-batches against the whole step, once for each number of them.

        A split step may be faster, because its smaller operators stay in the processor's cache. It
        is predicted to be faster only if the gain exceeds the uncertainty of this calibration and
        of that of a coarser split, and only if its operators alone take less time. Once a split is
        slower than a coarser one, finer splits are never predicted to be faster, because the search
        stops there.
        """
        if cut.repeats in self._split_calibrations:
            return
        operator_ratio = self._operator_seconds(cut) / self._operator_seconds(self._base)
        ratio = None
        if self._can_run(source, cut):
            ratio = self._calibrated(
                source,
                f"{cut.repeats} x {cut.graph.fingerprint} beside {self._base.graph.fingerprint}",
                f"calibrating them with a step in {cut.repeats} micro-batches",
                lambda: step_time_ratio(
                    self._runnable(source, cut),
                    self._runnable(source, self._base),
                    seconds_budget=_SPLIT_CALIBRATION_SECONDS,
                    device=self._torch_device,
                ),
                operators=operator_ratio,
            )
        ratio = ratio or _UNCALIBRATED
        times = sorted((p, t) for p, t in self._split_times.items() if p < cut.repeats)
        coarser = [Estimate.exactly(1.0), *(t for _, t in times)]
        is_past_fastest = any(b.value >= a.value for a, b in pairwise(coarser))
        if is_past_fastest or operator_ratio >= 1 or operator_ratio * ratio.high >= coarser[-1].low:
            slower = max(ratio.value, coarser[-1].value / operator_ratio)
            ratio = replace(ratio, value=slower, high=max(ratio.high, slower))
        self._split_times[cut.repeats] = ratio.scaled(operator_ratio)
        self._split_calibrations[cut.repeats] = self.costs.whole_step.times(ratio)

    def _calibrated(
        self,
        source: CapturedStep,
        name: str,
        doing: str,
        run: Callable[[], Estimate | None],
        *,
        operators: float,
        scale: float = 1.0,
    ) -> Estimate | None:
        """Return the ratio of whole-step time to the sum of operator times, scaled by ``scale``.

        ``run`` measures the ratio once, and the cache keeps it, so that two plans of a step and its
        run use the same ratio. The cache stores the step time itself, because more of the
        ``operators`` may be measured the next time.
        """
        with self.threads_of_rank():
            context = self._context()
            found = self._cache.read_whole(context, name)
            if found is None or not found.low:
                if is_profiled(is_quick=True):
                    raise _profiled("a whole step")
                self._on_progress(doing)
                with _restored(source.model, self._torch_device), self._background_load.at_work():
                    ratio = run()
                if ratio is None:
                    return None
                found = self._cache.settle_whole(context, name, ratio.scaled(operators))
        return found.scaled(scale / operators)

    def _context(self) -> str:
        company = self._background_load
        return context_of(self._device, sharers=company.num_ranks, hosts=company.hosts)

    @contextlib.contextmanager
    def threads_of_rank(self) -> Iterator[None]:
        """Run operators within the context with as many threads as a rank has."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _can_run(self, source: CapturedStep, program: Program) -> bool:
        """True if a step can run on the live model without leaving any changes."""
        return (
            self._is_here
            and not source.is_imagined
            and not source.captured().is_grown
            and not _torch.any_hooks(list(source.model.parameters()))
            and self._operator_seconds(program) > 0
            and peak_bytes(program, self.costs)
            < _SHARE_OF_FREE_MEMORY * free_bytes(self._torch_device)
        )

    def _runnable(
        self, source: CapturedStep, program: Program, *, lowered: Program | None = None
    ) -> Runnable:
        """Return the step on the user's model, to be run within ``_restored``; compiled if
        lowered.
        """
        parts = program.repeats
        step = LiveStep(
            source.model,
            program,
            constants=source.captured(micro_batches=parts).constants,
            batch=source.batch,
            reduction=source.reduction().value if parts > 1 else "mean",
            runner=compile_program if lowered else emit,
        )

        def run() -> None:
            step.backward(source.batch)
            step.zero_grad()

        return Runnable(run=run, operator_seconds=self._operator_seconds(lowered or program))

    def _operator_seconds(self, program: Program) -> float:
        nodes = program.graph.by_name
        computed = [nodes[i.node] for i in program.instructions if i.sink is None]
        return program.repeats * sum(self.costs.seconds(node).value for node in computed)


def _profiled(what: str) -> BadInput:
    return BadInput(
        f"a profiler is active, but this plan needs {what} to be measured: measuring would take "
        "the profiler's events, and the profiler would slow down the measurement",
        expected="no torch.profiler that records or warms up while a step is planned",
        remedy="call steelyard.plan() before the profiler is started",
    )


class LazyCosts:
    """The costs of a step, measured on first use.

    ``made`` only measures the operators, which suffices to predict memory, for example in the
    middle of training. ``checked`` also calibrates them against a whole step, which runs on the
    live model.
    """

    def __init__(
        self,
        make: Callable[[], CostProvider],
        check: Callable[[CostProvider], None] = lambda _: None,
    ) -> None:
        self._make, self._check = make, check

    @cached_property
    def made(self) -> CostProvider:
        return self._make()

    @cached_property
    def checked(self) -> CostProvider:
        self._check(self.made)
        return self.made


def _subset_of(joined: Joined) -> Subset:
    links = {}
    if joined.link is not None and joined.handing is not None:
        links = {DATA: joined.link, TENSOR: joined.link, PIPELINE: joined.handing}
    return Subset(ranks=joined.ranks, links=links)


def _collective_curves(cluster: Cluster) -> dict[tuple[str, Exchange, int, int], Link]:
    """Return the collective curves of a declared cluster, for the groups that a step may use.

    The groups are: neighbours that shard tensors, the corresponding ranks of all such groups (which
    share the batch), and ranks of adjacent pipeline stages.
    """
    count = cluster.num_devices
    if count == 1 or cluster.is_here:
        return {}
    # The numbers of ranks that a step may use: see search/ranks/layout_search.py.
    return _curves_on(cluster, {*_divisors(count), *numbers_of_ranks(count), 2})


def _curves_on(
    cluster: Cluster, rank_counts: Collection[int], among: Sequence[int] = ()
) -> dict[tuple[str, Exchange, int, int], Link]:
    """Return the curves for these numbers of ranks, for groups of each size that divides them.

    The ranks are the first ones, or those in ``among``.
    """
    group_sizes: dict[int, set[int]] = {}
    for ranks in rank_counts:
        for stride in _divisors(ranks)[:-1]:
            group_sizes.setdefault(stride, set()).update(_divisors(ranks // stride)[1:])
    found: dict[tuple[str, Exchange, int, int], Link] = {}
    for stride, sizes in group_sizes.items():
        for axis in (DATA, PIPELINE) if stride > 1 else (DATA, PIPELINE, TENSOR):
            found |= collective_curves(
                cluster.tree, axis=axis, numbers=sorted(sizes), stride=stride, among=among
            )
    return found


def _declared_subsets(cluster: Cluster) -> dict[int, Subset]:
    """Return the devices to use for each number of ranks, unless these are simply the first
    ones.
    """
    count = cluster.num_devices
    if not 2 < count <= _MAX_DEVICES_COMPARED or cluster.is_here:
        return {}
    fastest = cluster.fastest.flops_per_second
    devices = [cluster.tree.device_of(rank) for rank in range(count)]
    speeds = [device.flops_per_second / fastest for device in devices]
    groups = best_joined(declared_seconds(cluster.tree), speeds)
    return {
        number: Subset(ranks=group, collective_curves=_curves_on(cluster, [number], group))
        for number, group in groups.items()
        if 1 < number < count and group != tuple(range(number))
    }


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def dims_of(update: Program) -> list[int]:
    """Return the number of dimensions of each updated parameter."""
    gradients = (n for n in update.graph.inputs() if n.name.startswith("gradient:"))
    return [len(n.outputs[0].shape) for n in gradients]


class PricedSource:
    """The step at other batch sizes; each variant is measured as soon as it is captured."""

    def __init__(self, source: CapturedStep, prices: CostProvider) -> None:
        self._source = source
        self._prices = prices
        self._updates: dict[tuple[ShardingChoice, ...], Program] = {}

    @property
    def transport(self) -> Transport:
        return self._source.transport

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        graph = self._source.graph(micro_batches=micro_batches, share=share)
        self._prices.measure(graph)
        # Unequal shares of the batch are not calibrated; they are assumed to behave like the same
        # number of equal shares.
        if micro_batches > 1 and share == 1:
            self._prices.check_cut(self._source, Program.plain(graph).repeated(micro_batches))
        return graph

    def rewritten(self, graph: Graph) -> Graph:
        self._prices.measure(graph)
        for node in graph.nodes:
            if node.body is not None and node.signature in self._prices.failed:
                raise Mismatch(
                    f"the result of {node.path or 'the loss'} cannot be computed in slices",
                    expected="operators that give the same result on some of the rows as on all",
                    remedy="remove the chunk rule from the plan, or plan again",
                )
        return graph

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        return self._source.regions(graph, num_ranks=num_ranks)

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        graph = self._source.in_parts(graph, choice, rank=rank)
        self._prices.measure(graph)
        return graph

    def update_in_parts(self, update: Program, shardings: tuple[ShardingChoice, ...]) -> Program:
        if shardings not in self._updates:
            self._updates[shardings] = self._source.update_in_parts(update, shardings)
            self._prices.measure(self._updates[shardings].graph)
        return self._updates[shardings]

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        found = self._source.in_stages(program, ends=ends, schedule=schedule, num_ranks=num_ranks)
        self._prices.measure(found.stages.graph, *(update.graph for update in found.updates))
        return found

    def divisors(self) -> tuple[int, ...]:
        return self._source.divisors()

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        """Compare the sums of operator times, so that no whole step has to run."""
        cut, whole = (
            self._source.graph(micro_batches=parts, share=share) for parts in (micro_batches, than)
        )
        self._prices.measure(cut, whole)
        programs = (Program.plain(cut).repeated(micro_batches // than), Program.plain(whole))
        return self._prices.are_no_faster(*programs)

    def why_not_split(self) -> str | None:
        return self._source.why_not_split()

    def sharers(self) -> tuple[int, ...]:
        return self._source.sharers()

    def why_not_shared(self) -> str | None:
        return self._source.why_not_shared()

    def leaner_settings(self) -> tuple[str, ...]:
        return self._source.leaner_settings()


@contextlib.contextmanager
def _restored(model: nn.Module, torch_device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and the random state at the end of the context."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=random_devices(torch_device)):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
