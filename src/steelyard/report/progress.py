"""Shows the progress of a command: a bar or a spinner on a terminal, lines and notes in a log.

An error while writing never stops a step.
"""

import contextlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from steelyard.report.terminal import console, encodable, is_terminal, quieten
from steelyard.safe_text import printable
from steelyard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress


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
    """The current activity: a spinner with the elapsed time on a terminal, lines in a log.

    What follows a comma changes often, such as the best plan so far, and is not repeated in a log.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream = stream
        self._begin = time.perf_counter()
        self._logged: set[str] | None = None if quiet else set()
        is_shown = not quiet and is_terminal(stream)
        self._progress = _spinner(stream) if is_shown else None
        self._task = self._progress.add_task("starting", total=None) if self._progress else None

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, doing: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=printable(doing))
        elif self._logged is not None:
            self._log(doing.partition(",")[0], self._logged)

    def _log(self, doing: str, logged: set[str]) -> None:
        if doing in logged:
            return
        logged.add(doing)
        seconds = time.perf_counter() - self._begin
        with contextlib.suppress(OSError):
            line = f"{seconds:4.0f} s  {printable(doing)}\n"
            self._stream.write(encodable(line, self._stream))
            self._stream.flush()


def _spinner(stream: TextIO) -> "Progress":
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    column = Column(no_wrap=True, overflow="ellipsis")
    return Progress(
        SpinnerColumn("line"),
        TextColumn("{task.description}", markup=False, table_column=column),
        TimeElapsedColumn(),
        console=console(stream),
        transient=True,
        redirect_stdout=_shares_the_screen(),
    )


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
