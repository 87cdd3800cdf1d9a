"""``steelyard plan``: makes or checks a plan, prints and writes it; also plans on several hosts.

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
from steelyard.cli.output_options import OutputOptions, hint, load_script, planning
from steelyard.cli.rank_launcher import LaunchSpec, num_started
from steelyard.cli.signals import search_stops_first
from steelyard.errors import BadInput, SteelyardError
from steelyard.hardware.cluster import Cluster, OffloadMemory
from steelyard.plans.budget import Budget, Effort, Maximize, Minimize
from steelyard.predict.rank_subsets import named
from steelyard.report.styled_text import Zoom
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.api import HostRendezvous, Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The arguments of ``steelyard plan``."""

    train: str
    path: Path
    is_check: bool
    budget: Budget
    runner: Literal["python", "inductor"]
    maximize: Maximize | None
    minimize: Minimize | None
    effort: Effort
    ranks: int
    speeds: str | None
    cluster: str | None
    host_memory: str | None
    offload_memory: OffloadMemory | None
    what_if: Mapping[str, Any]
    why_not: str | None
    zoom: Zoom
    html: Path | None
    shown: OutputOptions


def plan_by(options: PlanOptions) -> int:
    if num_started() > 1:
        return _on_hosts(options)
    return _here(options)


def _on_hosts(options: PlanOptions) -> int:
    """Multi-host planning: one host plans and broadcasts the plan.

    All processes are started with the same arguments, and each host has the same number of them.
    """
    if options.is_check or options.cluster is not None or options.ranks > 1:
        raise BadInput(
            "this process is one of several that were started together to plan",
            expected="no --check, --cluster or --ranks: the started processes are the ranks of "
            "the plan",
            remedy="leave out that option, or run one process alone",
        )
    from steelyard.plan_files.prediction_file import refuse_to_lose

    # Each host has its own plan file, which may have been edited.
    refuse_to_lose(options.path)
    with planning(options.shown) as tell:
        tell("connecting to the other hosts")
        from steelyard import api

        speeds = speeds_of(options.speeds)
        with api.meeting(_agreed_values(options), speeds=speeds) as rendezvous:
            if not rendezvous.is_planner:
                tell(f"waiting for the plan of rank {rendezvous.planner}")
                return _receive_plan(rendezvous, options)
    try:
        with rendezvous.with_background_load():
            code = _here(options, rendezvous)
    except BaseException as error:
        rendezvous.broadcast(json.dumps({"failed": _error_text(error)}))
        raise
    written = (options.path, options.path.with_suffix(".json"))
    rendezvous.broadcast(
        json.dumps({"code": code, "files": [path.read_text("utf-8") for path in written]})
    )
    return code


class _BroadcastPlan(BaseModel):
    """The message of the planning host: two files and an exit code, or an error."""

    model_config = ConfigDict(strict=True, extra="forbid")

    failed: str | None = None
    code: Annotated[int, Field(ge=0, le=255)] = OK
    files: Annotated[list[str], Field(max_length=2)] = []


def _parse_message(text: str) -> _BroadcastPlan:
    try:
        message = _BroadcastPlan.model_validate_json(text)
    except ValidationError:
        message = _BroadcastPlan()
    if message.failed is None and len(message.files) != 2:
        raise BadInput(
            "the first host sent data that is not a plan",
            expected="a plan file and its predictions",
            remedy="install the same version on all hosts; docs/security.md says who may connect",
        )
    return message


def _agreed_values(options: PlanOptions) -> dict[str, str]:
    """Return the properties that must be equal on all hosts, by name."""
    script = Path(options.train.partition(":")[0])
    return {
        "version of steelyard": __version__,
        "script": options.train,
        "text of the script": script.read_text(errors="replace") if script.is_file() else "",
        "budget": str(options.budget),
        "speeds": str(options.speeds),
        "runner": options.runner,
        "plan file": str(options.path),
    }


