"""``steelyard run``: training by a plan, here or on several ranks, and the receipt.

Not for reading arguments: see commands.py.
"""

import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.cli.arguments import stopped_at, title, waits_seconds
from steelyard.cli.exit_codes import MISSED, OK, RUN_FAILED, TERMINATED, foreseen
from steelyard.cli.output_options import OutputOptions, hint, loaded, planning
from steelyard.cli.rank_launcher import (
    LaunchSpec,
    in_rank,
    is_quiet,
    is_to_start,
    leave_out,
    left_with,
    start,
    take_place,
)
from steelyard.errors import BadInput
from steelyard.plans.plan_check import check_startable
from steelyard.plans.plan_file import read_decisions
from steelyard.report.progress import TrainingProgress
from steelyard.report.styled_text import Tone
from steelyard.report.terminal import write

if TYPE_CHECKING:
    from steelyard.plans.receipt import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What was asked of ``steelyard run``."""

    train: str
    path: Path
    steps: int
    folder: Path | None
    every: int
    resume: Path | bool
    seed: int
    strict: bool
    adapt: bool
    rank_timeout: str
    html: Path | None
    shown: OutputOptions

    @property
    def waits_seconds(self) -> float:
        return waits_seconds(self.rank_timeout)

    def arguments(self) -> list[str]:
        """What makes another process do the same."""
        given = ["run", self.train, "--plan", str(self.path), "--steps", str(self.steps)]
        given += ["--seed", str(self.seed), "--rank-timeout", self.rank_timeout]
        if self.folder is not None:
            given += ["--checkpoint", str(self.folder), "--checkpoint-every", str(self.every)]
        if self.resume is not False:
            given += ["--resume", *([] if self.resume is True else [str(self.resume)])]
        given += ["--html", str(self.html)] if self.html else []
        flags = {"--strict": self.strict, "--json": self.shown.json, "--quiet": self.shown.quiet}
        flags |= {"--debug": self.shown.debug, "--adapt": self.adapt}
        return [*given, *(flag for flag, is_set in flags.items() if is_set)]


def run_by(asked: RunOptions) -> int:
    laid = LaunchSpec.of(asked.path)
    if asked.path.is_file():
        check_startable(asked.path, read_decisions(asked.path))
    if asked.adapt and laid.among == 1 and asked.path.is_file():
        raise BadInput(
            "--adapt has nothing to adapt: the plan is for one rank, which sends no gradients",
            expected="a plan for several ranks",
            remedy="leave out --adapt, or plan with --ranks",
        )
    if is_to_start(laid):
        with TrainingProgress(sys.stderr, quiet=asked.shown.quiet) as progress:
            return start(
                asked.arguments(),
                laid,
                timeout_seconds=asked.waits_seconds,
                note=progress.note,
                keeps_logs=asked.shown.debug,
            )
    if not take_place(laid):
        return leave_out(laid, asked.shown)
    if is_quiet() and laid.ranks == 1 < laid.among:
        hint("the plan lies on one rank: this one has nothing to do", asked.shown)
        return OK
    if is_quiet():
        asked = replace(asked, shown=replace(asked.shown, quiet=True))
    return left_with(_trained(asked, laid))


def _trained(asked: RunOptions, laid: LaunchSpec) -> int:
    progress = TrainingProgress(sys.stderr, quiet=asked.shown.quiet)
    with ExitStack() as group:
        with planning(asked.shown) as tell, in_rank(laid):
            from steelyard import api

            if laid.ranks > 1:
                api.seed_everything(asked.seed)
                api.keep_to_own_gpu()
            workload = loaded(asked.train, tell)
            resume = asked.resume
            if laid.ranks > 1:
                tell("meeting the other ranks")
                group.enter_context(
                    api.joined_ranks(
                        workload, plan=asked.path.read_text(), timeout_seconds=asked.waits_seconds
                    )
                )
                resume = resume or _has_saved(asked.folder)
            name = title(asked.train)
            planned = api.load_planned(asked.path, workload, title=name, on_progress=tell)
        # The bar ends before what stands round it: each puts back the stdout that it found.
        with foreseen("training", RUN_FAILED, in_json=asked.shown.json), in_rank(laid), progress:
            try:
                receipt = api.run_workload(
                    planned, workload, steps=asked.steps, seed=asked.seed,
                    checkpoint=asked.folder, checkpoint_every=asked.every, resume=resume,
                    adapt=asked.path if asked.adapt else None, losses=asked.path,
                    on_step=progress, on_note=progress.note,
                )  # fmt: skip
            except KeyboardInterrupt as stop:
                stop.args = (stopped_at(progress, asked.folder),)
                raise
    return OK if is_quiet() else _told(asked, receipt, progress)


def _has_saved(folder: Path | None) -> bool:
    """Whether ranks that were started again have something to go on from."""
    from steelyard import api

    return api.restarts() > 0 and folder is not None and any(folder.glob("step-*"))


def _told(asked: RunOptions, receipt: "Receipt", progress: TrainingProgress) -> int:
    from steelyard.plans.prediction_file import with_reasons, write_explanation
    from steelyard.report.document import tree_of
    from steelyard.report.output import show, write_page

    path, shown = receipt.written or asked.path, asked.shown
    receipt = replace(receipt, plan=with_reasons(receipt.plan, path))
    tree = tree_of(receipt)
    show(tree, in_json=shown.json)
    write_explanation(path, receipt.plan, receipt.measured)
    write_page(tree, asked.html)
    explain_it = shlex.join(("steelyard", "explain", str(path)))
    hint(f"written: {path.with_suffix('.json')}, for {explain_it}", shown)
    _tell_losses(asked)
    if asked.folder is None:
        hint("weights were not kept: --checkpoint DIR saves them", shown)
    if receipt.measured.steps < asked.steps:
        # Only SIGTERM ends a run early and in good order; the receipt is of what was run.
        said = f"steelyard: interrupted{stopped_at(progress, asked.folder)}"
        write([((said, Tone.PLAIN),)], sys.stderr)
        return TERMINATED
    return MISSED if asked.strict and any(row.is_outside for row in tree.rows) else OK


def _tell_losses(asked: RunOptions) -> None:
    from steelyard.run.loss_log import losses_path, tensorboard_path

    losses, board = losses_path(asked.path), tensorboard_path(asked.path)
    if losses.is_file():
        also = f"; tensorboard --logdir {shlex.quote(str(board))}" if board.is_dir() else ""
        hint(f"losses of all steps: {losses}{also}", asked.shown)
