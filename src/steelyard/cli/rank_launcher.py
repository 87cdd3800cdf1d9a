"""Starts ``steelyard run`` of a plan for several ranks as one process for each rank.

Not for the work of a rank: that is the same command, in a process that knows its rank.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.cli.exit_codes import INTERRUPTED, OK, TERMINATED, is_launched_rank
from steelyard.cli.output_options import OutputOptions, hint
from steelyard.errors import BadInput
from steelyard.hardware.host_os import this_device
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plan_files.plan_file import read_decisions
from steelyard.predict.rank_subsets import PARTS_OF_CORES, STORE_IS_HELD, named

# Environment variable with the path of a file. A rank writes its exit code there if the code is
# nonzero but no failure, because the launcher takes any nonzero exit code for a failure.
_CODE = "STEELYARD_EXIT_CODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The ranks and hosts that a plan uses; ``planned_ranks`` is the number it was made for."""

    ranks: int = 1
    hosts: int = 1
    planned_ranks: int = 1
    # The number of hosts that it was made for, and the ranks and hosts that it uses.
    planned_hosts: int = 1
    used_ranks: Sequence[int] = range(1)
    used_hosts: Sequence[int] = range(1)

    @classmethod
    def of(cls, plan: Path) -> "LaunchSpec":
        """Read the plan file, without torch; a missing file is reported later."""
        if not plan.is_file():
            return cls()
        decisions = read_decisions(plan)
        ranks, target = ParallelLayout.of(decisions.rules).num_ranks, decisions.target
        return cls(
            ranks=ranks,
            hosts=target.hosts_of(ranks),
            planned_ranks=target.ranks,
            planned_hosts=target.hosts,
            used_ranks=decisions.ranks_used(ranks),
            used_hosts=decisions.hosts_used(ranks),
        )

    @property
    def torchrun(self) -> str:
        """The torchrun command that starts the ranks of several hosts."""
        each = -(-self.ranks // self.hosts)
        return f"torchrun --nnodes {self.hosts} --nproc-per-node {each}"


def num_started() -> int:
    """Return how many ranks were started together, as the launcher declares; needs no torch."""
    text = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
    return int(text) if text.isdecimal() else 1


def should_start_ranks(spec: LaunchSpec) -> bool:
    """True if this process is not a rank yet, and must start the ranks."""
    if spec.ranks == 1 or any(name in os.environ for name in ("RANK", "SLURM_STEP_NUM_TASKS")):
        return False
    if spec.hosts > 1:
        raise BadInput(
            f"the plan is for {spec.hosts} hosts, but this process was started alone",
            expected="a process for each rank on each host",
            remedy=f"run on each host: {spec.torchrun} ... -m steelyard run",
        )
    return True


def renumber_rank(spec: LaunchSpec) -> bool:
    """Renumber the ranks if the plan uses only some of them; return True if this is one of those.

    The ranks in use are then numbered from 0 without gaps.
    """
    if (
        spec.planned_hosts == 1
        or num_started() != spec.planned_ranks
        or spec.ranks == spec.planned_ranks
    ):
        return True
    rank = int(_first_number(os.environ, _RANKS))
    if rank not in spec.used_ranks:
        return False
    if spec.ranks > 1:
        place, each = spec.used_ranks.index(rank), spec.ranks // spec.hosts
        values = (place, spec.ranks, spec.hosts, place // each)
        for names, value in zip((_RANKS, _SIZES, _HOSTS, ("GROUP_RANK",)), values, strict=True):
            os.environ.update({name: str(value) for name in names if name in os.environ})
        if 0 not in spec.used_ranks:
            os.environ[STORE_IS_HELD] = "1"
    return True


def skip_rank(spec: LaunchSpec, shown: OutputOptions) -> int:
    """End a rank that the plan does not use, with a message.

    Rank 0 stays until the others end, because it or its torchrun process holds the rendezvous
    store.
    """
    each, rank = spec.planned_ranks // spec.planned_hosts, int(_first_number(os.environ, _RANKS))
    used_text = f"the plan uses {named(spec.used_hosts)} of {spec.planned_hosts}"
    holds_store = rank == 0 and spec.ranks > 1
    role = "only serves the rendezvous of the others" if holds_store else "has nothing to do"
    if rank % each == 0:
        hint(f"{used_text}: host {rank // each} {role}", shown)
    if holds_store:
        from steelyard import api

        api.hold_meeting_place()
    return OK


_RANKS = ("RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_HOSTS = ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES")


def _first_number(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environ[name] for name in names if environ.get(name, "").isdecimal()), "0")


def is_quiet() -> bool:
    """True on all ranks but one, since every rank would print the same."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def start(
    arguments: Sequence[str],
    spec: LaunchSpec,
    *,
    timeout_seconds: float,
    note: Callable[[str], None],
    keeps_logs: bool = False,
) -> int:
    """Run ``steelyard`` with these arguments on every rank; return the exit code of the first.

    With ``keeps_logs``, the output of the ranks is kept if the run fails, and the error says where.
    """
    from steelyard import api

    with _folder(keeps_logs=keeps_logs) as logs:
        code = logs / "exit-code"
        ended = api.launch(
            [sys.executable, "-m", "steelyard", *arguments],
            num_ranks=spec.ranks,
            logs=logs,
            logs_stay=keeps_logs,
            timeout_seconds=timeout_seconds,
            environ={_CODE: str(code), **_cores_of(spec)},
            on_restart=lambda failure: note(f"{failure.happened}; started again"),
        )
        said = int(code.read_text()) if code.exists() else OK
    # End as a single process would; the first rank has already said where it stopped.
    return {"SIGTERM": TERMINATED, "SIGINT": INTERRUPTED}.get(ended.stopped_by, said)


def _cores_of(spec: LaunchSpec) -> dict[str, str]:
    """Return the environment that gives each rank its part of the cores.

    The parts are equal. If the plan does not use the first ranks, each rank gets the cores that it
    was measured on.
    """
    if spec.used_ranks == range(spec.ranks):
        return {"OMP_NUM_THREADS": str(this_device(ranks=spec.ranks).threads)}
    threads = str(this_device(ranks=spec.planned_ranks).threads)
    parts = f"{','.join(map(str, spec.used_ranks))}/{spec.planned_ranks}"
    return {"OMP_NUM_THREADS": threads, PARTS_OF_CORES: parts}


@contextlib.contextmanager
def _folder(*, keeps_logs: bool) -> Iterator[Path]:
    """Create a folder for the output of ranks; it is kept only after a failure, with
    ``keeps_logs``.
    """
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
def in_rank(spec: LaunchSpec) -> Iterator[None]:
    """Report an error within the context to the launcher of the ranks, exactly as it was raised."""
    if spec.ranks == 1:
        yield
        return
    from steelyard import api

    with api.as_a_rank(spec.ranks, hosts=spec.hosts):
        yield


def rank_exit_code(code: int) -> int:
    """Return this process's exit code; a launched rank instead writes ``code`` to a file and
    returns 0."""
    path = os.environ.get(_CODE)
    if path is None or not is_launched_rank():
        return code
    if not is_quiet():
        with contextlib.suppress(OSError):  # a code that cannot be passed on must not fail the run
            Path(path).write_text(str(code))
    return OK
