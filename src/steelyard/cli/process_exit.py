"""Ends a command's process like Python, but without the last step of Python's exit.

In that step Python tears down its modules and searches all objects for garbage. After planning
there are half a million objects, most of them torch's, and the step takes a second of CPU time
after the last line of output. The operating system frees their memory at once anyway. Not for
commands called from Python: those return.
"""

import atexit
import contextlib
import os
import sys
import threading
from typing import Never


def leave(code: int) -> Never:
    """Wait for threads, run the registered exit handlers, flush all output, and end the process."""
    try:
        # Executors are shut down, and non-daemon threads are joined.
        threading._shutdown()  # type: ignore[attr-defined]
        # Runs all exit handlers: temporary folders, child processes, loggers, coverage.
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        code = code or 130
    finally:
        for stream in (sys.stdout, sys.stderr):
            # A closed pipe or a full disk was reported before; see exit_codes.py.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code & 0xFF)
