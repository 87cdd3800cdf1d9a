"""``steelyard run``: trains with a plan, in this process or on several ranks; prints the receipt.

Not for reading arguments: see commands.py.
"""

import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.cli.arguments import stopped_at, title, waits_seconds
from steelyard.cli.exit_codes import MISSED, OK, RUN_FAILED, TERMINATED, user_code
from steelyard.cli.output_options import OutputOptions, hint, load_script, planning
from steelyard.cli.rank_launcher import (
    LaunchSpec,
    in_rank,
    is_quiet,
    rank_exit_code,
    renumber_rank,
    should_start_ranks,
    skip_rank,
    start,
)
from steelyard.errors import BadInput
from steelyard.plan_files.plan_file import read_decisions
from steelyard.plans.plan_check import check_startable
from steelyard.report.progress import TrainingProgress
from steelyard.report.styled_text import Tone
from steelyard.report.terminal import write

if TYPE_CHECKING:
    from steelyard.plans.receipt import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The arguments of ``steelyard run``."""

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
        """Return the command-line arguments with which another process does the same."""
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


def run_by(options: RunOptions) -> int:
    spec = LaunchSpec.of(options.path)
    if options.path.is_file():
        check_startable(options.path, read_decisions(options.path))
    if options.adapt and spec.planned_ranks == 1 and options.path.is_file():
        raise BadInput(
            "--adapt has nothing to adapt: the plan is for one rank, which sends no gradients",
            expected="a plan for several ranks",
            remedy="leave out --adapt, or plan with --ranks",
        )
    if should_start_ranks(spec):
        with TrainingProgress(sys.stderr, quiet=options.shown.quiet) as progress:
            return start(
                options.arguments(),
                spec,
                timeout_seconds=options.waits_seconds,
                note=progress.note,
                keeps_logs=options.shown.debug,
            )
    if not renumber_rank(spec):
        return skip_rank(spec, options.shown)
    if is_quiet() and spec.ranks == 1 < spec.planned_ranks:
        hint("the plan uses one rank: this one has nothing to do", options.shown)
        return OK
    if is_quiet():
        options = replace(options, shown=replace(options.shown, quiet=True))
    return rank_exit_code(_train(options, spec))


def _train(options: RunOptions, spec: LaunchSpec) -> int:
    progress = TrainingProgress(sys.stderr, quiet=options.shown.quiet)
    with ExitStack() as group:
        with planning(options.shown) as tell, in_rank(spec):
            from steelyard import api

            if spec.ranks > 1:
                api.seed_everything(options.seed)
                api.keep_to_own_gpu()
            workload = load_script(options.train, tell)
            resume = options.resume
            if spec.ranks > 1:
                tell("connecting to the other ranks")
                group.enter_context(
                    api.joined_ranks(
                        workload,
                        plan=options.path.read_text(),
                        timeout_seconds=options.waits_seconds,
                    )
                )
                resume = resume or _has_saved(options.folder)
            name = title(options.train)
            planned = api.load_planned(options.path, workload, title=name, on_progress=tell)
        # The progress bar ends before the outer contexts, because each context restores the stdout
        # that it found.
        with user_code("training", RUN_FAILED, in_json=options.shown.json), in_rank(spec), progress:
            try:
                receipt = api.run_workload(
                    planned, workload, steps=options.steps, seed=options.seed,
                    checkpoint=options.folder, checkpoint_every=options.every, resume=resume,
                    adapt=options.path if options.adapt else None, losses=options.path,
                    on_step=progress, on_note=progress.note,
                )  # fmt: skip
            except KeyboardInterrupt as stop:
                stop.args = (stopped_at(progress, options.folder),)
                raise
    return OK if is_quiet() else _report(options, receipt, progress)


def _has_saved(folder: Path | None) -> bool:
    """True if restarted ranks have a checkpoint to resume from."""
    from steelyard import api

    return api.restarts() > 0 and folder is not None and any(folder.glob("step-*"))


def _report(options: RunOptions, receipt: "Receipt", progress: TrainingProgress) -> int:
    from steelyard.plan_files.prediction_file import with_reasons, write_explanation
    from steelyard.report.document import tree_of
    from steelyard.report.output import show, write_page

    path, shown = receipt.written or options.path, options.shown
    receipt = replace(receipt, plan=with_reasons(receipt.plan, path))
    tree = tree_of(receipt)
    show(tree, in_json=shown.json)
    write_explanation(path, receipt.plan, receipt.measured)
    write_page(tree, options.html)
    explain_it = shlex.join(("steelyard", "explain", str(path)))
    hint(f"written: {path.with_suffix('.json')}; show it with {explain_it}", shown)
    _hint_at_losses(options)
    if options.folder is None:
        hint("weights were not saved: --checkpoint DIR saves them", shown)
    if receipt.measured.steps < options.steps:
        # Only SIGTERM ends a run early without an error; the receipt covers the steps that ran.
        message = f"steelyard: interrupted{stopped_at(progress, options.folder)}"
        write([((message, Tone.PLAIN),)], sys.stderr)
        return TERMINATED
    return MISSED if options.strict and any(row.is_outside for row in tree.rows) else OK


def _hint_at_losses(options: RunOptions) -> None:
    from steelyard.run.loss_log import losses_path, tensorboard_path

    losses, board = losses_path(options.path), tensorboard_path(options.path)
    if losses.is_file():
        also = f"; tensorboard --logdir {shlex.quote(str(board))}" if board.is_dir() else ""
        hint(f"losses of all steps: {losses}{also}", options.shown)
