"""Replaces itself with a rank's command, after making sure that the rank does not outlive its
launcher.

``python orphan_guard.py PARENT COMMAND...`` asks the kernel to kill this process when its parent
ends, and then executes COMMAND; the setting survives the exec. It is therefore in effect before the
command's first line, for any command, and even if the launcher is killed with SIGKILL, which the
launcher could not handle. A pipe that closes would need a thread in the rank that reads it.
Children of a rank are not covered. They share the rank's process group, which is killed as a whole;
if the launcher is killed too, they must notice this by themselves (torch's data workers do). From
here on, all ranks but the first write into their folder (see run_files.py). This file imports
nothing of ours, because it is run by its path, without site-packages.
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
    # The parent may have ended before prctl was called.
    if os.getppid() != parent:
        sys.exit(1)
    folder = os.environ["STEELYARD_RANK_FOLDER"]
    if os.environ["RANK"] != "0":
        _write_to(f"{folder}/stdout.log", 1)
        _write_to(f"{folder}/stderr.log", 2)
    os.execvp(command[0], command)


def _write_to(path: str, stream: int) -> None:
    """Redirect a stream to a file. (In torch 2.13, the agent would leave its own log files
    open.)
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
