"""``steelyard plan``: a plan made or checked, shown and written; on several hosts by the first.

Not for reading arguments: see commands.py.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard import __version__
from steelyard.cli.arguments import cluster_of, planned_for, speeds_of, title
from steelyard.cli.exit_codes import INFEASIBLE, OK
from steelyard.cli.output_options import OutputOptions, hint, loaded, planning
from steelyard.cli.rank_launcher import LaunchSpec, num_started
from steelyard.errors import BadInput, SteelyardError
from steelyard.hardware.cluster import Cluster, OffloadMemory
from steelyard.plans.budget import Budget, Maximize, Minimize
from steelyard.predict.rank_subsets import named
from steelyard.report.styled_text import Zoom
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.api import HostRendezvous, Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What was asked of ``steelyard plan``."""

    train: str
    path: Path
    is_check: bool
    budget: Budget
    runner: Literal["python", "inductor"]
    maximize: Maximize | None
    minimize: Minimize | None
    ranks: int
    speeds: str | None
    cluster: str | None
    offload_memory: OffloadMemory | None
    what_if: Mapping[str, Any]
    why_not: str | None
    zoom: Zoom
    html: Path | None
    shown: OutputOptions


def plan_by(wanted: PlanOptions) -> int:
    if num_started() > 1:
        return _on_hosts(wanted)
    return _here(wanted)


def _on_hosts(wanted: PlanOptions) -> int:
    """As many processes on each, all asked the same: the first plans, and all have it."""
    if wanted.is_check or wanted.cluster is not None or wanted.ranks > 1:
        raise BadInput(
            "this process is one of several that were started together to make a plan",
            expected="no --check, --cluster or --ranks: they are the ranks of this plan",
            remedy="leave it out, or ask one process alone",
        )
    from steelyard.plans.prediction_file import refuse_to_lose

    # Each host has a file of its own, which may have been edited.
    refuse_to_lose(wanted.path)
    with planning(wanted.shown) as tell:
        tell("meeting the other hosts")
        from steelyard import api

        speeds = speeds_of(wanted.speeds)
        with api.meeting(_in_words(wanted), speeds=speeds) as met:
            if not met.is_planner:
                tell(f"waiting for the plan of rank {met.planner}")
                return _taken_over(met, wanted)
    try:
        with met.in_company():
            code = _here(wanted, met)
    except BaseException as error:
        met.tell(json.dumps({"failed": _said(error)}))
        raise
    written = (wanted.path, wanted.path.with_suffix(".json"))
    met.tell(json.dumps({"code": code, "files": [path.read_text("utf-8") for path in written]}))
    return code


class _BroadcastPlan(BaseModel):
    """What the first host tells the others: two files and an exit code, or what went wrong."""

    model_config = ConfigDict(strict=True, extra="forbid")

    failed: str | None = None
    code: Annotated[int, Field(ge=0, le=255)] = OK
    files: Annotated[list[str], Field(max_length=2)] = []


def _told(text: str) -> _BroadcastPlan:
    try:
        told = _BroadcastPlan.model_validate_json(text)
    except ValidationError:
        told = _BroadcastPlan()
    if told.failed is None and len(told.files) != 2:
        raise BadInput(
            "what the first host told is no plan",
            expected="a plan file, and what is predicted of it",
            remedy="install one version on all hosts; who may come there: docs/security.md",
        )
    return told


def _in_words(wanted: PlanOptions) -> dict[str, str]:
    """What has to be the same on all hosts, by name."""
    script = Path(wanted.train.partition(":")[0])
    return {
        "version of steelyard": __version__,
        "script": wanted.train,
        "text of the script": script.read_text(errors="replace") if script.is_file() else "",
        "budget": str(wanted.budget),
        "speeds": str(wanted.speeds),
        "runner": wanted.runner,
        "plan file": str(wanted.path),
    }


