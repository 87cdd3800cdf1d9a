"""A plan in a user's hands: what it says, what it may be asked, and how it is put to work.

Not for how it is found: see look.py and search/. Not for the public calls: see planning.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from steelyard.api.beyond_eager import note_beyond_eager
from steelyard.api.checked import check_model, path_of
from steelyard.api.coded import note_on_accuracy
from steelyard.api.held import batch_held, rounded_in_parts
from steelyard.api.live import Step
from steelyard.api.look import Look
from steelyard.api.lowering import lowered_frontier
from steelyard.api.made_for import other_than_planned
from steelyard.api.unknown_optimizer import note_on_state
from steelyard.capture.batching import batch_size
from steelyard.capture.fakes import filled
from steelyard.core.accuracy import beyond
from steelyard.core.amounts import format_bytes
from steelyard.core.budget import Budget
from steelyard.core.errors import BadInput, Infeasible, Mismatch
from steelyard.core.explanation import write_plan
from steelyard.core.layout import Layout
from steelyard.core.plan import Decisions, FrontierPoint, Plan, Prediction
from steelyard.core.printable import printable
from steelyard.core.program import Program
from steelyard.core.quad import Quad
from steelyard.core.rules import FAR_TRADES, Rule
from steelyard.core.span import Span
from steelyard.exchange.devices import home_of
from steelyard.predict import slowdown, spans
from steelyard.report.html import to_html
from steelyard.report.lines import plain
from steelyard.report.text import render
from steelyard.report.tree import tree_of
from steelyard.search import Search
from steelyard.trades import TRADES


class Planned:
    """A plan that can be applied: prints as the explain tree."""

    def __init__(self, look: Look, plan: Plan) -> None:
        self._look = look
        self.plan = plan

    @property
    def look(self) -> Look:
        """The step as it was captured and priced."""
        return self._look

    def __str__(self) -> str:
        return plain(render(tree_of(self.plan)))

    def _repr_html_(self) -> str:
        return to_html(tree_of(self.plan))

    @property
    def baseline(self) -> Quad:
        """The cost of eager PyTorch."""
        return self.plan.before.quad

    @property
    def predicted(self) -> Quad:
        """The predicted cost of the plan."""
        return self.plan.predicted.quad

    @property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The whole memory-time curve; each number of micro-batches is one more capture."""
        return self.charted().plan.frontier

    def charted(self) -> "Planned":
        """The same plan on the whole curve: one that was planned knows only what it had to ask."""
        look = self._look
        if self.plan.frontier and not self.plan.least_within:
            return self
        look.request.on_progress("exploring the whole curve")
        search = look.search_for(self.plan.decisions)
        search.explore_all()
        if look.request.runner == "inductor":
            assert isinstance(search, Search), "stages are run by generated Python"
            curve = lowered_frontier(look, search)
        elif self.plan.frontier:
            return planned(look, self.plan.decisions.budget)
        else:
            # Read from a file: its decisions stay.
            curve = search.frontier()
        return Planned(look, replace(self.plan, frontier=curve, least_within=0))

    def simulated(self) -> tuple[Span, ...]:
        """The predicted timeline of each rank."""
        look = self._look
        return spans(look.as_run(look.struck(self.plan.decisions.rules)), look.costs)

    def save(self, path: str | Path) -> None:
        """Decisions as TOML to ``path``, predictions as JSON beside it."""
        write_plan(path_of(path), self.plan)

    def why_not(self, trade: str) -> str:
        check_trade(trade)
        taken = [t.label for t in self.plan.taken if t.trade == trade]
        if taken:
            return f"{trade} was struck: {', '.join(taken[:5])}"
        if trade in FAR_TRADES and self._look.request.cluster.far is None:
            return "there is no far memory to move to: name a folder on a disk (--far, sy.Far)"
        reasons = [f"{r.label}: {r.reason}" for r in self.plan.refused if r.trade == trade]
        if not reasons and not self.plan.num_offers:
            return f"no offer of {trade} was weighed for this plan; plan anew to have the reasons"
        return "\n".join(reasons) or f"{trade} has no offer on this step"

    def what_if(self, **budget: Any) -> "Planned":
        """The same step under another budget: ``plan.what_if(memory="4 GiB")``."""
        return planned(self._look, budget_of(budget))

    def apply(self, model: nn.Module | None = None, *, sums_gradients: bool = False) -> Step:
        """The plan on the live model: a step to call in place of forward and backward.

        A plan for one rank is refused in a process group of several, unless ``sums_gradients``
        says that the caller's own code sums gradients over ranks after ``step.backward``.
        """
        look = self._look
        self._refuse_beyond_budget()
        source = look.source.whole()
        if source.is_imagined:
            # The largest batch was only looked for; those to come have values.
            source = source.at(filled(source.batch))
        if model is not None and model is not source.model:
            check_model(model)
            # Another object of the same kind, say one that was loaded meanwhile.
            source = source.on(model)
        elif look.watch is not None:
            look.watch.check()
        if source.graph(micro_batches=1).fingerprint != look.base.graph.fingerprint:
            raise Mismatch(
                "the model traces to another graph than the one that was planned",
                expected="the same modules, modes and parameters as when planning",
                remedy="plan again with the model as it is now",
            )
        return Step(
            plan=self.plan,
            source=source,
            pricing=look.pricing,
            optimizer=look.request.optimizer,
            update=look.base.update,
            sums_gradients=sums_gradients,
        )

    def _refuse_beyond_budget(self) -> None:
        """A plan from a file may be for a smaller batch, or edited: it is shown, and not run."""
        tree = tree_of(self.plan)
        if not tree.fits:
            raise Infeasible(
                f"the plan does not keep its budget: {tree.verdict.partition(': ')[2]}",
                expected="a plan that fits, as this step and this machine are now",
                remedy="plan again, or raise the budget in the plan file",
            )


