"""The command line. Imports next to nothing until ``main`` runs, so that Ctrl-C meets no traceback.

Not for what the verbs do: see commands.py.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Never

from steelyard.cli.process_exit import leave
from steelyard.cli.signals import InterruptHandler, was_pressed

_INTERRUPTED = 130


def command() -> Never:
    """The command as a process of its own: ``main``, and then the end of the process."""
    leave(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one command; nothing else ever leaves it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with InterruptHandler():
        try:
            from steelyard.cli.commands import app

            code = app(given, exit_on_error=False, print_error=False)
            sys.stdout.flush()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the last line
            # An import that Ctrl-C cut short ends in errors of any kind.
            if isinstance(error, KeyboardInterrupt) or was_pressed():
                return _interrupted(error, in_json="--json" in given)
            from steelyard.cli.exit_codes import ended

            return ended(error, given)
    return code if isinstance(code, int) else 0


def _interrupted(error: BaseException, *, in_json: bool) -> int:
    """Says so by itself: what says everything else may be half imported."""
    where = str(error.args[0]) if isinstance(error, KeyboardInterrupt) and error.args else ""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"steelyard: interrupted{where}\n")
        sys.stderr.flush()
    try:
        if in_json:
            said = {"schema": "steelyard.error/1", "kind": "Interrupted", "exit_code": _INTERRUPTED}
            said |= {"happened": f"interrupted{where}", "expected": "", "next": "start it again"}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
    except OSError:
        sys.stdout = None
    return _INTERRUPTED