def _said(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(error, SteelyardError):
        return error.happened
    return printable(f"{type(cause).__name__}: {cause}")


def _taken_over(met: "HostRendezvous", wanted: PlanOptions) -> int:
    from steelyard.safe_files import write_where_other

    told = _told(met.hear())
    if told.failed is not None:
        raise BadInput(
            f"the first host made no plan: {printable(told.failed, most=400)}",
            expected="what it says there",
            remedy="do what it says there, and start all again",
        )
    for path, text in zip((wanted.path, wanted.path.with_suffix(".json")), told.files, strict=True):
        write_where_other(path, text)
    hint(f"written: {wanted.path}, as the first host planned it", wanted.shown)
    return told.code


def _here(wanted: PlanOptions, met: "HostRendezvous | None" = None) -> int:
    from steelyard.plans.prediction_file import (
        Asked,
        refuse_to_lose,
        with_reasons,
        write_explanation,
        write_plan,
    )
    from steelyard.report.document import tree_of
    from steelyard.report.output import show, write_page

    path, shown = wanted.path, wanted.shown
    if not wanted.is_check:
        refuse_to_lose(path)
    # What is wrong in a cluster file or a plan file is said before seconds of importing torch.
    cluster = _cluster(wanted, met)
    with planning(shown) as tell:
        planned = _planned(wanted, cluster, tell)
        if wanted.is_check:
            planned.plan = with_reasons(planned.plan, path)
        other = tree_of(planned.what_if(**wanted.what_if).plan) if wanted.what_if else None
        reason = planned.why_not(wanted.why_not) if wanted.why_not else ""
    plan = planned.plan
    tree = tree_of(plan)
    show(tree, zoom=wanted.zoom, in_json=shown.json, what_if=other, why_not=reason)
    beside = path.with_suffix(".json").name
    if wanted.is_check:
        write_explanation(path, plan)
    else:
        write_plan(path, plan, asked=Asked(script=wanted.train, cluster=wanted.cluster or ""))
    write_page(tree, wanted.html)
    written = f"{path}, and beside it {beside}"
    hint(f"written: {beside if wanted.is_check else written}", shown)
    if wanted.cluster is None:
        laid = LaunchSpec.of(path)
        if met is not None and laid.hosts == 1 < laid.ranks:
            # Its ranks would each find that nobody has measured them, all at one time.
            from steelyard import api

            api.probe_local_ranks(laid.ranks, planned.session.source.model)
        hint(f"next: {_next(wanted, laid)}", shown)
    return OK if tree.fits else INFEASIBLE


def _planned(wanted: PlanOptions, cluster: Cluster | None, tell: Any) -> "Planned":
    workload = loaded(wanted.train, tell)
    from steelyard import api

    if wanted.is_check:
        return api.load_planned(
            wanted.path, workload, cluster=cluster, title=title(wanted.train), on_progress=tell,
            predict_anew=True,
        )  # fmt: skip
    return api.plan_workload(
        workload, budget=wanted.budget, runner=wanted.runner, maximize=wanted.maximize,
        minimize=wanted.minimize, cluster=cluster, title=title(wanted.train),
        on_progress=tell,
    )  # fmt: skip


def _cluster(wanted: PlanOptions, met: "HostRendezvous | None") -> Cluster | None:
    """What is planned for; of a plan file that is checked, None where that is this machine."""
    if wanted.is_check:
        return planned_for(wanted.train, wanted.path, wanted.cluster)[2]
    ranks, hosts = (wanted.ranks, 1) if met is None else (met.num_ranks, met.hosts)
    return cluster_of(
        wanted.cluster, ranks, wanted.offload_memory, hosts=hosts, speeds=wanted.speeds
    )


def _next(wanted: PlanOptions, laid: LaunchSpec) -> str:
    run_it = ["run", wanted.train, "--plan", str(wanted.path), "--steps", "100"]
    said = shlex.join([*run_it, "--checkpoint", "saved"])
    if laid.hosts == 1:
        alone = f"on {named(laid.used_hosts)}, " if laid.among_hosts > 1 else ""
        return f"{alone}steelyard {said}"
    where = "each host" if laid.hosts == laid.among_hosts else named(laid.used_hosts)
    return f"on {where}, {laid.torchrun} ... -m steelyard {said}"
