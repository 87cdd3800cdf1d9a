"""The scaling study of a declared cluster: steps on ever more devices, at a fixed and a growing
batch.

This module only connects other parts. Not for one plan: see planner/declared_cluster.py.
"""

from collections.abc import Iterator

from steelyard.api.workload import Workload
from steelyard.errors import BadInput, Infeasible
from steelyard.hardware.cluster import Cluster
from steelyard.planner.cost_provider import Progress
from steelyard.planner.declared_cluster import DeclaredClusterPlanner
from steelyard.planner.plan_notes import GROWN
from steelyard.planner.session import PlanRequest
from steelyard.plans.budget import Budget
from steelyard.plans.plan import BatchEntry
from steelyard.plans.scaling_laws import Run, ScalePoint, Scaling, check_devices
from steelyard.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.uncertainty import widest_error_note
from steelyard.units import format_bytes


def scale_workload(
    workload: Workload,
    *,
    cluster: Cluster,
    fewest: int,
    most: int,
    budget: Budget,
    samples: int | None = None,
    tokens: int | None = None,
    title: str = "",
    on_progress: Progress = lambda _: None,
) -> Scaling:
    request = PlanRequest(
        model=workload.model,
        loss=workload.loss,
        batch=workload.first_batch(),
        optimizer=workload.optimizer,
        cluster=cluster,
        budget=budget,
        runner="python",
        title=title or type(workload.model).__name__,
        on_progress=on_progress,
    )
    return scaling_study(request, fewest=fewest, most=most, samples=samples, tokens=tokens)


def scaling_study(
    request: PlanRequest,
    *,
    fewest: int,
    most: int,
    samples: int | None = None,
    tokens: int | None = None,
) -> Scaling:
    """Plan the step on each number of devices.

    ``samples`` or ``tokens`` is the length of the whole training; with it, hours and prices are
    reported.
    """
    planner = DeclaredClusterPlanner(request=request)
    cluster = request.cluster
    check_devices(cluster, fewest, most)
    if tokens is not None:
        samples = tokens // tokens_of_a_sample(planner.step.entries)
    points = []
    for devices in _device_counts(fewest, most):
        request.on_progress(f"searching on {devices} devices")
        grown = planner.search.with_samples(planner.step.num_samples * devices // fewest)
        points.append(
            ScalePoint(
                devices=devices,
                same_batch=_run(planner, planner.search, devices, samples),
                grown_batch=_run(planner, grown, devices, samples),
            )
        )
    _refuse_no_fit(points)
    limit = planner.search.limit_bytes(request.budget)
    found = [planner.search.fastest(point.devices, limit) for point in points]
    layouts = [plan.layout for plan in found if plan is not None]
    return Scaling(
        title=f"{request.title}, {planner.step.num_samples} samples a step",
        cluster=cluster.tree.name,
        points=tuple(points),
        notes=(
            f"nothing was measured: links at their declared rates, {cluster.rates_said}",
            widest_error_note(planner.search, layouts),
            f"each row is the fastest layout with at most {format_bytes(limit)} a rank",
            GROWN,
        ),
    )


def _refuse_no_fit(points: list[ScalePoint]) -> None:
    if points[0].same_batch is None:
        raise Infeasible(
            f"the step does not fit on {points[0].devices} devices, the smallest number compared",
            expected="a smallest number of devices on which some layout fits",
            remedy="start with more devices: steelyard plan ... --minimize devices prints how "
            "many are needed",
        )


def _run(
    planner: DeclaredClusterPlanner, search: ClusterSearch, devices: int, samples: int | None
) -> Run | None:
    plan = search.fastest(devices, search.limit_bytes(planner.request.budget))
    if plan is None:
        return None
    seconds = plan.step.step_seconds
    each = search.num_samples
    hours = None if samples is None else samples / each * seconds / 3600
    price = planner.request.cluster.tree.usd_per_hour_of(devices)
    usd = None if price is None or hours is None else hours * price
    return Run(layout=_layout_name(plan), samples=each, step_seconds=seconds, hours=hours, usd=usd)


def _layout_name(plan: ClusterPlan) -> str:
    """Return a short name of the layout, such as ``d64 t8 p2``: data, tensor and pipeline degrees.

    ``z3`` is appended for ZeRO-style sharded state, ``host`` for tensors offloaded to host memory.
    """
    layout = plan.layout
    degrees = (("d", layout.data), ("t", layout.tensor), ("p", layout.pipeline))
    parts = [f"{letter}{degree}" for letter, degree in degrees if degree > 1]
    if layout.state_stage:
        parts.append(f"z{layout.state_stage}")
    if layout.offloads_state or any(
        policy.is_offloaded for stage in plan.stages for policy, _ in stage
    ):
        parts.append("host")
    return " ".join(parts) or "1"


def _device_counts(fewest: int, most: int) -> Iterator[int]:
    devices = fewest
    while devices < most:
        yield devices
        devices *= 2
    yield most


def tokens_of_a_sample(entries: tuple[BatchEntry, ...]) -> int:
    """Return the row length of the first integer tensor with one row per sample."""
    for entry in entries:
        if len(entry.shape) == 2 and entry.dtype.startswith("int"):
            return entry.shape[1]
    raise BadInput(
        "the batch holds no tokens: it has no integer tensor with a row for each sample",
        expected="a batch of tokens, for --tokens",
        remedy="give the length of the training with --samples",
    )
