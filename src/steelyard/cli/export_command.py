"""The command ``export``: writes the nearest configuration of another tool, or a launch file.

Not for making it: see export/target.py. Not for pricing it: see planner/export/price.py.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steelyard.cli.arguments import (
    cluster_of,
    explanation_of,
    refuse_same_file,
    refuse_unwritable,
    title,
)
from steelyard.cli.exit_codes import INFEASIBLE, OK
from steelyard.cli.output_options import OutputOptions, hint, load_script, planning
from steelyard.cli.training_script import refuse_no_script, script_path
from steelyard.errors import BadInput
from steelyard.export.target import ExportTarget
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.export.exported import Exported
    from steelyard.hardware.cluster import Cluster
    from steelyard.plans.plan_on_file import PlanOnFile

_DEFAULT_OUTPUT = OutputOptions()


def export(
    plan: Annotated[Path, Parameter(help="The plan file, such as train.plan.toml.")],
    train: Annotated[
        str | None,
        Parameter(help="Its script: the settings are then chosen within the budget, and priced."),
    ] = None,
    /,
    *,
    as_: Annotated[
        ExportTarget,
        Parameter(name="--as", help="The tool whose settings are written, or a launcher."),
    ],
    cluster: Annotated[
        str | None, Parameter(help="The cluster file of the plan, if it has moved.")
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="Default: by the plan and the tool, beside it."),
    ] = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Write a plan as the nearest settings of another tool, or the file that launches it."""
    from steelyard.export.exported import write_export
    from steelyard.plan_files.prediction_file import read_plan
    from steelyard.report import terminal
    from steelyard.report.exported import export_lines
    from steelyard.report.output import show_json

    if plan.suffix != ".toml":
        raise BadInput(
            f"{printable(str(plan))} is not a plan file",
            expected="the plan file first, then its script if settings are to be priced",
            remedy=f"write steelyard export train.plan.toml --as {as_.value}",
        )
    if train is not None:
        refuse_no_script(train, "export")
    stem = plan.name.removesuffix(".toml").removesuffix(".plan")
    path = output or plan.with_name(as_.file_name(stem))
    others = [plan, explanation_of(plan), *([script_path(train)] if train is not None else [])]
    refuse_same_file("-o", path, *others)
    refuse_unwritable(path, "choose another place with -o")
    found = read_plan(plan)
    declared = cluster or found.asked.cluster
    target_cluster = cluster_of(declared, 1, None) if declared else None
    if train is None:
        exported = _from_file(as_, found, plan, path, target_cluster)
    else:
        exported = _with_script(as_, found, plan, train, path, target_cluster, shown)
    write_export(path, exported.file)
    if shown.json:
        show_json({**exported.to_json(), "file": str(path)})
    else:
        width = terminal.width_of(sys.stdout)
        terminal.write(export_lines(exported, path=str(path), width=width), sys.stdout)
        hint(f"next: {exported.command}", shown)
    return OK if exported.fits else INFEASIBLE


def _from_file(
    as_: ExportTarget, found: "PlanOnFile", plan: Path, path: Path, cluster: "Cluster | None"
) -> "Exported":
    """Export a plan from its file alone: nothing is captured, and settings are not priced."""
    from steelyard.export.job import job_of, nodes_of
    from steelyard.export.target import configuration, launch_file, price_of, settings_for

    price = price_of(found.plan)
    if as_.is_launcher:
        script = found.asked.script or f"{plan.name.removesuffix('.toml').removesuffix('.plan')}.py"
        job = job_of(
            found.decisions, script=script, path=str(plan), cluster=cluster, device="", price=price
        )
        return launch_file(as_, job, name=path.name, price=price)
    settings = settings_for(as_, found.decisions, nodes=nodes_of(found.decisions, cluster))
    is_alone = settings.layout.num_ranks == 1
    reason = "name the script as well" if is_alone else "they are for several ranks"
    return configuration(
        as_,
        found.decisions,
        settings,
        name=path.name,
        plan_price=price,
        notes=(f"peak and step of these settings are not predicted: {reason}",),
    )


def _with_script(
    as_: ExportTarget,
    found: "PlanOnFile",
    plan: Path,
    train: str,
    path: Path,
    cluster: "Cluster | None",
    shown: OutputOptions,
) -> "Exported":
    from steelyard.export.target import settings_for

    if not as_.is_launcher:
        # Before torch is imported: a plan that cannot be expressed is refused at once.
        settings_for(as_, found.decisions)
    with planning(shown) as tell:
        workload = load_script(train, tell)
        from steelyard import api

        planned = api.load_planned(
            plan, workload, cluster=cluster, title=title(train), on_progress=tell
        )
        return planned.exported(as_, name=path.name, script=train, path=str(plan))
