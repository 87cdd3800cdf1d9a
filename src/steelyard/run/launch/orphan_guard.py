"""Stands before a rank's command for a moment, so that no rank outlives its launcher.

``python orphan_guard.py PARENT COMMAND...`` asks the kernel to kill this process when its parent
ends, and becomes COMMAND; the wish survives the exec. So it holds before the command has run its
first line, whatever the command is, and when the launcher is killed with SIGKILL, which nothing in
the launcher could answer. A pipe that closes would need somebody in the rank to read it. Not for
what a rank starts itself: while it lives that shares the rank's process group, which is killed
whole; if the launcher is killed too, it has to notice alone (torch's data workers do). Ranks but
the first write into their folder (see run_files.py) from here on. Imports nothing of ours: it is
run by path, without site-packages.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before the wish was made.
    if os.getppid() != parent:
        sys.exit(1)
    folder = os.environ["STEELYARD_RANK_FOLDER"]
    if os.environ["RANK"] != "0":
        _write_to(f"{folder}/stdout.log", 1)
        _write_to(f"{folder}/stderr.log", 2)
    os.execvp(command[0], command)


def _write_to(path: str, stream: int) -> None:
    """Here and not by the agent, whose own files for this stay open (torch 2.13)."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