def check_trade(name: str) -> None:
    known = {t.name for t in TRADES}
    if name not in known:
        raise BadInput(
            f"there is no trade {printable(repr(name)[:40])}",
            expected=f"one of {', '.join(sorted(known))}",
            remedy="see docs/trades for what each pays and buys",
        )


def budget_of(bounds: Mapping[str, Any]) -> Budget:
    unknown = sorted(set(bounds) - set(signature(Budget).parameters))
    if unknown:
        raise BadInput(
            f"a budget has no {unknown[0]}",
            expected=f"some of {', '.join(signature(Budget).parameters)}",
            remedy='what_if(memory="4 GiB"), for example',
        )
    return Budget(**bounds)


def planned(look: Look, budget: Budget) -> Planned:
    look.request.on_progress("searching")
    found, predicted = look.find(budget)
    plan = Plan(
        title=_title(look, found.rules),
        decisions=Decisions(
            made_for=look.made_for(),
            budget=budget,
            rules=found.rules,
            far=look.far_for(found.rules),
            used_ranks=look.used_ranks(found.rules),
        ),
        before=look.before(),
        unplanned=look.unplanned,
        predicted=predicted,
        taken=found.taken,
        refused=found.refused,
        num_offers=found.num_offers,
        frontier=found.frontier if look.request.runner == "python" else (),
        next_cent=found.next_cent if look.request.runner == "python" else None,
        least_bytes=found.least.nbytes if look.request.runner == "python" else 0,
        least_within=found.least_within,
        slowdown=slowdown(found.program, look.base, look.prices.costs),
        predicted_for=look.predicted_for,
        notes=(
            *look.notes(),
            *_batch_held(look, found.rules),
            *look.note_on_links(found.rules, predicted.quad.step_seconds.value),
            *_note_on_state(look, budget, found.program, predicted),
            *note_beyond_eager(look.before(), predicted),
            *((str(found.gap),) if found.gap else ()),
            *(() if look.request.cluster.is_here else note_on_accuracy(budget)),
        ),
    )
    look.prices.rest()
    return Planned(look, plan)


