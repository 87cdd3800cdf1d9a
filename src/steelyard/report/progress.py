"""Shows the progress of a run: a progress bar on a terminal, or only notes in a log.

An error while writing never stops a step.
"""

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from steelyard.report.terminal import console, encodable, is_terminal, quieten
from steelyard.safe_text import printable
from steelyard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner


class StepProgress(Protocol):
    """A completed step. A metered one has ``peak_bytes`` but no valid ``seconds``."""

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def predicted_bytes(self) -> int: ...


class TrainingProgress:
    """Shows each reported step on a terminal; writes nothing if ``quiet``."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._bar: _Bar | None = None
        self._metered: int | None = None
        self.last: StepProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, step: StepProgress) -> None:
        self.last = step
        self._metered = self._metered if step.peak_bytes is None else step.peak_bytes
        if self._quiet or not is_terminal(self._stream):
            return
        try:
            self._bar = self._bar or _Bar(self._stream, step.steps)
            self._bar.show(step.step, line_of(step, self._metered))
        except OSError:  # the reader closed the stream; training continues
            self._quiet = True
            self._bar = None
            quieten(self._stream)

    def note(self, text: str) -> None:
        """Write a note on a separate line while the run continues."""
        if self._quiet:
            return
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.note(text)
            else:
                self._stream.write(encodable(f"note: {printable(text)}\n", self._stream))
                self._stream.flush()


def line_of(step: StepProgress, metered_bytes: int | None) -> str:
    peak = f"~{format_bytes(step.predicted_bytes)}"
    if metered_bytes is not None:
        peak = f"{format_bytes(metered_bytes)} ({peak})"
    took = "metered" if step.seconds is None else format_seconds(step.seconds)
    return f"loss {step.loss:.4f}  {took}  peak {peak}"


class Status:
    """A spinner with the current activity, shown only on a terminal."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._live: Live | None = None
        self._spinner: Spinner | None = None
        if quiet or not is_terminal(stream):
            return
        from rich import live, spinner

        self._spinner = spinner.Spinner("line", style="status.spinner")
        self._live = live.Live(
            self._spinner,
            console=console(stream),
            refresh_per_second=12.5,
            transient=True,
            redirect_stdout=_shares_the_screen(),
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, doing: str) -> None:
        if self._spinner is not None:
            self._spinner.update(text=printable(doing))


def _shares_the_screen() -> bool:
    """True if stdout is a terminal, so that rich must redirect prints around its display.

    Rich sends redirected prints to its own stream, stderr. If stdout is a file or a pipe, they
    would be missing there.
    """
    return is_terminal(sys.stdout)


class _Bar:
    """A rich progress bar; rich is imported at the first step, and never if output goes to a
    log.
    """

    def __init__(self, stream: TextIO, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        out = console(stream)
        columns = [
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.fields[said]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
        ]
        if out.width >= 60:
            columns.insert(1, BarColumn(bar_width=max(8, min(40, out.width - 62))))  # type: ignore[arg-type]
        if out.width >= 76:
            columns.append(TimeRemainingColumn(compact=True))  # type: ignore[arg-type]
        self._progress = Progress(
            *columns, console=out, expand=out.width < 60, redirect_stdout=_shares_the_screen()
        )
        self._task = self._progress.add_task("", total=steps, said="")
        self._progress.start()

    def show(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, said=text)

    def note(self, text: str) -> None:
        self._progress.console.print(f"note: {printable(text)}")

    def stop(self) -> None:
        self._progress.stop()
