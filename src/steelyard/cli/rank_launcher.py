"""``steelyard run`` of a plan for several ranks: started from here as often as there are ranks.

Not for what a rank then does: that is the same verb, in a process that knows its rank.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.cli.exit_codes import INTERRUPTED, OK, TERMINATED, is_watched
from steelyard.cli.output_options import OutputOptions, hint
from steelyard.errors import BadInput
from steelyard.hardware.host_os import this_device
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plans.plan_file import read_decisions
from steelyard.predict.rank_subsets import PARTS_OF_CORES, STORE_IS_HELD, named

# Where a rank leaves an exit code that is no failure: to the launcher any but 0 is one.
_CODE = "STEELYARD_EXIT_CODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """On how many ranks a plan lies, and on how many hosts these are; ``among`` how many ranks it
    was made for."""

    ranks: int = 1
    hosts: int = 1
    among: int = 1
    # How many hosts it was made for, and the numbers of the ranks and hosts that it lies on.
    among_hosts: int = 1
    used: Sequence[int] = range(1)
    used_hosts: Sequence[int] = range(1)

    @classmethod
    def of(cls, plan: Path) -> "LaunchSpec":
        """Needs no torch; a plan that is not there is missed later, in other words."""
        if not plan.is_file():
            return cls()
        decisions = read_decisions(plan)
        ranks, target = ParallelLayout.of(decisions.rules).num_ranks, decisions.target
        return cls(
            ranks=ranks,
            hosts=target.hosts_of(ranks),
            among=target.ranks,
            among_hosts=target.hosts,
            used=decisions.ranks_used(ranks),
            used_hosts=decisions.hosts_used(ranks),
        )

    @property
    def torchrun(self) -> str:
        """How the ranks of several hosts are started."""
        each = -(-self.ranks // self.hosts)
        return f"torchrun --nnodes {self.hosts} --nproc-per-node {each}"


def num_started() -> int:
    """How many ranks were started with this process, as the starter says; needs no torch."""
    said = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
    return int(said) if said.isdecimal() else 1


def is_to_start(laid: LaunchSpec) -> bool:
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


def take_place(laid: LaunchSpec) -> bool:
    """Where all that met were started, and the plan lies on some of them: whether this process is
    one of those, which then counts as the first, the second and so on of these alone."""
    if laid.among_hosts == 1 or num_started() != laid.among or laid.ranks == laid.among:
        return True
    rank = int(_said(os.environ, _RANKS))
    if rank not in laid.used:
        return False
    if laid.ranks > 1:
        place, each = laid.used.index(rank), laid.ranks // laid.hosts
        values = (place, laid.ranks, laid.hosts, place // each)
        for names, value in zip((_RANKS, _SIZES, _HOSTS, ("GROUP_RANK",)), values, strict=True):
            os.environ.update({name: str(value) for name in names if name in os.environ})
        if 0 not in laid.used:
            os.environ[STORE_IS_HELD] = "1"
    return True


def leave_out(laid: LaunchSpec, shown: OutputOptions) -> int:
    """The plan does not lie on this process's rank: it says so and ends. The first of all ranks
    stays until the others end, as they meet at a store that it, or its torchrun, holds."""
    each, rank = laid.among // laid.among_hosts, int(_said(os.environ, _RANKS))
    used = f"the plan lies on {named(laid.used_hosts)} of {laid.among_hosts}"
    holds = rank == 0 and laid.ranks > 1
    does = "only holds the place where those meet" if holds else "has nothing to do"
    if rank % each == 0:
        hint(f"{used}: host {rank // each} {does}", shown)
    if holds:
        from steelyard import api

        api.hold_meeting_place()
    return OK


_RANKS = ("RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_HOSTS = ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES")


def _said(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environ[name] for name in names if environ.get(name, "").isdecimal()), "0")


def is_quiet() -> bool:
    """Every rank says the same; one of them says it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def start(
    arguments: Sequence[str],
    laid: LaunchSpec,
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
        ended = api.launch(
            [sys.executable, "-m", "steelyard", *arguments],
            num_ranks=laid.ranks,
            logs=logs,
            logs_stay=keeps_logs,
            timeout_seconds=timeout_seconds,
            environ={_CODE: str(code), **_cores_of(laid)},
            on_restart=lambda failure: note(f"{failure.happened}; started again"),
        )
        said = int(code.read_text()) if code.exists() else OK
    # As one process would end; the first rank has said where it stopped.
    return {"SIGTERM": TERMINATED, "SIGINT": INTERRUPTED}.get(ended.stopped_by, said)


def _cores_of(laid: LaunchSpec) -> dict[str, str]:
    """Each rank has an even part of the cores; where it is not one of the first ranks of those to
    choose from, the part that it was measured on."""
    if laid.used == range(laid.ranks):
        return {"OMP_NUM_THREADS": str(this_device(ranks=laid.ranks).threads)}
    threads = str(this_device(ranks=laid.among).threads)
    parts = f"{','.join(map(str, laid.used))}/{laid.among}"
    return {"OMP_NUM_THREADS": threads, PARTS_OF_CORES: parts}


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
def in_rank(laid: LaunchSpec) -> Iterator[None]:
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