def replanned(look: Look, decisions: Decisions) -> Planned:
    """Decisions from a file on this step: nothing is searched, everything is predicted."""
    program = look.struck(decisions.rules)
    predicted, lost = _lossy(look, decisions, program)
    held = _batch_held(look, decisions.rules)
    home = home_of(look.source.model)
    used = decisions.ranks_used(Layout.of(decisions.rules).num_ranks)
    others = other_than_planned(look.made_for(), decisions.made_for, home, used=used)
    unknown = _note_on_state(look, decisions.budget, program, predicted)
    more = note_beyond_eager(look.before(), predicted)
    notes = [*lost, *look.notes(), *held, *unknown, *more, *others]
    check_far_room(decisions, program)
    limit = decisions.budget.memory_bytes
    if limit is not None and predicted.peak.nbytes > limit:
        notes.append(
            f"does not fit: predicted {format_bytes(predicted.peak.nbytes)}, budget "
            f"{format_bytes(limit)}"
        )
    plan = Plan(
        title=_title(look, decisions.rules),
        decisions=decisions,
        before=look.before(),
        unplanned=look.unplanned,
        predicted=predicted,
        slowdown=slowdown(program, look.base, look.prices.costs),
        predicted_for=look.predicted_for,
        notes=tuple(notes),
    )
    look.prices.rest()
    return Planned(look, plan)


def as_predicted(look: Look, decisions: Decisions, stored: Plan) -> Planned:
    """Decisions from a file with the predictions beside it: nothing is measured or predicted."""
    return Planned(
        look,
        Plan(
            title=_title(look, decisions.rules),
            decisions=decisions,
            before=stored.before,
            unplanned=stored.unplanned,
            predicted=stored.predicted,
            slowdown=stored.slowdown,
            predicted_for=stored.predicted_for,
            notes=stored.notes,
        ),
    )


def check_far_room(decisions: Decisions, program: Program) -> None:
    far = decisions.far
    if far is not None and program.far_bytes > far.size_bytes:
        raise Mismatch(
            f"the plan moves {format_bytes(program.far_bytes)} to {printable(far.folder)}, which "
            f"may hold {format_bytes(far.size_bytes)}",
            expected="a far memory as large as what is moved",
            remedy="allow a larger size under [far], or plan again",
        )


def _batch_held(look: Look, rules: Sequence[Rule]) -> Iterator[str]:
    yield from batch_held(Layout.of(rules), batch_size(look.source.batch) or 1)
    yield from rounded_in_parts(rules, look.base.graph)


def _note_on_state(
    look: Look, budget: Budget, program: Program, predicted: Prediction
) -> Iterator[str]:
    return note_on_state(
        program,
        predicted,
        limit_bytes=budget.memory_bytes,
        is_known=look.request.optimizer is not None,
    )


def _lossy(look: Look, decisions: Decisions, program: Program) -> tuple[Prediction, list[str]]:
    """The program priced; where it is lossy, probed anew if its budget allows any loss."""
    predicted, bound = look.priced(program), decisions.budget.accuracy_loss
    if not program.is_lossy:
        return predicted, []
    kept = "ranks send gradients in codes"
    if count := len(program.coded):
        kept = f"{count} value{'s are' if count > 1 else ' is'} kept in 8 bits"
    if not bound:
        return predicted, [f"does not fit: {kept}, and the accuracy budget is 0"]
    barred = look.lossy.why_not_probed()
    seen = barred or look.lossy.drift_of(decisions.rules, program, bound)
    if isinstance(seen, str):
        return predicted, [f"{kept}, and what that costs is not known: {seen}"]
    quad = replace(predicted.quad, accuracy_loss=str(seen))
    notes = [] if seen.keeps(bound) else [f"does not fit: {beyond(seen, bound)}"]
    return replace(predicted, quad=quad), notes


def _title(look: Look, rules: Sequence[Rule]) -> str:
    ranks = Layout.of(rules).num_ranks
    among = f", {ranks} ranks" if ranks > 1 else ""
    shapes = ", ".join("x".join(map(str, e.shape)) for e in look.source.entries()[:1])
    return f"{look.request.title}, batch {shapes}{among}"
