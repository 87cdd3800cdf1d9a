"""The public calls plan() and load(): from a step to a plan, and from a plan file to a plan.

This module only connects capture -> measure -> search -> plan. Not for running a plan: see step.py
and train.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from steelyard.api.argument_checks import check, check_model, path_of
from steelyard.api.planned import Planned, planned
from steelyard.api.planned_cluster import PlannedForCluster, plan_for_cluster
from steelyard.api.workload import Workload
from steelyard.capture.checks.wrapped_models import refuse_wrapped
from steelyard.capture.deep.truncate import cut
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory, check_optimizer
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plan_files.plan_file import read_decisions
from steelyard.planner.compatibility import check_cluster, check_target
from steelyard.planner.cost_provider import Progress
from steelyard.planner.declared_cluster import DeclaredClusterPlanner
from steelyard.planner.max_size import largest
from steelyard.planner.planner import Planner, check_offload_room
from steelyard.planner.preflight import check_offload_memory, floor_of
from steelyard.planner.reuse import planner_for
from steelyard.planner.session import PlanRequest, Runner
from steelyard.planner.stored_predictions import stored_plan
from steelyard.plans.budget import Budget, Effort, Maximize, Minimize
from steelyard.plans.memory_fit import Capacity
from steelyard.plans.plan_check import DECOMPOSITIONS, check_file, cluster_for
from steelyard.plans.stop_request import StopRequest


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
    effort: Effort | str = Effort.NORMAL,
    title: str = "",
    on_progress: Progress = lambda _: None,
    stop: StopRequest | None = None,
) -> "Planned":
    """Return the cheapest plan of the step that stays within ``budget``, with its reasons.

    ``stop`` ends the search on one device early, with the best plan so far.
    """
    del metric  # lossy trades bound the drift of a probe, not a metric of the model
    _check_step(model, loss, title, on_progress)
    _check_options(cluster, budget, runner, maximize, minimize)
    check("effort", effort, fine=effort in [*Effort], expected=" or ".join(Effort))
    if optimizer is not None:
        check_optimizer(model, optimizer)
    request = PlanRequest(
        model=model,
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        cluster=_with_host_memory(cluster or Cluster.here(), budget),
        budget=_with_device_memory(budget or Budget(), cluster),
        runner=runner,
        title=title or type(model).__name__,
        on_progress=on_progress,
        effort=Effort(effort),
    )
    check_offload_memory(request.cluster)
    if maximize is not None:
        return Planned(*largest(request, Maximize(maximize)))
    if _needs_cluster_planner(request, minimize):
        goal = None if minimize is None else Minimize(minimize)
        _refuse_effort(request.effort)
        return plan_for_cluster(DeclaredClusterPlanner(request=request), request.budget, goal)
    request.check_floor(floor_of(model, batch), request.budget)
    return planned(planner_for(request), request.budget, stop=stop)


def _refuse_effort(effort: Effort) -> None:
    if effort is not Effort.NORMAL:
        raise BadInput(
            f"effort {effort} is not supported for a deep model on a declared cluster",
            expected="the search of that planner, which prices one block of the model",
            remedy="leave out effort= (--effort)",
        )


def _with_device_memory(budget: Budget, cluster: Cluster | None) -> Budget:
    """Return the budget; without a bound on memory, a single declared device is the bound."""
    if cluster is None or cluster.is_here or cluster.num_devices > 1:
        return budget
    if budget.memory_bytes is not None:
        return budget
    return replace(budget, memory_bytes=Capacity.of(cluster.device).usable_bytes)


def _with_host_memory(cluster: Cluster, budget: Budget | None) -> Cluster:
    """Return the cluster; a single declared device offloads to its host's memory by default.

    A probe of accuracy runs the step here, where that memory is not.
    """
    if cluster.offload_memory is not None or (budget is not None and budget.accuracy_loss):
        return cluster
    return replace(cluster, offload_memory=cluster.host_memory)


def _needs_cluster_planner(request: PlanRequest, minimize: Minimize | str | None) -> bool:
    """True for deep models, and for questions about the number of devices, on a declared
    cluster.
    """
    cluster = request.cluster
    if cluster.num_devices == 1 or cluster.is_here:
        return False
    return minimize is not None or cut(request.model) is not None


def _check_step(model: Any, loss: Any, title: Any, on_progress: Any) -> None:
    check_model(model)
    refuse_wrapped(model)
    is_callable = callable(on_progress)
    check("loss", loss, fine=callable(loss), expected="a function loss(model, batch)")
    check("title", title, fine=isinstance(title, str), expected="a string")
    check("on_progress", on_progress, fine=is_callable, expected="a function of one string")


def _check_options(cluster: Any, budget: Any, runner: Any, maximize: Any, minimize: Any) -> None:
    known = cluster is None or isinstance(cluster, Cluster)
    bound = budget is None or isinstance(budget, Budget)
    check("cluster", cluster, fine=known, expected="Cluster.here(), or another Cluster")
    check("budget", budget, fine=bound, expected='Budget(memory="2 GiB")')
    check("runner", runner, fine=runner in DECOMPOSITIONS, expected=" or ".join(DECOMPOSITIONS))
    if cluster is not None and cluster.num_devices > 1:
        _check_ranks(cluster, runner, maximize)
    is_known = maximize is None or maximize in [*Maximize]
    check("maximize", maximize, fine=is_known, expected=" or ".join(Maximize))
    is_known = minimize is None or minimize in [*Minimize]
    check("minimize", minimize, fine=is_known, expected=" or ".join(Minimize))
    is_here = cluster is None or cluster.is_here
    if minimize is not None and (is_here or maximize is not None):
        raise BadInput(
            "the fewest devices cannot be searched for "
            + ("on this machine" if is_here else "together with maximize="),
            expected="a declared cluster, and either maximize= or minimize=",
            remedy="name a cluster with --cluster, such as dgx-h100, and leave out --maximize",
        )


def _check_ranks(cluster: Cluster, runner: Any, maximize: Any) -> None:
    if maximize:
        raise BadInput(
            "--maximize is not supported for several ranks",
            expected="one rank, or a plan within a budget",
            remedy="leave out --ranks, or --maximize",
        )
    if runner == "inductor" and not cluster.is_here:
        raise BadInput(
            "the Inductor runner is not supported for declared clusters",
            expected="ranks on this machine, or the python runner",
            remedy="leave out --cluster, or --runner",
        )


def plan_workload(
    workload: Workload,
    *,
    budget: Budget,
    runner: Runner = "python",
    maximize: Maximize | None = None,
    minimize: Minimize | None = None,
    cluster: Cluster | None = None,
    effort: Effort = Effort.NORMAL,
    title: str = "",
    on_progress: Progress = lambda _: None,
    stop: StopRequest | None = None,
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
        effort=effort,
        title=title,
        on_progress=on_progress,
        stop=stop,
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
    """Load a plan file and check it against this step.

    ``cluster`` is the cluster that the plan was made for; it is needed only if that is not this
    machine. The predictions stored with the file are used if they are for this step, machine and
    optimizer. Otherwise, or with ``predict_anew``, the step is measured and predicted here.
    """
    _check_step(model, loss, title, on_progress)
    known = cluster is None or isinstance(cluster, Cluster)
    check("cluster", cluster, fine=known, expected="the cluster of the plan, or none")
    if optimizer is not None:
        check_optimizer(model, optimizer)
    decisions = read_decisions(path_of(path))
    target = decisions.target
    check_file(path, decisions)
    if cluster is not None:
        check_cluster(decisions, cluster)
        if cluster.num_devices == 1 and cluster.offload_memory is None:
            cluster = replace(cluster, offload_memory=decisions.offload_memory)
    request = PlanRequest(
        model=model,
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        cluster=cluster or cluster_for(decisions),
        budget=decisions.budget,
        runner="inductor" if target.runner == "inductor" else "python",
        decomposition=target.decomposition,
        title=title or type(model).__name__,
        on_progress=on_progress,
    )
    if cluster is not None and cluster.num_devices > 1 and not cluster.is_here:
        cluster_planner = DeclaredClusterPlanner(request=request)
        if cut(model) is not None or cluster_planner.target().graph == target.graph:
            check_target(decisions, cluster_planner.target())
            return PlannedForCluster(
                cluster_planner, *cluster_planner.predict(decisions), minimize=None
            )
    session = request.capture_and_price(is_priced=predict_anew)
    planner = Planner(session)
    check_target(decisions, session.target())
    used = decisions.ranks_used(ParallelLayout.of(decisions.rules).num_ranks)
    if predict_anew or 1 < len(used) < session.request.cluster.num_devices:
        session.prices.use_ranks(used)
        return Planned(planner, planner.predict(decisions))
    program = session.apply_rules_unpriced(decisions.rules)
    check_offload_room(decisions, program)
    found = stored_plan(Path(path), decisions, session, program)
    if isinstance(found, str):
        on_progress(f"predicting again: {found}")
        return Planned(planner, planner.predict(decisions))
    return Planned(planner, planner.as_predicted(decisions, found))


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
