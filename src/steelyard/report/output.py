"""The output of commands: text or JSON on stdout, and an HTML page on request.

Not for the contents (see document.py) or for rendering (see text.py, json.py, html.py).
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from steelyard.errors import BadInput
from steelyard.hardware.diagnosis import DoctorRow, Verdict
from steelyard.plans.lifetimes import StepDetail
from steelyard.plans.plan_on_file import PlanOnFile, explanation_path
from steelyard.plans.scaling_laws import Scaling
from steelyard.report import json as as_json
from steelyard.report import scaling as scaling_report
from steelyard.report import terminal
from steelyard.report.document import ReportDocument, describe_rule
from steelyard.report.styled_text import Line, Tone, Zoom, headed, indented, shown, words
from steelyard.report.text import render
from steelyard.safe_files import write_whole
from steelyard.safe_text import printable


def show(
    tree: ReportDocument,
    *,
    zoom: Zoom = Zoom.RECEIPT,
    in_json: bool = False,
    what_if: ReportDocument | None = None,
    why_not: str = "",
) -> None:
    """Write a plan or receipt, with the answers to ``--what-if`` and ``--why-not`` questions."""
    if in_json:
        document = as_json.to_json(tree)
        if what_if is not None:
            document["what_if"] = as_json.to_json(what_if)
        if why_not:
            document["why_not"] = why_not
        show_json(document)
        return
    width = terminal.width_of(sys.stdout)
    terminal.write(render(tree, width=width, zoom=zoom), sys.stdout)
    if what_if is not None:
        show_text("\nwhat if", tone=Tone.STRONG)
        terminal.write(render(what_if, width=width, zoom=zoom), sys.stdout)
    if why_not:
        show_text(f"\nwhy not: {why_not}")


def show_scaling(scaling: Scaling, *, in_json: bool) -> None:
    if in_json:
        show_json({"schema": "steelyard.scaling/1", **scaling_report.to_json(scaling)})
        return
    width = terminal.width_of(sys.stdout)
    terminal.write(scaling_report.rendered(scaling, width=width), sys.stdout)


def show_text(text: str, *, tone: Tone = Tone.PLAIN, stream: TextIO | None = None) -> None:
    out = stream or sys.stdout
    terminal.write(words(text, width=terminal.width_of(out), tone=tone), out)


def show_json(document: dict[str, Any]) -> None:
    sys.stdout.write(as_json.dumps(document))
    sys.stdout.flush()


def write_page(
    tree: ReportDocument, path: Path | None, *, detail: StepDetail | None = None
) -> None:
    """Write the HTML page to ``path``; if that is None, write nothing."""
    if path is None:
        return
    from steelyard.report.html import to_page

    page = to_page(tree, detail).encode("utf-8")
    if not path.is_symlink() and (path.is_file() or not path.exists()):
        write_whole(path, page, option="--html")
        return
    try:
        # A pipe or a device, such as /dev/stdout, must be written to, not replaced.
        path.write_bytes(page)
    except OSError as error:
        raise BadInput(
            f"{printable(str(path))} cannot be written: {error.strerror}",
            expected="a file name in a folder that can be written to",
            remedy="choose another place with --html",
        ) from None


def show_decisions(found: PlanOnFile, path: Path, *, in_json: bool) -> None:
    """Write the decisions of a plan file without valid predictions.

    The predictions are missing, or older than the last edit of the plan.
    """
    if in_json:
        status = "edited" if found.is_edited else "not predicted"
        document = as_json.decisions_to_json(found.decisions)
        show_json({"schema": "steelyard.decisions/1", "status": status, **document})
        return
    terminal.write(_decisions(found, path, terminal.width_of(sys.stdout)), sys.stdout)


def _decisions(found: PlanOnFile, path: Path, width: int) -> list[Line]:
    decisions = found.decisions
    target = decisions.target
    batch = ", ".join(f"{e.name} {e.dtype} {list(e.shape)}".lstrip() for e in target.batch)
    script = path.name.removesuffix(".toml").removesuffix(".plan") + ".py"
    explanation = explanation_path(path).name
    why = (
        f"{path.name} was edited: the predictions in {explanation} are for the plan before the "
        "edit and are not shown"
        if found.is_edited
        else f"its predictions file does not exist ({explanation})"
    )
    lines = [
        *words(f"plan {decisions.name}  budget: {decisions.budget}", width=width, tone=Tone.STRONG),
        *words(f"runner {target.runner}, torch {target.torch}, batch {batch}", width=width),
        *words(f"decisions ({len(decisions.rules)})", width=width, tone=Tone.STRONG),
    ]
    lines += [l for r in decisions.rules for l in indented(describe_rule(r), width)]
    lines += words(why, width=width, tone=Tone.BAD if found.is_edited else Tone.PLAIN)
    check = shlex.join(("steelyard", "plan", script, "--check", str(path)))
    lines += words(f"next: {check}", width=width, tone=Tone.STRONG)
    return lines


_TONES = {Verdict.OK: Tone.GOOD, Verdict.NOTE: Tone.PLAIN, Verdict.BAD: Tone.BAD}


def show_diagnosis(rows: Sequence[DoctorRow], *, in_json: bool) -> None:
    if in_json:
        show_json({"schema": "steelyard.doctor/1", "rows": [row._asdict() for row in rows]})
        return
    width = terminal.width_of(sys.stdout)
    lines: list[Line] = []
    for row in rows:
        text = f"{row.verdict.value:<4}  {row.name}: {row.value}"
        lines += shown(headed(text[:6], text[6:], width, head_tone=_TONES[row.verdict]))
        if row.remedy:
            lines += shown(headed(" " * 6, row.remedy, width, Tone.STRONG))
    terminal.write(lines, sys.stdout)