def _error_text(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(error, SteelyardError):
        return error.happened
    return printable(f"{type(cause).__name__}: {cause}")


def _receive_plan(rendezvous: "HostRendezvous", options: PlanOptions) -> int:
    from steelyard.safe_files import write_where_other

    message = _parse_message(rendezvous.receive())
    if message.failed is not None:
        raise BadInput(
            f"planning failed on the first host: {printable(message.failed, most=400)}",
            expected="a plan from the first host",
            remedy="follow the message of the first host, and start all hosts again",
        )
    for path, text in zip(
        (options.path, options.path.with_suffix(".json")), message.files, strict=True
    ):
        write_where_other(path, text)
    hint(f"written: {options.path}, received from the first host", options.shown)
    return message.code


def _here(options: PlanOptions, rendezvous: "HostRendezvous | None" = None) -> int:
    from steelyard.plan_files.prediction_file import (
        refuse_to_lose,
        with_reasons,
        write_explanation,
        write_plan,
    )
    from steelyard.plans.plan_on_file import Asked
    from steelyard.report.document import tree_of
    from steelyard.report.output import show, write_page

    path, shown = options.path, options.shown
    if not options.is_check:
        refuse_to_lose(path)
    # Report an invalid cluster file or plan file before importing torch, which takes seconds.
    cluster = _cluster(options, rendezvous)
    with planning(shown) as tell:
        planned = _planned(options, cluster, tell)
        if options.is_check:
            planned.plan = with_reasons(planned.plan, path)
        what_if_tree = tree_of(planned.what_if(**options.what_if).plan) if options.what_if else None
        why_not_text = planned.why_not(options.why_not) if options.why_not else ""
        detail = planned.detail() if options.html else None
    plan = planned.plan
    tree = tree_of(plan)
    show(tree, zoom=options.zoom, in_json=shown.json, what_if=what_if_tree, why_not=why_not_text)
    json_name = path.with_suffix(".json").name
    if options.is_check:
        write_explanation(path, plan)
    else:
        write_plan(path, plan, asked=Asked(script=options.train, cluster=options.cluster or ""))
    write_page(tree, options.html, detail=detail)
    written = f"{path} and {json_name}"
    hint(f"written: {json_name if options.is_check else written}", shown)
    if options.cluster is None:
        spec = LaunchSpec.of(path)
        if rendezvous is not None and spec.hosts == 1 < spec.ranks:
            # Otherwise each rank would find that its links are unmeasured, and all would measure
            # them at the same time.
            from steelyard import api

            api.probe_local_ranks(spec.ranks, planned.session.source.model)
        hint(f"next: {_next_command(options, spec)}", shown)
    return OK if tree.fits else INFEASIBLE


def _planned(options: PlanOptions, cluster: Cluster | None, tell: Any) -> "Planned":
    workload = load_script(options.train, tell)
    from steelyard import api

    if options.is_check:
        return api.load_planned(
            options.path, workload, cluster=cluster, title=title(options.train), on_progress=tell,
            predict_anew=True,
        )  # fmt: skip
    with search_stops_first() as stop:

        def progress(doing: str) -> None:
            tell(f"{doing}; Ctrl-C keeps it" if stop.is_possible and "so far" in doing else doing)

        return api.plan_workload(
            workload, budget=options.budget, runner=options.runner, maximize=options.maximize,
            minimize=options.minimize, effort=options.effort, cluster=cluster,
            title=title(options.train), on_progress=progress, stop=stop,
        )  # fmt: skip


def _cluster(options: PlanOptions, rendezvous: "HostRendezvous | None") -> Cluster | None:
    """Return the cluster to plan for; None if a checked plan file is for this machine."""
    if options.is_check:
        return planned_for(options.train, options.path, options.cluster)[2]
    ranks, hosts = (
        (options.ranks, 1) if rendezvous is None else (rendezvous.num_ranks, rendezvous.hosts)
    )
    found = cluster_of(
        options.cluster, ranks, options.offload_memory, hosts=hosts, speeds=options.speeds
    )
    if options.host_memory is None:
        return found
    return Cluster.gpu(found.device.kind, host_memory=options.host_memory)


def _next_command(options: PlanOptions, spec: LaunchSpec) -> str:
    run_it = ["run", options.train, "--plan", str(options.path), "--steps", "100"]
    run_arguments = shlex.join([*run_it, "--checkpoint", "saved"])
    if spec.hosts == 1:
        host_text = f"on {named(spec.used_hosts)}, " if spec.planned_hosts > 1 else ""
        return f"{host_text}steelyard {run_arguments}"
    where = "each host" if spec.hosts == spec.planned_hosts else named(spec.used_hosts)
    return f"on {where}, {spec.torchrun} ... -m steelyard {run_arguments}"
