"""From a user's step to a plan, and from a plan file back to one.

Only wires: capture -> measure -> search -> plan. Not for running it: see live.py and training.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from steelyard.api.beyond_eager import note_beyond_eager
from steelyard.api.coded import note_on_accuracy
from steelyard.api.held import batch_held, rounded_in_parts
from steelyard.api.live import Step
from steelyard.api.look import Look, Request, Runner
from steelyard.api.lowering import lowered_frontier
from steelyard.api.made_for import check_cluster, check_made_for, other_than_planned
from steelyard.api.preflight import check_far, floor_of
from steelyard.api.pricing import Progress
from steelyard.api.stored import stored_plan
from steelyard.api.unknown_optimizer import note_on_state
from steelyard.api.workload import Workload
from steelyard.capture.batching import batch_size
from steelyard.capture.deep import cut
from steelyard.capture.fakes import filled
from steelyard.capture.optimizer import OptimizerFactory, check_optimizer
from steelyard.capture.trace import Loss
from steelyard.capture.wrapped import refuse_wrapped
from steelyard.core.accuracy import beyond
from steelyard.core.amounts import format_bytes
from steelyard.core.budget import Budget, Maximize, Minimize
from steelyard.core.cluster import Cluster
from steelyard.core.errors import BadInput, Infeasible, Mismatch
from steelyard.core.explanation import write_plan
from steelyard.core.layout import Layout
from steelyard.core.plan import Decisions, FrontierPoint, Plan, Prediction
from steelyard.core.plan_check import DECOMPOSITIONS, check_file, cluster_for
from steelyard.core.planfile import read_decisions
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


def plan(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    cluster: Cluster | None = None,
    budget: Budget | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    runner: Runner = "python",
    maximize: Maximize | str | None = None,
    minimize: Minimize | str | None = None,
    title: str = "",
    on_progress: Progress = lambda _: None,
) -> "Planned":
    """The cheapest step that stays inside ``budget``, with its reasons."""
    del metric  # a lossy trade promises the drift of its probe, and no score of the model
    _check_step(model, loss, title, on_progress)
    _check_wish(cluster, budget, runner, maximize, minimize)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    request = Request(
        model=model,
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        cluster=cluster or Cluster.here(),
        budget=budget or Budget(),
        runner=runner,
        title=title or type(model).__name__,
        on_progress=on_progress,
    )
    check_far(request.cluster)
    if maximize is not None:
        from steelyard.api.largest import largest

        return largest(request, Maximize(maximize))
    if _is_elsewhere(request, minimize):
        from steelyard.api.elsewhere import Elsewhere

        wish = None if minimize is None else Minimize(minimize)
        return Elsewhere(request=request).planned(request.budget, wish)
    request.check_floor(floor_of(model, batch), request.budget)
    return planned(request.looked_at(within=request.budget), request.budget)


def _is_elsewhere(request: Request, minimize: Minimize | str | None) -> bool:
    """Deep models, and questions about how many devices, for what is only declared."""
    cluster = request.cluster
    if cluster.num_devices == 1 or cluster.is_here:
        return False
    return minimize is not None or cut(request.model) is not None


def _check_step(model: Any, loss: Any, title: Any, on_progress: Any) -> None:
    _check_model(model)
    refuse_wrapped(model)
    heard = callable(on_progress)
    _check("loss", loss, fine=callable(loss), expected="a function loss(model, batch)")
    _check("title", title, fine=isinstance(title, str), expected="a string")
    _check("on_progress", on_progress, fine=heard, expected="a function of one string")


def _check_wish(cluster: Any, budget: Any, runner: Any, maximize: Any, minimize: Any) -> None:
    known = cluster is None or isinstance(cluster, Cluster)
    bound = budget is None or isinstance(budget, Budget)
    _check("cluster", cluster, fine=known, expected="Cluster.here(), or another Cluster")
    _check("budget", budget, fine=bound, expected='Budget(memory="2 GiB")')
    _check("runner", runner, fine=runner in DECOMPOSITIONS, expected=" or ".join(DECOMPOSITIONS))
    if cluster is not None and cluster.num_devices > 1:
        _check_ranks(cluster, runner, maximize)
    asked = maximize is None or maximize in [*Maximize]
    _check("maximize", maximize, fine=asked, expected=" or ".join(Maximize))
    asked = minimize is None or minimize in [*Minimize]
    _check("minimize", minimize, fine=asked, expected=" or ".join(Minimize))
    is_here = cluster is None or cluster.is_here
    if minimize is not None and (is_here or maximize is not None):
        raise BadInput(
            "the fewest devices are asked for " + ("of this machine" if is_here else "twice over"),
            expected="a declared cluster, and one question",
            remedy="name one with --cluster, such as dgx-h100, and leave out --maximize",
        )


def _check_ranks(cluster: Cluster, runner: Any, maximize: Any) -> None:
    if maximize:
        raise BadInput(
            "several ranks are planned for without --maximize",
            expected="one rank, or a budget",
            remedy="leave out --ranks, or --maximize",
        )
    if runner == "inductor" and not cluster.is_here:
        raise BadInput(
            "a declared cluster is planned for without Inductor",
            expected="ranks of this machine, or the python runner",
            remedy="leave out --cluster, or --runner",
        )


def _check_model(model: Any) -> None:
    _check("model", model, fine=isinstance(model, nn.Module), expected="an nn.Module")


def _path(path: Any) -> Path:
    _check("path", path, fine=isinstance(path, (str, Path)), expected="the name of a plan file")
    return Path(path)


def _check(name: str, given: Any, *, fine: bool, expected: str) -> None:
    if not fine:
        raise BadInput(
            f"{name} is {printable(repr(given)[:60])}",
            expected=expected,
            remedy="see docs/python-api.md for what it takes",
        )


def plan_workload(
    workload: Workload,
    *,
    budget: Budget,
    runner: Runner = "python",
    maximize: Maximize | None = None,
    minimize: Minimize | None = None,
    cluster: Cluster | None = None,
    title: str = "",
    on_progress: Progress = lambda _: None,
) -> "Planned":
    return plan(
        workload.model,
        workload.loss,
        workload.first_batch(),
        optimizer=workload.optimizer,
        cluster=cluster,
        budget=budget,
        runner=runner,
        maximize=maximize,
        minimize=minimize,
        title=title,
        on_progress=on_progress,
    )


def load(
    path: str | Path,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    cluster: Cluster | None = None,
    title: str = "",
    on_progress: Progress = lambda _: None,
    predict_anew: bool = False,
) -> "Planned":
    """The plan in this file, checked against this step; ``cluster`` is what it was made for, where
    that is not this machine.

    The predictions beside the file are used where they are of this step, machine and optimizer;
    else, or with ``predict_anew``, the step is measured and predicted here.
    """
    _check_step(model, loss, title, on_progress)
    known = cluster is None or isinstance(cluster, Cluster)
    _check("cluster", cluster, fine=known, expected="the cluster of the plan, or none")
    if optimizer is not None:
        check_optimizer(model, optimizer)
    decisions = read_decisions(_path(path))
    made_for = decisions.made_for
    check_file(path, decisions)
    request = Request(
        model=model,
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        cluster=cluster or cluster_for(decisions),
        budget=decisions.budget,
        runner="inductor" if made_for.runner == "inductor" else "python",
        decomposition=made_for.decomposition,
        title=title or type(model).__name__,
        on_progress=on_progress,
    )
    if cluster is not None:
        check_cluster(decisions, cluster)
        if cluster.num_devices > 1 and not cluster.is_here:
            from steelyard.api.elsewhere import Elsewhere

            where = Elsewhere(request=request)
            if cut(model) is not None or where.made_for().graph == made_for.graph:
                check_made_for(decisions, where.made_for())
                return where.read(decisions)
    look = request.looked_at(is_priced=predict_anew)
    check_made_for(decisions, look.made_for())
    used = decisions.ranks_used(Layout.of(decisions.rules).num_ranks)
    if predict_anew or 1 < len(used) < look.request.cluster.num_devices:
        look.prices.use(used)
        return _replanned(look, decisions)
    program = look.struck_unpriced(decisions.rules)
    _check_far_room(decisions, program)
    found = stored_plan(Path(path), decisions, look, program)
    if isinstance(found, str):
        on_progress(f"predicting anew: {found}")
        return _replanned(look, decisions)
    return _as_predicted(look, decisions, found)


def load_planned(
    path: str | Path,
    workload: Workload,
    *,
    cluster: Cluster | None = None,
    title: str = "",
    on_progress: Progress = lambda _: None,
    predict_anew: bool = False,
) -> "Planned":
    return load(
        path,
        workload.model,
        workload.loss,
        workload.first_batch(),
        optimizer=workload.optimizer,
        cluster=cluster,
        title=title or Path(path).name.split(".")[0],
        on_progress=on_progress,
        predict_anew=predict_anew,
    )


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
        """What eager PyTorch costs, as a Quad."""
        return self.plan.before.quad

    @property
    def predicted(self) -> Quad:
        """What the plan is predicted to cost."""
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
        """What each rank does when, as it is predicted: the step drawn out."""
        look = self._look
        return spans(look.as_run(look.struck(self.plan.decisions.rules)), look.costs)

    def save(self, path: str | Path) -> None:
        """Decisions as TOML to ``path``, predictions as JSON beside it."""
        write_plan(_path(path), self.plan)

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
            _check_model(model)
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


def _replanned(look: Look, decisions: Decisions) -> Planned:
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
    _check_far_room(decisions, program)
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


def _as_predicted(look: Look, decisions: Decisions, stored: Plan) -> Planned:
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


def _check_far_room(decisions: Decisions, program: Program) -> None:
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
