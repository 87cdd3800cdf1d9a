"""The planner: turns a captured and priced step and a budget into a plan with reasons.

Not for the captured step: see session.py. Not for the search itself: see search/. Not for applying
a plan: see api/planned.py.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from steelyard.capture.batch.splitting import batch_size
from steelyard.comm.devices import torch_device_of
from steelyard.errors import Infeasible, Mismatch
from steelyard.garbage_collection import without_collection
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.planner.compatibility import target_differences
from steelyard.planner.compiled import compiled_frontier, find_compiled_plan
from steelyard.planner.gradient_compression import (
    note_on_accuracy,
    refuse_unprobed,
    with_compression,
)
from steelyard.planner.lossy import LossyPlanner
from steelyard.planner.plan_notes import (
    batch_size_note,
    effort_note,
    half_precision_note,
    note_beyond_eager,
    note_on_state,
)
from steelyard.planner.session import PlanningSession
from steelyard.plans.accuracy import beyond
from steelyard.plans.budget import Budget, Effort
from steelyard.plans.plan import Decisions, Plan, Prediction
from steelyard.plans.stop_request import StopRequest
from steelyard.predict import slowdown
from steelyard.safe_text import printable
from steelyard.search import ALLOWS_NONE, Floor, PipelineSearch, SearchResult, StepSearch
from steelyard.units import format_bytes, format_seconds

_NO_PROBE = "is not probed on several ranks"


class Planner:
    """Plans one step for any budget; keeps the results of searches and probes."""

    def __init__(self, session: PlanningSession) -> None:
        self.session = session

    @cached_property
    def lossy(self) -> LossyPlanner:
        """The planner of plans that may lose accuracy."""
        return LossyPlanner(session=self.session)

    def plan(self, budget: Budget, *, stop: StopRequest | None = None) -> Plan:
        """Return the fastest plan within the budget, with its reasons.

        ``stop`` ends the search with the best plan so far, on one device without accuracy loss.
        """
        session = self.session
        request = session.request
        request.on_progress("searching")
        with without_collection():
            found, predicted = self.find(budget, stop)
        is_python = session.request.runner == "python"
        plan = Plan(
            title=self._title(found.rules),
            decisions=Decisions(
                target=session.target(),
                budget=budget,
                rules=found.rules,
                offload_memory=session.offload_memory_for(found.rules),
                used_ranks=session.used_ranks(found.rules),
            ),
            before=session.before(),
            unplanned=session.unplanned,
            predicted=predicted,
            taken=found.taken,
            refused=found.refused,
            num_offers=found.num_offers,
            frontier=found.frontier if is_python else (),
            next_cent=found.next_cent if is_python else None,
            least_bytes=found.least.nbytes if is_python else 0,
            least_within=found.least_within,
            slowdown=slowdown(found.program, session.base, session.prices.costs),
            predicted_for=session.predicted_for,
            notes=(
                *session.notes(),
                *self._batch_notes(found.rules),
                *session.note_on_links(found.rules, predicted.metrics.step_seconds.value),
                *self._state_notes(budget, found.program, predicted),
                *note_beyond_eager(session.before(), predicted),
                *((str(found.gap),) if found.gap else ()),
                *effort_note(request.effort, found),
                *(() if session.request.cluster.is_here else note_on_accuracy(budget)),
            ),
        )
        session.prices.stop_background_load()
        return plan

    def find(
        self, budget: Budget, stop: StopRequest | None = None
    ) -> tuple[SearchResult, Prediction]:
        """Find the fastest plan whose program, as its runner executes it, fits the budget."""
        session = self.session
        request = session.request
        request.check_floor(Floor.of(session.base), budget)
        has_ranks = request.cluster.num_devices > 1
        if request.runner == "inductor":
            found, predicted = find_compiled_plan(session, budget)
            return (
                with_compression(self.lossy, budget, found, predicted)
                if has_ranks
                else (found, predicted)
            )
        if has_ranks:
            found = session.find_layout(
                budget, barred=_NO_PROBE if budget.accuracy_loss else ALLOWS_NONE
            )
            if request.cluster.is_here:
                return with_compression(self.lossy, budget, found, found.prediction)
            return replace(found, refused=(*found.refused, *refuse_unprobed())), found.prediction
        if budget.accuracy_loss:
            return self.lossy.find(budget)
        if request.effort is Effort.QUICK:
            # If nothing fits without micro-batches, the other search says so with all reasons.
            with contextlib.suppress(Infeasible):
                found = session.whole_batch_search.find(
                    budget, on_better=self._report_better, stop=stop
                )
                return found, found.prediction
        found = session.search.find(budget, on_better=self._report_better, stop=stop)
        return found, found.prediction

    def _report_better(self, seconds: float) -> None:
        best = format_seconds(seconds)
        self.session.request.on_progress(f"searching, the best plan so far takes ~{best} a step")

    def with_frontier(self, plan: Plan) -> Plan:
        """Return the plan with the whole frontier; planning explores only the part that it
        needs.
        """
        session = self.session
        if plan.frontier and not plan.least_within:
            return plan
        session.request.on_progress("computing the memory-time curve")
        search = self._search_for(plan.decisions)
        search.explore_all()
        if session.request.runner == "inductor":
            assert isinstance(search, StepSearch), "stages are run by generated Python"
            curve = compiled_frontier(session, search)
        elif plan.frontier:
            return self.plan(plan.decisions.budget)
        else:
            # The plan was read from a file, and its decisions must stay as they are.
            curve = search.frontier()
        return replace(plan, frontier=curve, least_within=0)

    def predict(self, decisions: Decisions) -> Plan:
        """Predict the decisions of a plan file on this step; there is no search."""
        session = self.session
        program = session.apply_rules(decisions.rules)
        predicted, accuracy_notes = self._predict_program(decisions, program)
        used = decisions.ranks_used(ParallelLayout.of(decisions.rules).num_ranks)
        torch_device = torch_device_of(session.source.model)
        differences = target_differences(
            session.target(), decisions.target, torch_device, used=used
        )
        notes = [
            *accuracy_notes,
            *session.notes(),
            *self._batch_notes(decisions.rules),
            *self._state_notes(decisions.budget, program, predicted),
            *note_beyond_eager(session.before(), predicted),
            *differences,
        ]
        check_offload_room(decisions, program)
        limit = decisions.budget.memory_bytes
        if limit is not None and predicted.peak.nbytes > limit:
            notes.append(
                f"does not fit: predicted {format_bytes(predicted.peak.nbytes)}, budget "
                f"{format_bytes(limit)}"
            )
        plan = Plan(
            title=self._title(decisions.rules),
            decisions=decisions,
            before=session.before(),
            unplanned=session.unplanned,
            predicted=predicted,
            slowdown=slowdown(program, session.base, session.prices.costs),
            predicted_for=session.predicted_for,
            notes=tuple(notes),
        )
        session.prices.stop_background_load()
        return plan

    def as_predicted(self, decisions: Decisions, stored: Plan) -> Plan:
        """Return the plan of a file with its stored predictions; nothing is measured."""
        return Plan(
            title=self._title(decisions.rules),
            decisions=decisions,
            before=stored.before,
            unplanned=stored.unplanned,
            predicted=stored.predicted,
            slowdown=stored.slowdown,
            predicted_for=stored.predicted_for,
            notes=stored.notes,
        )

    def _search_for(self, decisions: Decisions) -> StepSearch | PipelineSearch:
        """Return the search that produced these decisions."""
        if self.session.request.cluster.num_devices > 1:
            return self.session.layouts.search_by(decisions.rules)
        return self.lossy.search_for(decisions.budget)

    def _predict_program(
        self, decisions: Decisions, program: Program
    ) -> tuple[Prediction, list[str]]:
        """Predict the program; if it is lossy, probe it unless its accuracy budget is 0."""
        predicted, allowed = self.session.priced(program), decisions.budget.accuracy_loss
        if not program.is_lossy:
            return predicted, []
        loss = "ranks send compressed gradients"
        if count := len(program.quantized):
            loss = f"{count} value{'s are' if count > 1 else ' is'} kept in 8 bits"
        if not allowed:
            return predicted, [f"does not fit: {loss}, and the accuracy budget is 0"]
        why_not = self.lossy.why_not_probed()
        drift = why_not or self.lossy.probe_drift(decisions.rules, program, allowed)
        if isinstance(drift, str):
            return predicted, [f"{loss}, and the accuracy loss is not known: {drift}"]
        metrics = replace(predicted.metrics, accuracy_loss=str(drift))
        notes = [] if drift.keeps(allowed) else [f"does not fit: {beyond(drift, allowed)}"]
        return replace(predicted, metrics=metrics), notes

    def _batch_notes(self, rules: Sequence[Rule]) -> Iterator[str]:
        yield from batch_size_note(
            ParallelLayout.of(rules), batch_size(self.session.source.batch) or 1
        )
        yield from half_precision_note(rules, self.session.base.graph)

    def _state_notes(
        self, budget: Budget, program: Program, predicted: Prediction
    ) -> Iterator[str]:
        return note_on_state(
            program,
            predicted,
            limit_bytes=budget.memory_bytes,
            is_known=self.session.request.optimizer is not None,
        )

    def _title(self, rules: Sequence[Rule]) -> str:
        ranks = ParallelLayout.of(rules).num_ranks
        ranks_text = f", {ranks} ranks" if ranks > 1 else ""
        shapes = ", ".join("x".join(map(str, e.shape)) for e in self.session.source.entries()[:1])
        return f"{self.session.request.title}, batch {shapes}{ranks_text}"


def check_offload_room(decisions: Decisions, program: Program) -> None:
    """Raise Mismatch if the program moves more to offload memory than fits there."""
    offload_memory = decisions.offload_memory
    if offload_memory is not None and program.offload_bytes > offload_memory.size_bytes:
        raise Mismatch(
            f"the plan offloads {format_bytes(program.offload_bytes)} to "
            f"{printable(offload_memory.folder)}, which may hold "
            f"{format_bytes(offload_memory.size_bytes)}",
            expected="offload memory of at least that size",
            remedy="set a larger size under [offload_memory], or plan again",
        )
