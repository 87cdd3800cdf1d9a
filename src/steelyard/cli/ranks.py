"""``steelyard run`` of a plan for several ranks: started from here as often as there are ranks.

Not for what a rank then does: that is the same verb, in a process that knows its rank.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from steelyard.cli.endings import INTERRUPTED, OK, TERMINATED, is_watched
from steelyard.core.layout import Layout
from steelyard.core.machine import this_device
from steelyard.core.planfile import read_decisions

# Where a rank leaves an exit code that is no failure: to the launcher any but 0 is one.
_CODE = "STEELYARD_EXIT_CODE"


def ranks_of(plan: Path) -> int:
    """Needs no torch; a plan that is not there is missed later, in other words."""
    return Layout.of(read_decisions(plan).rules).num_ranks if plan.is_file() else 1


def is_to_start(num_ranks: int) -> bool:
    """Whether this process is none of the ranks yet."""
    return num_ranks > 1 and not any(
        name in os.environ for name in ("RANK", "SLURM_STEP_NUM_TASKS")
    )


def is_quiet() -> bool:
    """Every rank says the same; one of them says it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def start(
    arguments: Sequence[str], num_ranks: int, *, timeout_seconds: float, note: Callable[[str], None]
) -> int:
    """Run ``steelyard`` with these arguments on every rank; the exit code of the first."""
    from steelyard import api

    logs = Path(tempfile.mkdtemp(prefix="steelyard-"))
    code = logs / "exit-code"
    ended = api.launch(
        [sys.executable, "-m", "steelyard", *arguments],
        num_ranks=num_ranks,
        logs=logs,
        timeout_seconds=timeout_seconds,
        environ={_CODE: str(code), "OMP_NUM_THREADS": str(this_device(ranks=num_ranks).threads)},
        on_restart=lambda failure: note(f"{failure.happened}; started again"),
    )
    said = int(code.read_text()) if code.exists() else OK
    # Of ranks that ended well nobody asks for the logs.
    shutil.rmtree(logs, ignore_errors=True)
    # As one process would end; the first rank has said where it stopped.
    return {"SIGTERM": TERMINATED, "SIGINT": INTERRUPTED}.get(ended.stopped_by, said)


@contextlib.contextmanager
def in_rank(num_ranks: int) -> Iterator[None]:
    """Around what may fail in one: it is told to whoever started the ranks, as it was raised."""
    if num_ranks == 1:
        yield
        return
    from steelyard import api

    with api.as_a_rank(num_ranks):
        yield


def left_with(code: int) -> int:
    """What a rank exits with."""
    path = os.environ.get(_CODE)
    if path is None or not is_watched():
        return code
    if not is_quiet():
        with contextlib.suppress(OSError):  # the code counts less than the run that it is of
            Path(path).write_text(str(code))
    return OK
