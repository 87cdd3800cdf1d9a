"""Plans for several devices that are only declared: the step is captured, and nothing is measured.

This module only connects capture -> search -> plan. Not for plans that run on this machine: see
planner.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch

from steelyard.capture.deep.batch_template import TruncatedStep
from steelyard.errors import Infeasible
from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.batch_template import BatchTemplate
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.planner.gradient_compression import note_on_accuracy, refuse_unprobed
from steelyard.planner.plan_notes import batch_size_note
from steelyard.planner.session import PlanRequest
from steelyard.plans.budget import Budget, Minimize
from steelyard.plans.plan import Decisions, NextCent, Plan, Target
from steelyard.plans.plan_check import DECOMPOSITIONS
from steelyard.predict.cost_table import CostTable
from steelyard.predict.missing_flops import refuse_uncounted
from steelyard.search import (
    ALIKE,
    ClusterPlan,
    ClusterSearch,
    RecomputeSet,
    explain_plan,
    recompute_sets,
    to_rules,
)
from steelyard.search.cluster.from_rules import RuleContext, from_rules
from steelyard.search.cluster.uncertainty import error_sentences, rivals, rivals_note
from steelyard.trades import TRADES
from steelyard.trades.recompute import recomputable
from steelyard.units import format_bytes, format_seconds, format_share

_SEQUENCE_PARALLEL = (
    "tensor-parallel layouts are priced with sequence parallelism, as Megatron-LM and torchtitan "
    "run them, and without overlap of their exchanges with products (--tp-comm-overlap, async TP)"
)
# How much more memory is tried to find the marginal saving, as a share of a rank's memory limit.
_MORE_MEMORY_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, eq=False)
class DeclaredClusterPlanner:
    """Plans one step on a cluster that is only declared."""

    request: PlanRequest

    @cached_property
    def step(self) -> TruncatedStep:
        request = self.request
        request.on_progress("capturing the step")
        return TruncatedStep(
            model=request.model, loss=request.loss, batch=request.batch, optimizer=request.optimizer
        )

    @cached_property
    def search(self) -> ClusterSearch:
        refuse_uncounted([self.step.whole.graph])
        return ClusterSearch(
            self.step, self.request.cluster, find_recompute_sets=self._recompute_sets
        )

    def _recompute_sets(self, template: BatchTemplate, costs: CostTable) -> Sequence[RecomputeSet]:
        graph = template.graph
        return recompute_sets(graph, costs, self.step.blocks, values=recomputable(graph))

    def best(self, budget: Budget, num_ranks: int) -> ClusterPlan:
        """Return the fastest plan on ``num_ranks`` devices; raise Infeasible if none fits."""
        limit = self.search.limit_bytes(budget)
        bound = budget.step_seconds
        found = self.search.fastest(num_ranks, limit, most_seconds=bound or inf)
        if found is None:
            raise self._too_small(num_ranks, limit)
        if bound is not None and found.step.step_seconds > bound:
            raise Infeasible(
                f"no plan on {num_ranks} devices has a step time <= {format_seconds(bound)}: the "
                f"fastest takes ~{format_seconds(found.step.step_seconds)}",
                expected=f"at least ~{format_seconds(found.step.step_seconds)}",
                remedy="allow a longer step, or declare more or faster devices",
            )
        return found

    def fewest(self, budget: Budget) -> ClusterPlan:
        """Return the plan on the fewest devices that fits the budget."""
        search, most = self.search, self.request.cluster.num_devices
        limit, bound = search.limit_bytes(budget), budget.step_seconds
        for num_ranks in range(search.fewest_ranks(limit), most + 1):
            candidates = search.candidates(num_ranks)
            if candidates and (bound is None or candidates[0].least_seconds <= bound):
                found = search.fastest(num_ranks, limit, most_seconds=bound or inf)
                if found is not None and (bound is None or found.step.step_seconds <= bound):
                    return found
        return self.best(budget, most)

    def _too_small(self, num_ranks: int, limit: int) -> Infeasible:
        least = self.search.leanest_bytes(num_ranks)
        if least is None:
            return Infeasible(
                f"no layout on {num_ranks} devices divides the {self.step.num_samples} samples of "
                f"the batch and the {self.search.num_blocks} blocks of the model",
                expected="a number of devices that is a product of divisors of both",
                remedy="declare another number of devices, or use another batch",
            )
        needed_bytes = max(least, limit + 1)
        return Infeasible(
            f"no plan fits {format_bytes(limit)} on each of {num_ranks} devices: the step needs "
            f"more than ~{format_bytes(needed_bytes)}",
            expected="a layout whose fullest rank fits in the memory of a device",
            remedy="declare more devices or larger ones, or use a smaller batch or model"
            + self._why_not_split(),
            least_bytes=needed_bytes,
        )

    def _why_not_split(self) -> str:
        why = self.search.why_indivisible
        return f" (it cannot be split into micro-batches: {why})" if why else ""

    def target(self) -> Target:
        graph, cluster = self.step.whole.graph, self.request.cluster
        return Target(
            model=graph.model_fingerprint,
            graph=graph.fingerprint,
            decomposition=DECOMPOSITIONS["python"][0],
            runner="python",
            cluster=cluster.fingerprint,
            ranks=cluster.num_devices,
            declared=cluster.declared,
            torch=torch.__version__.partition("+")[0],
            batch=self.step.entries,
        )

    def plan(self, budget: Budget, minimize: Minimize | None) -> tuple[Plan, ClusterPlan]:
        """Return the fastest plan on all devices, or a plan on the fewest, with its cluster
        layout.
        """
        most = self.request.cluster.num_devices
        chosen = self.fewest(budget) if minimize else self.best(budget, most)
        return self._plan(chosen, budget, minimize), chosen

    def predict(self, decisions: Decisions) -> tuple[Plan, ClusterPlan]:
        """Predict the decisions of a plan file on this step; there is no search."""
        step, limit = self.step, self.search.limit_bytes(decisions.budget)
        chosen = from_rules(
            decisions.rules,
            self.search,
            RuleContext(
                graph=step.whole.graph,
                blocks=step.blocks,
                num_samples=step.num_samples,
                regions=step.regions,
                trades=TRADES,
            ),
        )
        notes = [*self._rate_notes(chosen), *self._batch_note(chosen)]
        if chosen.step.peak_bytes > limit:
            notes.append(
                f"does not fit: predicted {format_bytes(chosen.step.peak_bytes)}, limit "
                f"{format_bytes(limit)} a rank"
            )
        plan = Plan(
            title=self._title(chosen),
            decisions=decisions,
            before=self.search.on_one(),
            unplanned=self.search.on_one(),
            predicted=self.search.prediction(chosen),
            notes=tuple(notes),
        )
        return plan, chosen

    def _plan(self, chosen: ClusterPlan, budget: Budget, minimize: Minimize | None) -> Plan:
        step, search = self.step, self.search
        limit = search.limit_bytes(budget)
        regions = step.regions(chosen.layout.tensor) if chosen.layout.tensor > 1 else ()
        rules = to_rules(chosen, step.whole.graph, regions, step.blocks, TRADES)
        reasons = explain_plan(search, chosen, limit, rules)
        return Plan(
            title=self._title(chosen),
            decisions=Decisions(
                target=self.target(),
                budget=budget,
                rules=rules,
                offload_memory=self._offload_memory(rules),
            ),
            before=search.on_one(),
            unplanned=search.on_one(),
            predicted=search.prediction(chosen),
            taken=reasons.taken,
            refused=(*reasons.refused, *refuse_unprobed()),
            num_offers=reasons.num_offers,
            next_cent=self._next_cent(chosen, limit),
            fewest=self._fewest_text(chosen) if minimize else "",
            notes=(*self._notes(chosen, limit), *note_on_accuracy(budget)),
        )

    def _offload_memory(self, rules: Sequence[Rule]) -> OffloadMemory | None:
        """The hosts' offload memory, with the bandwidth of the slowest link and the size of the
        smallest share.
        """
        if not any(rule.needs_offload_memory for rule in rules):
            return None
        classes = [device for device, _ in self.request.cluster.tree.classes]
        links = [device.host_link for device in classes if device.host_link is not None]
        sizes = [device.host_memory_bytes for device in classes if device.host_memory_bytes]
        rate = min(link.bytes_per_second for link in links)
        return OffloadMemory("the memory of each host", rate=rate, size=min(sizes))

    def _title(self, chosen: ClusterPlan) -> str:
        shapes = ", ".join("x".join(map(str, e.shape)) for e in self.step.entries[:1])
        ranks = chosen.layout.num_ranks
        return f"{self.request.title}, batch {shapes}, {ranks} rank{'s' if ranks > 1 else ''}"

    def _fewest_text(self, chosen: ClusterPlan) -> str:
        most = self.request.cluster.num_devices
        return f"{chosen.layout.num_ranks} of {most} devices; no layout on fewer fits the budget"

    def _next_cent(self, chosen: ClusterPlan, limit: int) -> NextCent | None:
        more = int(limit * _MORE_MEMORY_SHARE)
        other = self.search.fastest(chosen.layout.num_ranks, limit + more)
        assert other is not None, "a plan that fits in less memory fits in more"
        saved = chosen.step.step_seconds - other.step.step_seconds
        # Plans of nearly equal speed count as equal, and the simpler one is taken.
        is_faster = saved > chosen.step.step_seconds * ALIKE
        return NextCent(more_bytes=more, saved_seconds=saved) if is_faster else None

    def _rate_notes(self, chosen: ClusterPlan) -> Iterator[str]:
        """Yield notes on the rates behind the predicted times, on their uncertainty and on the
        stack.
        """
        rates = self.request.cluster.rates_said
        yield f"nothing was measured: links at their declared rates, {rates}"
        yield from error_sentences(self.search, chosen.layout)
        if self.step.is_sequence_parallel(chosen.layout.tensor):
            yield _SEQUENCE_PARALLEL

    def _batch_note(self, chosen: ClusterPlan) -> Iterator[str]:
        layout = ParallelLayout(
            data=chosen.layout.data, tensor=chosen.layout.num_ranks // chosen.layout.data
        )
        return batch_size_note(layout, self.step.num_samples)

    def _notes(self, chosen: ClusterPlan, limit: int) -> list[str]:
        ranks = chosen.layout.num_ranks
        least = self.search.least_seconds(ranks, limit, chosen)
        gap = format_share(chosen.step.step_seconds / least - 1).lstrip("+")
        if gap.startswith("0.0 "):
            gap = "0.1 %"
        faster = f"more than {gap} faster" if least < chosen.step.step_seconds else "faster"
        count = len(self.search.candidates(ranks))
        devices = f"{ranks} devices" if ranks > 1 else "one device"
        equal_layouts = rivals_note(rivals(self.search, chosen, limit))
        headline = f"none of {count} layouts on {devices} is predicted to be {faster}"
        notes = [
            f"{headline}, each with any subset of its blocks recomputed",
            *([equal_layouts] if equal_layouts else []),
            *self._rate_notes(chosen),
            f"the limit is {self._limit_text(limit)} a rank; memory of drivers is not included",
        ]
        notes += self._batch_note(chosen)
        if chosen.layout.data > 1 or chosen.layout.micro_batches > 1:
            notes.append("independence of samples was inferred from the operators, not tested")
        return notes

    def _limit_text(self, limit: int) -> str:
        smaller = sorted({
            device.memory_bytes
            for device, _ in self.request.cluster.tree.classes
            if device.memory_bytes < limit
        })  # fmt: skip
        less = "".join(f", {format_bytes(n)} on devices with less memory" for n in smaller)
        return f"{format_bytes(limit)}{less}"
