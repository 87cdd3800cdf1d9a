"""Operator costs of a step on this machine: measured, cached, and calibrated against a whole step.

Not for the measurements themselves: see measure/. Not for running whole steps: see calibration.py.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.comm.devices import CPU
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Cluster, Link
from steelyard.hardware.host_os import is_virtual, quota_cores
from steelyard.ir.collective import SLOTS
from steelyard.ir.graph import Graph, Node
from steelyard.ir.message_slots import PINNED
from steelyard.ir.metrics import Estimate
from steelyard.ir.optimizer_update import update_digest
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR
from steelyard.ir.program import Program
from steelyard.measure.cache import CostCache
from steelyard.measure.conditions import MeasuringConditions, profiler_error
from steelyard.measure.links.background_load import BackgroundLoad
from steelyard.measure.links.link_figures import Joined
from steelyard.measure.links.probe import measured_ranks
from steelyard.measure.offload_bandwidth import measured_links
from steelyard.measure.operators.benchmark import Calls, measure_operators
from steelyard.measure.operators.memory import is_profiled
from steelyard.measure.operators.optimizer_overhead import update_call_seconds
from steelyard.planner.calibration import StepCalibration, operator_seconds
from steelyard.predict import micro_batch_overhead
from steelyard.predict.collectives.host_groups import RanksPerHost
from steelyard.predict.cost_table import CostTable, Missing, OperatorCost, Survey
from steelyard.predict.declared_curves import declared_curves, declared_subsets
from steelyard.predict.rank_subsets import Subset
from steelyard.run.launch.environment import rank_info

Progress = Callable[[str], None]

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
        self._is_here = cluster.is_here
        self._on_progress = on_progress
        cache = CostCache()
        self._operators: dict[str, OperatorCost] = {}
        self._known: set[str] = set()
        self._split_calibrations: dict[int, Estimate] = {}
        # The step time at each number of micro-batches, relative to the undivided step.
        self._split_times: dict[int, Estimate] = {}
        self._update_calls = 0
        host_speed = 1.0
        self._base: Program
        self.notes: list[str] = []
        # A rank gets its share of the cores; a rank that is alone on a host keeps the user's
        # setting.
        threads = cluster.fastest.threads if cluster.ranks_of_a_host > 1 else None
        links: dict[str, Link] = {}
        spread = None
        # Bandwidth of each host's link in bytes per second, if known.
        self.host_rates: tuple[float, ...] = ()
        subsets = declared_subsets(cluster)
        skew = None
        if cluster.num_devices > 1 and self._is_here:
            on_progress("measuring the links between ranks")
            measured = measured_ranks(
                cluster.num_devices, hosts=cluster.hosts, torch_device=torch_device,
                speeds=cluster.speeds, cache=cache,
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
                host_speed = cluster.speeds[own] / max(cluster.speeds)
        self.cluster = cluster
        ranks_per_host, hosts = (
            (cluster.ranks_of_a_host, cluster.hosts) if self._is_here else (1, 1)
        )
        if torch_device.type != "cpu":
            # Ranks that have their own GPUs do not slow each other down.
            ranks_per_host = hosts = 1
        self._conditions = MeasuringConditions(
            device=cluster.fastest,
            torch_device=torch_device,
            cache=cache,
            load=BackgroundLoad(ranks_per_host, cluster.fastest, hosts=hosts),
            threads=threads,
            host_speed=host_speed,
        )
        self._calibration = StepCalibration(self._conditions, on_progress=on_progress)
        if cluster.offload_memory is not None and cluster.offload_memory.is_host:
            host_link = cluster.device.host_link
            assert host_link is not None, "host memory is known only with its link"
            links |= dict.fromkeys((OFFLOAD_OUT, OFFLOAD_IN), host_link)
        elif cluster.offload_memory is not None:
            on_progress("measuring offload memory")
            offload_links, notes = measured_links(cluster.offload_memory, cache=cache)
            links |= offload_links
            self.notes += notes
        self.costs = CostTable(
            device=cluster.fastest,
            devices=cluster.devices,
            operators=self._operators,
            cut_steps=self._split_calibrations,
            links=links,
            offload_bytes=cluster.offload_memory.size_bytes if cluster.offload_memory else 0,
            collective_curves=declared_curves(cluster),
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
        threads = self._conditions.threads or torch.get_num_threads()
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
        may be missing (``may_lack``). Return the number of operators without a cost.
        """
        self._conditions.load.is_given(graphs)
        new = {
            n.signature for g in graphs for n in g.nodes if not n.is_free and not n.is_transfer
        } - self._known
        if not new or not self._is_here:
            return 0
        self._on_progress(f"measuring {len(new)} operators")
        self._known |= new
        with self._conditions.threads_of_rank():
            costs, survey = self._measure_operators(graphs)
        self._operators.update(costs.operators)
        self.failed |= {u.signature for u in survey.unmeasured if u.why is Missing.FAILED}
        profiled = {u.signature for u in survey.unmeasured if u.why is Missing.PROFILED}
        self._known -= profiled
        if profiled and not may_lack:
            raise profiler_error(f"{len(profiled)} operators")
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
        with self._conditions.threads_of_rank():
            costs, survey = self._measure_operators([graph], is_wanted=is_wanted, calls=calls)
        if count := survey.count(Missing.PROFILED):
            raise profiler_error(f"{count} compiled kernels")
        self._operators.update(costs.operators)
        self._known |= costs.operators.keys()

    def _measure_operators(
        self, graphs: Sequence[Graph], **options: Any
    ) -> tuple[CostTable, Survey]:
        """Measure operators, under the background load of as many ranks as the step will have."""
        costs, survey = measure_operators(
            graphs,
            self._conditions.device,
            cache=self._conditions.cache,
            sharers=self._conditions.load.num_ranks,
            hosts=self._conditions.load.hosts,
            beside=self._conditions.load.at_work,
            torch_device=self._conditions.torch_device,
            **options,
        )
        notes = (*survey.notes, *self._conditions.load.notes)
        self.notes += [note for note in notes if note not in self.notes]
        operators = {
            signature: replace(cost, seconds=cost.seconds.scaled(self._conditions.host_speed))
            for signature, cost in costs.operators.items()
        }
        return replace(costs, operators=operators), survey

    def stop_background_load(self) -> None:
        """Stop the background load until the next measurement."""
        self._conditions.load.dismiss()

    def threads_of_rank(self) -> contextlib.AbstractContextManager[None]:
        """Run operators within the context with as many threads as a rank has."""
        return self._conditions.threads_of_rank()

    def measure_update(self, make: OptimizerFactory, update: Program) -> None:
        """Measure the optimizer's operators, and its Python overhead between them."""
        self.measure(update.graph)
        if not self._is_here:
            return
        dims = dims_of(update)
        calls = sum(not update.graph.by_name[i.node].is_free for i in update.instructions)
        self._update_calls = calls
        name = f"between the calls of {update_digest(update)}"
        with self._conditions.threads_of_rank():
            context = self._conditions.context()
            seconds = self._conditions.cache.read_whole(context, name)
            if seconds is None:
                if is_profiled(is_quick=True):
                    raise profiler_error("the optimizer's step")
                with self._conditions.load.at_work():
                    seconds = update_call_seconds(
                        make, dims=dims, calls=calls, device=self._conditions.torch_device
                    )
                seconds = self._conditions.cache.settle_whole(context, name, seconds)
        seconds = seconds.scaled(self._conditions.host_speed)
        self.costs = replace(self.costs, update_call_seconds=seconds)

    def check(self, source: CapturedStep, base: Program) -> None:
        """Calibrate the costs against a whole step, if one can be run in reasonable time."""
        self._base = base
        if not self._is_here:
            return
        whole = self._calibration.whole_ratio(source, base, self.costs)
        if whole is None:
            return
        self.costs = replace(self.costs, whole_step=whole.scaled(self._cpu_quota_slowdown))
        if self._conditions.torch_device.type != "cpu" and self._update_calls:
            self._subtract_overlapped_update(source, base)

    def _subtract_overlapped_update(self, source: CapturedStep, base: Program) -> None:
        """Subtract the optimizer's Python time that overlaps with the backward pass on the GPU."""
        lead = self._calibration.host_lead(source, base, self.costs)
        if lead is None:
            return
        each, hidden = self.costs.update_call_seconds, lead.value / self._update_calls
        left = Estimate(
            value=max(0.0, each.value - hidden), low=max(0.0, each.low - hidden), high=each.high
        )
        self.costs = replace(self.costs, update_call_seconds=left)

    def check_compiled(self, source: CapturedStep, base: Program, lowered: Program) -> None:
        """Calibrate the costs of the compiled step against a whole compiled step."""
        if not self._is_here:
            return
        found = self._calibration.compiled_ratio(source, base, lowered, self.costs)
        if found is not None:
            self.compiled_step = found.scaled(self._cpu_quota_slowdown)

    @property
    def compiled_costs(self) -> CostTable:
        """The costs of the compiled program, which has a calibration factor of its own."""
        return replace(self.costs, whole_step=self.compiled_step, cut_steps={})

    def are_no_faster(self, cut: Program, whole: Program) -> bool:
        """True if the operators of ``cut`` take at least as long in total as those of ``whole``."""
        return operator_seconds(cut, self.costs) >= operator_seconds(whole, self.costs)

    def is_split_known(self, cut: Program) -> bool:
        """True if a calibration of the step in micro-batches is known, maybe from the cache."""
        return cut.repeats in self._split_times or (
            self._is_here and self._calibration.is_split_known(cut, self._base)
        )

    def estimate_cut(self, cut: Program) -> None:
        """Estimate the time of a step in micro-batches until it is calibrated.

        Operators on smaller tensors, timed alone, find more of them in the caches than in a step.
        So the step counts as no faster than the whole batch, or than coarser splits.
        """
        if cut.repeats in self._split_calibrations:
            return
        whole = operator_seconds(self._base, self.costs)
        overhead = (cut.repeats - 1) * micro_batch_overhead(self._base, self.costs)
        coarser = [time.value for parts, time in self._split_times.items() if parts < cut.repeats]
        least = max([whole + overhead, *(whole * time for time in coarser)])
        ratio = max(1.0, least / operator_seconds(cut, self.costs))
        self._split_calibrations[cut.repeats] = self.costs.whole_step.scaled(ratio)

    def check_cut(self, source: CapturedStep, cut: Program) -> None:
        """Calibrate the step in micro-batches against the whole step, once for each number of them.

        A split step may be faster, because its smaller operators stay in the processor's cache. It
        is predicted to be faster only if the gain exceeds the uncertainty of this calibration and
        of that of a coarser split, and only if its operators alone take less time. Once a split is
        slower than a coarser one, finer splits are never predicted to be faster, because the search
        stops there.
        """
        if cut.repeats in self._split_times:
            return
        operator_ratio = operator_seconds(cut, self.costs) / operator_seconds(
            self._base, self.costs
        )
        ratio = None
        if self._is_here:
            ratio = self._calibration.split_ratio(source, cut, self._base, self.costs)
        ratio = ratio or _UNCALIBRATED
        times = sorted((p, t) for p, t in self._split_times.items() if p < cut.repeats)
        coarser = [Estimate.exactly(1.0), *(t for _, t in times)]
        is_past_fastest = any(b.value >= a.value for a, b in pairwise(coarser))
        if is_past_fastest or operator_ratio >= 1 or operator_ratio * ratio.high >= coarser[-1].low:
            slower = max(ratio.value, coarser[-1].value / operator_ratio)
            ratio = replace(ratio, value=slower, high=max(ratio.high, slower))
        self._split_times[cut.repeats] = ratio.scaled(operator_ratio)
        self._split_calibrations[cut.repeats] = self.costs.whole_step.times(ratio)


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


def dims_of(update: Program) -> list[int]:
    """Return the number of dimensions of each updated parameter."""
    gradients = (n for n in update.graph.inputs() if n.name.startswith("gradient:"))
    return [len(n.outputs[0].shape) for n in gradients]
