"""The captured and priced step behind a plan, and the request for which it is captured.

Not for deciding: see search/. Not for the public calls: see api/planning.py.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.comm.devices import torch_device_of
from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Cluster, OffloadMemory
from steelyard.hardware.device import Device
from steelyard.hardware.host_os import memory_bytes
from steelyard.hardware.link import Link
from steelyard.ir.graph import Graph, Role
from steelyard.ir.metrics import Estimate
from steelyard.ir.optimizer_update import update_digest
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, Rule, matching, of_kind, to_rules
from steelyard.ir.rule_kinds import MicroBatches, Recomputation, StateOffload
from steelyard.measure.cache import CostCache
from steelyard.measure.malloc import keep_freed_memory
from steelyard.offload.optimizer_state import why_undivided, why_unsliceable
from steelyard.operators import is_pointwise
from steelyard.passes.offload.sliced_optimizer import why_whole
from steelyard.planner.cost_provider import CostProvider, LazyCosts, Progress, dims_of
from steelyard.planner.local_cluster import local_cluster
from steelyard.planner.plan_notes import host_memory_note
from steelyard.planner.priced_source import PricedSource
from steelyard.plans.budget import Budget, Effort
from steelyard.plans.plan import Prediction, Target
from steelyard.plans.plan_check import DECOMPOSITIONS
from steelyard.plans.trade import Trade, apply_rules_on_ranks, rule_type, trade_of
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.predict.missing_flops import notes_on_uncounted, refuse_uncounted
from steelyard.run.compiled.lower import compiled, lower
from steelyard.run.compiled.recorder import GeneratedKernel
from steelyard.run.model_guards import ModelWatch
from steelyard.run.sharded_model.tensors import why_unshardable
from steelyard.search import ALLOWS_NONE, Floor, LayoutSearch, SearchResult, StepSearch
from steelyard.search.ranks.slow_link_note import note_on_links
from steelyard.trades import TRADES

Runner = Literal["python", "inductor"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """The arguments of a planning call: model, loss, batch, cluster, budget, runner and trades."""

    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: OptimizerFactory | None
    cluster: Cluster
    budget: Budget
    runner: Runner
    title: str
    on_progress: Progress
    decomposition: str = ""
    trades: tuple[Trade, ...] = TRADES
    effort: Effort = Effort.NORMAL

    def capture_and_price(
        self, *, within: Budget | None = None, is_priced: bool = True
    ) -> "PlanningSession":
        """Capture the step and, if ``is_priced``, measure its operators on its device.

        Before anything is measured, the memory floor is compared with the budget ``within``. If not
        ``is_priced``, operators are measured on the first access to the prices.
        """
        torch_device = torch_device_of(self.model)
        cluster = local_cluster(torch_device, self.cluster, runner=self.runner, cache=CostCache())
        session = replace(self, cluster=cluster)._captured(torch_device, within or Budget())
        if is_priced:
            session.pricing.checked  # noqa: B018 measures
        return session

    def check_floor(self, floor: Floor, budget: Budget) -> None:
        """Raise Infeasible if no plan on this cluster can stay within the budget."""
        offload_memory = self.cluster.offload_memory
        floor.check(
            budget,
            ranks=self.cluster.num_devices,
            offload_bytes=0 if offload_memory is None else offload_memory.size_bytes,
        )

    def _captured(self, torch_device: torch.device, within: Budget) -> "PlanningSession":
        self.on_progress("capturing the step")
        source = CapturedStep(
            model=self.model,
            loss=self.loss,
            batch=self.batch,
            decomposition=self.decomposition or self._decomposition_table(),
            optimizer=self.optimizer,
        )
        if source.is_imagined:
            # A step that can run is traced in full, once for both planning and running.
            source = replace(source, for_planning=True)
        graph = source.graph(micro_batches=1)
        update = source.update()
        if not self.cluster.is_here:
            refuse_uncounted([graph] if update is None else [graph, update.graph])
        if update is not None:
            update = self._with_reasons(update)
        base = Program.plain(graph, update=update)
        self.check_floor(Floor.of(base), within)
        if self.cluster.is_here and torch_device.type == "cpu" and self._has_room_for(graph):
            keep_freed_memory()

        def measured() -> CostProvider:
            prices = CostProvider(
                self.cluster, on_progress=self.on_progress, torch_device=torch_device
            )
            prices.measure(graph, may_lack=True)
            if update is not None:
                prices.measure(update.graph, may_lack=True)
            return prices

        def check(prices: CostProvider) -> None:
            prices.measure(graph)
            if update is not None:
                assert self.optimizer is not None
                prices.measure_update(self.optimizer, update)
            prices.check(source, base)

        pricing = LazyCosts(measured, check=check)
        watch = None if source.is_imagined else ModelWatch(self.model, source.captured().constants)
        return PlanningSession(request=self, source=source, base=base, pricing=pricing, watch=watch)

    def _with_reasons(self, update: Program) -> Program:
        """Return the optimizer's step; if it cannot be split, the reasons are part of it."""
        assert self.optimizer is not None
        if self.cluster.offload_memory is not None or self.cluster.num_devices > 1:
            undivided = why_undivided(self.optimizer, dims_of(update))
            update = replace(update, undivided=undivided)
        if self.cluster.offload_memory is not None:
            update = replace(update, unsliceable=self._reasons_not_sliced(update))
        if self.cluster.num_devices > 1:
            update = replace(update, unshardable=why_unshardable(self.optimizer))
        return update

    def _has_room_for(self, graph: Graph) -> bool:
        """True if each rank has enough memory for twice the step of eager PyTorch.

        The factor of two leaves room for fragmentation by blocks that are kept for the next step.
        Free memory is not considered, because all ranks must get the same answer.
        """
        step_bytes = graph.resident_bytes(*Role) + graph.eager_peak_bytes
        return 2 * step_bytes * self.cluster.ranks_of_a_host < memory_bytes()

    def _decomposition_table(self) -> str:
        """Return the decomposition table with which to capture the step.

        One device uses Inductor's own table: its small operators can be saved or recomputed one by
        one.
        """
        tables = DECOMPOSITIONS[self.runner]
        is_one = self.runner == "python" or self.cluster.num_devices == 1
        return tables[0] if is_one else "inductor-2"

    def _reasons_not_sliced(self, update: Program) -> dict[str, str]:
        """Return why some parameters are not updated a few rows at a time, by parameter."""
        assert self.optimizer is not None
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        reason = why_unsliceable(self.optimizer)
        found = dict.fromkeys(trained, reason) if reason else {}
        found |= why_whole(update, is_pointwise=is_pointwise)
        if _torch.any_hooks(list(trained.values())):
            hooked = (name for name, p in trained.items() if _torch.any_hooks([p]))
            found |= dict.fromkeys(hooked, "it has hooks, which need its whole gradient")
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningSession:
    """The captured and priced step: everything that planning needs to know.

    ``watch`` remembers the model as it was captured; it is None if the step has no live model.
    """

    request: PlanRequest
    source: CapturedStep
    base: Program
    pricing: LazyCosts
    watch: ModelWatch | None

    @property
    def prices(self) -> CostProvider:
        """The operator costs, calibrated against a whole step if one can be run."""
        return self.pricing.checked

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster with the speeds of its ranks, measured unless they were declared."""
        declared = self.request.cluster
        is_known = declared.num_devices == 1 or not declared.is_here or bool(declared.speeds)
        return declared if is_known else self.prices.cluster

    @cached_property
    def search(self) -> StepSearch:
        """The search on one device, which keeps the plans that it found for earlier budgets.

        It computes memory as for generated Python.
        """
        return self.searching()

    @cached_property
    def layouts(self) -> LayoutSearch:
        """The search over parallel layouts on all numbers of ranks."""
        cluster = self.request.cluster
        return LayoutSearch(
            self.base,
            trades=self.request.trades,
            source=self._priced_source,
            costs=self.prices.costs,
            num_ranks=cluster.num_devices,
            of_a_host=cluster.ranks_of_a_host if cluster.hosts > 1 else 1,
            searching=lambda layout: self.searching(layout=layout),
        )

    def find_layout(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> SearchResult:
        """Return the fastest plan on all numbers of ranks.

        The search uses derived graphs. The graphs of the chosen plan are captured, and if one of
        them differs, the search is repeated with it.
        """
        while True:
            found = self.layouts.find(budget, barred=barred)
            programs = (found.program, *found.program.sibling_programs)
            if not self.cluster.is_here or all(
                self.source.is_as_derived(micro_batches=program.units, share=program.share)
                for program in programs
            ):
                return found
            del self.__dict__["layouts"]

    @cached_property
    def whole_batch_search(self) -> StepSearch:
        """The same search without micro-batches: nothing is captured or checked for them."""
        return self.searching(
            trades=[t for t in self.request.trades if not issubclass(t.rule, MicroBatches)]
        )

    def searching(
        self,
        *,
        lossy: frozenset[CallSite] = frozenset(),
        layout: tuple[Rule, ...] = (),
        trades: Sequence[Trade] | None = None,
    ) -> StepSearch:
        """Make a search, with all trades of the request unless others are given.

        ``lossy`` are the activations that may lose accuracy, ``layout`` the rules of a parallel
        layout.
        """
        return StepSearch(
            self.base,
            trades=self.request.trades if trades is None else trades,
            source=self._priced_source,
            costs=self.prices.costs,
            lossy=lossy,
            # Inductor may compute two copies of a value in one kernel, and then holds both.
            repeats=self.request.runner != "inductor",
            layout=layout,
            effort=self.request.effort,
        )

    @cached_property
    def _priced_source(self) -> PricedSource:
        return PricedSource(self.source, self.prices)

    def apply_rules_unpriced(self, rules: Sequence[Rule]) -> Program:
        """Return the program after these rules, without measuring any operator."""
        layout = ParallelLayout.of(rules)
        _refuse_unequal_stages(layout, self.cluster.devices)
        return apply_rules_on_ranks(self.base, rules, trades=TRADES, source=self.source)

    def apply_rules(self, rules: Sequence[Rule]) -> Program:
        layout = ParallelLayout.of(rules)
        _refuse_unequal_stages(layout, self.prices.costs.on(layout.num_ranks).devices)
        program = apply_rules_on_ranks(self.base, rules, trades=TRADES, source=self._priced_source)
        if layout.num_ranks == 1:
            self._priced_source.calibrate_split(micro_batches=program.repeats)
        if program.quantized:
            # The quantization operators exist only in the rewritten program.
            self.prices.measure(program.graph)
        return program

    def recomputed(self, rules: Sequence[Rule]) -> Program:
        """Return the program after these rules, with everything recomputed that can be."""
        program = self.apply_rules([rule for rule in rules if not isinstance(rule, StateOffload)])
        trade = trade_of(TRADES, Recomputation)
        assert trade is not None
        offers, _ = trade.offers(program, self._priced_source)
        offered = {rule for offer in offers for rule in of_kind(offer.rules, Recomputation)}
        values = matching(program.graph, sorted(offered))
        recompute = to_rules(program.graph, values, rule_type(TRADES, Recomputation))
        return self.apply_rules((*rules, *recompute))

    def offload_memory_for(self, rules: Sequence[Rule]) -> OffloadMemory | None:
        """Return the offload memory that these rules use, if any."""
        return (
            self.request.cluster.offload_memory
            if any(rule.needs_offload_memory for rule in rules)
            else None
        )

    def used_ranks(self, rules: Sequence[Rule]) -> tuple[int, ...]:
        """Return the ranks that a step with these rules uses; empty if they are the first ones."""
        ranks = ParallelLayout.of(rules).num_ranks
        subset = self.prices.costs.subsets.get(ranks)
        used = subset.ranks if subset is not None else ()
        return used if used != tuple(range(ranks)) else ()

    def note_on_links(self, rules: Sequence[Rule], seconds: float) -> tuple[str, ...]:
        """Return notes on hosts with slow links: the step time with and without these hosts.

        ``seconds`` is the step time as planned.
        """
        each = self.request.cluster.ranks_of_a_host

        def hosts_of(layout: ParallelLayout) -> frozenset[int]:
            subset = self.prices.costs.subsets.get(layout.num_ranks)
            ranks = subset.ranks if subset is not None else range(layout.num_ranks)
            return frozenset(rank // each for rank in ranks)

        def least(is_allowed: Callable[[Collection[int]], bool]) -> float | None:
            allowed = [x for x in self.layouts.layouts if is_allowed(hosts_of(x))]
            candidates = (
                candidate for layout in allowed for candidate in self.layouts.candidates.of(layout)
            )
            return min((candidate.seconds for candidate in candidates), default=None)

        used = hosts_of(ParallelLayout.of(rules))
        return note_on_links(self.prices.host_rates, used, seconds, least)

    def with_link(self, link: Link) -> "PlanningSession":
        """Return the same step with another link between ranks."""
        return self._with_prices(self.prices.with_link(link))

    def without_measuring(self) -> "PlanningSession":
        """Return the same step, with measuring and progress messages disabled."""
        quiet = replace(self.request, on_progress=lambda _: None)
        return replace(self, request=quiet)._with_prices(self.prices.without_measuring())

    def _with_prices(self, prices: CostProvider) -> "PlanningSession":
        """Return the same step with other prices; the captured layouts are reused."""
        other = replace(self, pricing=LazyCosts(lambda: prices))
        if "layouts" in self.__dict__:
            other.__dict__["layouts"] = self.layouts.over(prices.costs, other._priced_source)
        return other

    def target(self) -> Target:
        return Target(
            model=self.base.graph.model_fingerprint,
            graph=self.base.graph.fingerprint,
            decomposition=self.base.graph.decomposition,
            runner=self.request.runner,
            cluster=self.cluster.fingerprint,
            ranks=self.request.cluster.num_devices,
            hosts=self.request.cluster.hosts,
            speeds=self.cluster.speeds,
            declared=self.request.cluster.declared,
            torch=torch.__version__.partition("+")[0],
            batch=self.source.entries(),
        )

    @cached_property
    def predicted_for(self) -> str:
        """A digest of everything that predictions depend on: target and optimizer step."""
        target = self.target()
        # Ranks that were measured to be equal have speeds of 1.0 when the plan is read.
        target = replace(target, speeds=target.speeds or (1.0,) * target.ranks)
        described = f"{target}|{update_digest(self.base.update)}"
        return sha256(described.encode()).hexdigest()[:16]

    @cached_property
    def unplanned(self) -> Prediction:
        """The prediction of the captured graph with no trade applied, for the requested runner."""
        return self.priced(self.base)

    def priced(self, program: Program) -> Prediction:
        """Predict the program as the runner executes it."""
        base = self._executed_base  # calibrates the costs before any prediction
        lowered = base if program is self.base else self.as_executed(program)
        return predict(lowered, self.costs)

    @property
    def costs(self) -> CostTable:
        """The cost table of the program that runs."""
        is_compiled = self.request.runner == "inductor"
        return self.prices.compiled_costs if is_compiled else self.prices.costs

    @cached_property
    def _executed_base(self) -> Program:
        lowered = self.as_executed(self.base)
        if self.request.runner == "inductor":
            self.prices.check_compiled(self.source, self.base, lowered)
        return lowered

    def as_executed(self, program: Program) -> Program:
        """Return the program as the runner executes it; Inductor lowers it to another program."""
        if self.request.runner == "inductor":
            self.request.on_progress("lowering the step")
            kernels: dict[str, GeneratedKernel] = {}
            # Inductor generates code for this number of threads.
            with self.prices.threads_of_rank():
                program = lower(program, kernels)

            def calls(names: Sequence[str]) -> dict[str, Any]:
                return compiled({name: kernels[name] for name in names if name in kernels})

            for one in (program, *program.sibling_programs):
                for each in one.passes[-2:]:
                    self.prices.measure_compiled(each.graph, calls)
        return program

    def before(self) -> Prediction:
        """Predict eager PyTorch: the same operators, with the activations that its autograd
        saves.
        """
        costs = self.prices.costs
        unplanned = predict(self.base, costs)
        metrics, peak = unplanned.metrics, unplanned.peak
        workspaces = {s: cost.workspace_bytes for s, cost in costs.operators.items()}
        saved_bytes = self.source.twin().peak_bytes(workspaces)
        nbytes = max(peak.resident_bytes + saved_bytes, self._update_peak())
        return replace(
            unplanned,
            metrics=replace(metrics, memory_bytes=Estimate.within(nbytes, share=0.05)),
            peak=replace(peak, nbytes=nbytes, alive=(), at="", path="", line=""),
            timeline=None,
        )

    def _update_peak(self) -> int:
        timeline = predict(self.base, self.prices.costs).timeline
        assert timeline is not None
        return max(
            (n for n, p in zip(timeline.nbytes, timeline.phases) if p == "update"), default=0
        )

    def notes(self) -> tuple[str, ...]:
        found = list(self.prices.notes)
        if self.source.twin().has_unknown:
            found.append(
                "eager PyTorch needs more memory than stated here: what its oneDNN kernel saves "
                "for a recurrent layer is unknown"
            )
        update = self.base.update
        graphs = [self.base.graph] if update is None else [self.base.graph, update.graph]
        found += notes_on_uncounted(graphs, self.prices.costs)
        found += host_memory_note(self.request.cluster)
        return tuple(found)


def _refuse_unequal_stages(layout: ParallelLayout, devices: Sequence[Device]) -> None:
    """Raise Mismatch if a plan file puts pipeline stages on devices of unequal speed.

    The search never makes such a plan.
    """
    ranks = layout.num_ranks
    if layout.pipeline > 1 and len({*devices[:ranks]}) > 1:
        raise Mismatch(
            f"the plan assigns layers to {ranks} ranks, which have unequal speeds here",
            expected="pipeline stages on devices of one class: unequal devices are not predicted "
            "yet",
            remedy="plan again, which shares the batch unequally; or declare equal speeds under "
            f"[target]: speeds = {[1.0] * ranks}",
        )
