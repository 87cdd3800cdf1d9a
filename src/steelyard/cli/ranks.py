"""``steelyard run`` of a plan for several ranks: started from here as often as there are ranks.

Not for what a rank then does: that is the same verb, in a process that knows its rank.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.cli.endings import INTERRUPTED, OK, TERMINATED, is_watched
from steelyard.core.errors import BadInput
from steelyard.core.layout import Layout
from steelyard.core.machine import this_device
from steelyard.core.planfile import read_decisions

# Where a rank leaves an exit code that is no failure: to the launcher any but 0 is one.
_CODE = "STEELYARD_EXIT_CODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """On how many ranks a plan lies, and on how many hosts these are; ``among`` how many ranks it
    was made for."""

    ranks: int = 1
    hosts: int = 1
    among: int = 1

    @classmethod
    def of(cls, plan: Path) -> "Laid":
        """Needs no torch; a plan that is not there is missed later, in other words."""
        if not plan.is_file():
            return cls()
        decisions = read_decisions(plan)
        ranks, made_for = Layout.of(decisions.rules).num_ranks, decisions.made_for
        return cls(ranks=ranks, hosts=made_for.hosts_of(ranks), among=made_for.ranks)

    @property
    def torchrun(self) -> str:
        """How the ranks of several hosts are started."""
        each = -(-self.ranks // self.hosts)
        return f"torchrun --nnodes {self.hosts} --nproc-per-node {each}"


def num_started() -> int:
    """How many ranks were started with this process, as the starter says; needs no torch."""
    said = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
    return int(said) if said.isdecimal() else 1


def is_to_start(laid: Laid) -> bool:
    """Whether this process is none of the ranks yet."""
    if laid.ranks == 1 or any(name in os.environ for name in ("RANK", "SLURM_STEP_NUM_TASKS")):
        return False
    if laid.hosts > 1:
        raise BadInput(
            f"the plan is for {laid.hosts} hosts, and this process was started alone",
            expected="a process for each rank on each of them",
            remedy=f"on each: {laid.torchrun} ... -m steelyard run",
        )
    return True


def is_quiet() -> bool:
    """Every rank says the same; one of them says it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def start(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    timeout_seconds: float,
    note: Callable[[str], None],
    keeps_logs: bool = False,
) -> int:
    """Run ``steelyard`` with these arguments on every rank; the exit code of the first.

    What the ranks wrote stays behind a run that failed if ``keeps_logs``, and is named then.
    """
    from steelyard import api

    with _folder(keeps_logs=keeps_logs) as logs:
        code = logs / "exit-code"
        threads = str(this_device(ranks=num_ranks).threads)
        ended = api.launch(
            [sys.executable, "-m", "steelyard", *arguments],
            num_ranks=num_ranks,
            logs=logs,
            logs_stay=keeps_logs,
            timeout_seconds=timeout_seconds,
            environ={_CODE: str(code), "OMP_NUM_THREADS": threads},
            on_restart=lambda failure: note(f"{failure.happened}; started again"),
        )
        said = int(code.read_text()) if code.exists() else OK
    # As one process would end; the first rank has said where it stopped.
    return {"SIGTERM": TERMINATED, "SIGINT": INTERRUPTED}.get(ended.stopped_by, said)


@contextlib.contextmanager
def _folder(*, keeps_logs: bool) -> Iterator[Path]:
    """For what ranks write; it goes with the run, but of one that failed where it was asked for."""
    path = Path(tempfile.mkdtemp(prefix="steelyard-"))
    stays = False
    try:
        yield path
    except Exception:
        stays = keeps_logs
        raise
    finally:
        if not stays:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def in_rank(laid: Laid) -> Iterator[None]:
    """Around what may fail in one: it is told to whoever started the ranks, as it was raised."""
    if laid.ranks == 1:
        yield
        return
    from steelyard import api

    with api.as_a_rank(laid.ranks, hosts=laid.hosts):
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
