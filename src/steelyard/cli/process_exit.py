"""The end of the process of a command: all that Python does at its end but the last thing.

Last, Python takes its modules apart and looks through every object for what can be freed. Behind a
plan these are half a million, most of them torch's, and it took a second of CPU time after the last
line was written; the operating system frees them at once.
Not for commands that are called from Python: those return.
"""

import atexit
import contextlib
import os
import sys
import threading
from typing import Never


def leave(code: int) -> Never:
    """Wait for threads, run what was registered for the end, write what is buffered, and end."""
    try:
        # Executors are told to end, and threads that are no daemons are waited for.
        threading._shutdown()  # type: ignore[attr-defined]
        # Temporary folders, child processes, loggers, coverage: all that is due at an end.
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        code = code or 130
    finally:
        for stream in (sys.stdout, sys.stderr):
            # Of a reader who left, or a disk that is full, was spoken before; see exit_codes.py.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code & 0xFF)
