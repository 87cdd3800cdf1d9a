"""Helpers of several commands: output options, loading a user's script, a final hint.

Not for any single command: see commands.py.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steelyard.cli.exit_codes import BAD_INPUT, user_code
from steelyard.cli.signals import handle_interrupts
from steelyard.report.progress import Status
from steelyard.report.styled_text import Tone
from steelyard.report.terminal import write

if TYPE_CHECKING:
    from steelyard.api import Workload


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The amount and format of output."""

    json: Annotated[bool, Parameter(negative="", help="One JSON document, errors too.")] = False
    quiet: Annotated[bool, Parameter(negative="", help="No progress and no hints.")] = False
    debug: Annotated[bool, Parameter(negative="", help="Show tracebacks.")] = False


@contextmanager
def planning(shown: OutputOptions) -> Iterator[Status]:
    with (
        user_code("planning", BAD_INPUT, in_json=shown.json),
        Status(sys.stderr, quiet=shown.quiet) as tell,
    ):
        yield tell


def load_script(train: str, tell: Status) -> "Workload":
    tell("importing torch")
    from steelyard import api

    handle_interrupts()
    tell(f"loading {train}")
    return api.load_workload(train)


def hint(text: str, shown: OutputOptions) -> None:
    if not (shown.quiet or shown.json):
        write([((text, Tone.FAINT),)], sys.stdout)
