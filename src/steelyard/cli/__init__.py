"""The command line. Imports almost nothing until ``main`` runs, so that Ctrl-C causes no traceback.

Not for the commands themselves: see commands.py.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Never

from steelyard.cli.process_exit import leave
from steelyard.cli.signals import InterruptHandler, was_pressed
from steelyard.garbage_collection import without_collection

_INTERRUPTED = 130
# These import torch, which takes seconds.
_LONG = frozenset({"plan", "run", "fit", "why", "demo", "doctor"})
_WITHOUT_PROGRESS = frozenset({"--quiet", "--json", "--help", "-h"})


def command() -> Never:
    """Run ``main``, and end this process with its exit code."""
    leave(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of one command; no exception leaves this function."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _show_start(given)
    with InterruptHandler():
        try:
            with without_collection():
                from steelyard.cli.commands import app
            code = app(given, exit_on_error=False, print_error=False)
            sys.stdout.flush()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the last line
            # An import that is interrupted by Ctrl-C raises errors of any kind.
            if isinstance(error, KeyboardInterrupt) or was_pressed():
                return _interrupted(error, in_json="--json" in given)
            from steelyard.cli.exit_codes import report_failure

            return report_failure(error, given)
    return code if isinstance(code, int) else 0


def _show_start(given: Sequence[str]) -> None:
    """On a terminal, show at once that a long command has started; the next line replaces this."""
    is_short = (
        not given or given[0] not in _LONG or {"--quiet", "--json", "--help", "-h"} & {*given}
    )
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not is_short and sys.stderr.isatty():
            sys.stderr.write("starting\r")
            sys.stderr.flush()


def _interrupted(error: BaseException, *, in_json: bool) -> int:
    """Report the interruption without the usual modules, which may be only half imported."""
    where = str(error.args[0]) if isinstance(error, KeyboardInterrupt) and error.args else ""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"steelyard: interrupted{where}\n")
        sys.stderr.flush()
    try:
        if in_json:
            error_document = {
                "schema": "steelyard.error/1",
                "kind": "Interrupted",
                "exit_code": _INTERRUPTED,
            }
            error_document |= {
                "happened": f"interrupted{where}",
                "expected": "",
                "next": "start it again",
            }
            sys.stdout.write(json.dumps(error_document) + "\n")
            sys.stdout.flush()
    except OSError:
        sys.stdout = None
    return _INTERRUPTED
