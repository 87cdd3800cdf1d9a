"""A plan as returned to the user: shows its predictions, answers questions, and can be applied.

Not for finding it: see planner/planner.py and search/. Not for the public calls: see planning.py.
"""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from steelyard.api.argument_checks import check_model, path_of, target_of
from steelyard.api.export import exported_launch, exported_settings
from steelyard.api.step import Step
from steelyard.capture.tracing.fake_execution import filled
from steelyard.errors import BadInput, Infeasible, Mismatch
from steelyard.export.exported import Exported, write_export
from steelyard.export.target import ExportTarget
from steelyard.hardware.cluster import Cluster
from steelyard.ir.metrics import Metrics
from steelyard.ir.rule import kind_named
from steelyard.plan_files.prediction_file import write_plan
from steelyard.planner.planner import Planner
from steelyard.planner.session import PlanningSession
from steelyard.plans.budget import Budget
from steelyard.plans.lifetimes import StepDetail
from steelyard.plans.plan import FrontierPoint, Plan
from steelyard.plans.stop_request import StopRequest
from steelyard.plans.trace_span import Span
from steelyard.predict import memory_history, spans
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.styled_text import plain
from steelyard.report.text import render
from steelyard.trades import check_trade


class Planned:
    """A plan that can be applied; printing it shows the explain tree."""

    def __init__(self, planner: Planner, plan: Plan) -> None:
        self._planner = planner
        self.plan = plan

    @property
    def session(self) -> PlanningSession:
        """The captured and priced step."""
        return self._planner.session

    def __str__(self) -> str:
        return plain(render(tree_of(self.plan)))

    def _repr_html_(self) -> str:
        return to_html(tree_of(self.plan))

    @property
    def baseline(self) -> Metrics:
        """The cost of eager PyTorch."""
        return self.plan.before.metrics

    @property
    def predicted(self) -> Metrics:
        """The predicted cost of the plan."""
        return self.plan.predicted.metrics

    @property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The whole memory-time curve; each number of micro-batches costs one more capture."""
        return self.with_frontier().plan.frontier

    def with_frontier(self) -> "Planned":
        """Return the plan with the whole frontier; planning explores only the part that it
        needs.
        """
        return Planned(self._planner, self._planner.with_frontier(self.plan))

    def simulated(self) -> tuple[Span, ...]:
        """Return the predicted timeline of each rank."""
        session = self.session
        return spans(
            session.as_executed(session.apply_rules(self.plan.decisions.rules)), session.costs
        )

    def detail(self) -> StepDetail:
        """Return who is alive when, in the plan and without trades, and the schedule of the ranks.

        A report in HTML draws it; it is computed here, and is in no plan file.
        """
        session = self.session
        rules = self.plan.decisions.rules
        base = session.as_executed(session.base)
        program = session.as_executed(session.apply_rules(rules)) if rules else base
        return StepDetail(
            planned=memory_history(program, session.costs),
            unplanned=memory_history(base, session.costs) if rules else None,
            spans=spans(program, session.costs),
        )

    def save(self, path: str | Path) -> None:
        """Write the decisions as TOML to ``path``, and the predictions as JSON to its folder."""
        write_plan(path_of(path), self.plan)

    def export(self, target: str, path: str | Path) -> Exported:
        """Write the settings of another tool that are nearest to the plan to ``path``.

        ``target`` is ``"trainer"``, ``"accelerate"``, ``"fsdp2"``, ``"deepspeed"`` or
        ``"torchtitan"``. The result has the predicted cost of these settings (``price``), and what
        is ``lost`` against the plan.
        """
        path = path_of(path)
        found = self.exported(target_of(target), name=path.name)
        write_export(path, found.file)
        return found

    def exported(
        self, target: ExportTarget, *, name: str, script: str = "", path: str = ""
    ) -> Exported:
        """Return an export without writing it; ``script`` and plan ``path`` are for launchers."""
        session, cluster = self._step_to_price(), self._cluster()
        if target.is_launcher:
            return exported_launch(
                self.plan, session, target, cluster=cluster, name=name, script=script, path=path
            )
        return exported_settings(self.plan, session, target, cluster=cluster, name=name)

    def _cluster(self) -> Cluster:
        return self.session.request.cluster

    def _step_to_price(self) -> PlanningSession | None:
        return self.session

    def why_not(self, trade: str) -> str:
        check_trade(trade)
        taken = [t.label for t in self.plan.taken if t.trade == trade]
        if taken:
            return f"{trade} was applied: {', '.join(taken[:5])}"
        is_offload = kind_named(trade).needs_offload_memory
        if is_offload and self.session.request.cluster.offload_memory is None:
            return "no offload memory was given: name a folder (--offload-dir, sy.OffloadMemory)"
        reasons = [f"{r.label}: {r.reason}" for r in self.plan.refused if r.trade == trade]
        if not reasons and not self.plan.num_offers:
            return (
                f"no offer of {trade} was considered for this plan; plan again to get the reasons"
            )
        return "\n".join(reasons) or f"{trade} has no offer on this step"

    def what_if(self, **budget: Any) -> "Planned":
        """Plan the same step under another budget: ``plan.what_if(memory="4 GiB")``."""
        return planned(self._planner, budget_of(budget))

    def apply(self, model: nn.Module | None = None, *, sums_gradients: bool = False) -> Step:
        """Apply the plan to the live model: return a step to call in place of forward and backward.

        A plan for one rank is refused in a process group of several ranks. With ``sums_gradients``
        it is allowed, if the caller's code sums gradients over ranks after ``step.backward``.
        """
        session = self.session
        self._refuse_beyond_budget()
        source = session.source.whole()
        if source.is_imagined:
            # The largest batch had no values while planning; the batches of the run have.
            source = source.at(filled(source.batch))
        if model is not None and model is not source.model:
            check_model(model)
            # Another object of the same class is possible, for example one that was loaded in
            # between.
            source = source.on(model)
        elif session.watch is not None:
            session.watch.check()
        if source.graph(micro_batches=1).fingerprint != session.base.graph.fingerprint:
            raise Mismatch(
                "the model traces to a different graph than the one that was planned",
                expected="the same modules, modes and parameters as when planning",
                remedy="plan again with the model as it is now",
            )
        return Step(
            plan=self.plan,
            source=source,
            pricing=session.pricing,
            optimizer=session.request.optimizer,
            update=session.base.update,
            sums_gradients=sums_gradients,
        )

    def _refuse_beyond_budget(self) -> None:
        """Raise Infeasible if the plan exceeds its budget.

        A plan file may have been edited, or made for a smaller batch. Such a plan is shown but not
        run.
        """
        tree = tree_of(self.plan)
        if not tree.fits:
            raise Infeasible(
                f"the plan exceeds its budget: {tree.verdict.partition(': ')[2]}",
                expected="a plan that fits its budget for the present step and machine",
                remedy="plan again, or raise the budget in the plan file",
            )


def budget_of(bounds: Mapping[str, Any]) -> Budget:
    unknown = sorted(set(bounds) - set(signature(Budget).parameters))
    if unknown:
        raise BadInput(
            f"a budget has no argument {unknown[0]}",
            expected=f"one or more of {', '.join(signature(Budget).parameters)}",
            remedy='write, for example, what_if(memory="4 GiB")',
        )
    return Budget(**bounds)


def planned(planner: Planner, budget: Budget, *, stop: StopRequest | None = None) -> Planned:
    """Return the fastest plan of the step within the budget."""
    return Planned(planner, planner.plan(budget, stop=stop))
