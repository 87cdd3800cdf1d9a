"""The command ``why``: names the tensors that fill the device, before and after a plan.

Not for comparing the peaks: see report/peak/causes.py.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steelyard.cli.arguments import (
    explanation_of,
    refuse_same_file,
    refuse_unwritable,
    title,
)
from steelyard.cli.exit_codes import INFEASIBLE, OK
from steelyard.cli.output_options import OutputOptions, hint, load_script, planning
from steelyard.cli.training_script import refuse_no_script, script_path
from steelyard.errors import BadInput, Infeasible
from steelyard.plans.budget import Budget
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.api import Planned, Workload
    from steelyard.report.progress import Status

_DEFAULT_OUTPUT = OutputOptions()


def why(
    train: Annotated[
        str,
        Parameter(help="Script with a workload() function; train.py:name selects one of several."),
    ],
    /,
    *,
    memory: Annotated[
        str | None, Parameter(help="The memory that was too small, such as 8GiB; it is planned.")
    ] = None,
    plan: Annotated[
        Path | None, Parameter(help="Compare with this plan file instead of a new plan.")
    ] = None,
    html: Annotated[Path | None, Parameter(help="Also write one HTML page.")] = None,
    shown: OutputOptions = _DEFAULT_OUTPUT,
) -> int:
    """Name the tensors that fill the device, why they are alive, and how a plan changes that."""
    from steelyard.report import terminal
    from steelyard.report.document import tree_of
    from steelyard.report.output import show_json, write_page
    from steelyard.report.peak.causes import causes_of
    from steelyard.report.peak.rendering import cause_lines, to_json

    refuse_no_script(train, "why")
    if plan is not None and memory is not None:
        raise BadInput(
            "--plan and --memory were given together",
            expected="a plan file, which has a budget, or a budget to plan for",
            remedy="leave out one of the two",
        )
    if plan is not None and not plan.is_file():
        raise BadInput(
            f"{printable(str(plan))} does not exist",
            expected="a plan file, such as train.plan.toml",
            remedy=f"make one: steelyard plan {shlex.quote(train)} --memory 8GiB -o "
            f"{shlex.quote(str(plan))}",
        )
    inputs = [script_path(train)] + ([plan, explanation_of(plan)] if plan is not None else [])
    refuse_same_file("--html", html, *inputs)
    refuse_unwritable(html, "choose another place with --html")
    budget = Budget(memory)
    with planning(shown) as tell:
        workload = load_script(train, tell)
        refusal = remedy = ""
        try:
            planned = _planned(train, workload, budget, plan, tell)
        except Infeasible as error:
            # The tensors can be named even if no plan fits.
            refusal, remedy = error.happened, error.remedy
            planned = _planned(train, workload, Budget(), None, tell)
        detail = planned.detail()
    known = planned.plan.decisions.budget.memory_bytes
    found = causes_of(
        planned.plan, detail, budget_bytes=budget.memory_bytes or known, refusal=refusal
    )
    if shown.json:
        show_json(to_json(found))
    else:
        width = terminal.width_of(sys.stdout)
        terminal.write(cause_lines(found, width=width), sys.stdout)
    write_page(tree_of(planned.plan), html, detail=detail)
    if refusal:
        hint(f"next: {remedy}", shown)
    elif plan is None:
        words = ["steelyard", "plan", train, "--memory", memory or "8GiB"]
        hint(f"next: {shlex.join(words)}", shown)
    return INFEASIBLE if refusal else OK


def _planned(
    train: str, workload: "Workload", budget: Budget, path: Path | None, tell: "Status"
) -> "Planned":
    from steelyard import api

    if path is None:
        return api.plan_workload(
            workload, budget=budget, runner="python", maximize=None, title=title(train),
            on_progress=tell,
        )  # fmt: skip
    from steelyard.plan_files.prediction_file import with_reasons

    planned = api.load_planned(path, workload, title=title(train), on_progress=tell)
    planned.plan = with_reasons(planned.plan, path)
    return planned
