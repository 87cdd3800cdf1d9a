"""Finds this process's rank and the number of ranks in the launcher's environment variables.

It supports our own launcher, torchrun and others that set torchrun's variables (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), and SLURM's srun. Without any of them, the process is a single rank. Not
for joining the others: see rendezvous.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import BadInput, Mismatch
from steelyard.predict.rank_subsets import STORE_IS_HELD
from steelyard.run.launch.run_files import FOLDER_VARIABLE, RankFiles
from steelyard.safe_text import printable

_MASTER = "MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank, and how to reach the others: ``files`` if our launcher started it, otherwise
    ``address`` and ``port`` of the rendezvous.

    ``agent_holds_store``: torchrun's agent hosts the store, so rank 0 must not. ``hosts`` is the
    number of hosts according to the launcher; ``is_one_host``: the launcher says that there is only
    one. ``store_is_external``: an extra process, which is not a rank, hosts the store.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    hosts: int = 1
    is_one_host: bool = False
    attempt: int = 0
    files: RankFiles | None = None
    address: str = ""
    port: int = 0
    agent_holds_store: bool = False
    store_is_external: bool = False

    def check_size(self, planned_ranks: int, *, planned_hosts: int = 1) -> None:
        """Raise Mismatch unless the numbers of ranks and hosts are the plan's; a plan for 4 ranks
        cannot run on 2.
        """
        if self.size != planned_ranks:
            raise Mismatch(
                f"the plan is for {planned_ranks} ranks, but {self.size} were started",
                expected=f"{planned_ranks} ranks",
                remedy=f"start {planned_ranks} ranks, or plan again for {self.size}",
            )
        if self.hosts != planned_hosts:
            raise Mismatch(
                f"the plan is for {host_text(planned_hosts)}, but the ranks are on {self.hosts}",
                expected="the number of hosts that the plan was made for, because the links "
                "between ranks decide the plan",
                remedy="plan again on these hosts; see docs/hosts.md",
            )


def host_text(hosts: int) -> str:
    return f"{hosts} hosts" if hosts > 1 else "ranks of one host"


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return this process's rank information."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _of_torchrun(environ)
    # A batch script outside of srun also has SLURM_PROCID and SLURM_NTASKS, but is a single
    # process; only srun sets the number of tasks of a step.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _of_slurm(environ)
    return RankInfo()


def _of_torchrun(environ: Mapping[str, str]) -> RankInfo:
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    folder = environ.get(FOLDER_VARIABLE)
    meet_at_store = folder is None and size > 1
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", default=rank),
        hosts=_number(environ, "GROUP_WORLD_SIZE", default=1),
        is_one_host=size > 1 and environ.get("GROUP_WORLD_SIZE") == "1",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        files=RankFiles(path=Path(folder)) if folder else None,
        address=_text(environ, "MASTER_ADDR") if meet_at_store else "",
        port=_port(environ) if meet_at_store else 0,
        agent_holds_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        store_is_external=STORE_IS_HELD in environ,
    )


def _of_slurm(environ: Mapping[str, str]) -> RankInfo:
    rank, size = _rank_and_size(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return RankInfo()
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID", default=rank),
        hosts=_number(environ, "SLURM_STEP_NUM_NODES", default=1),
        is_one_host=environ.get("SLURM_STEP_NUM_NODES") == "1",
        attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
        address=environ.get("MASTER_ADDR") or _first_host(environ),
        port=_port(environ) if "MASTER_PORT" in environ else _port_of_job(environ),
        store_is_external=STORE_IS_HELD in environ,
    )


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if rank >= size:
        raise BadInput(
            f"{rank_name} is {rank} and {size_name} is {size}",
            expected=f"{rank_name} from 0 to {size_name} - 1",
            remedy="start the ranks with torchrun, srun or steelyard run, which set both",
        )
    return rank, size


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise BadInput(
            f"{name} is {printable(repr(text), most=40)}",
            expected="a whole number of at least 0",
            remedy=f"unset {name} to run alone, or start with torchrun, srun or steelyard run",
        )
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    found = environ.get(name, "")
    if not found:
        raise BadInput(
            f"{name} is not set, although other variables declare several ranks",
            expected=f"RANK, WORLD_SIZE, {_MASTER} together",
            remedy="start with torchrun, srun or steelyard run, or unset RANK to run alone",
        )
    return found


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise BadInput(
            f"MASTER_PORT is {port}",
            expected="a port from 1 to 65535",
            remedy="set MASTER_PORT to a free port of the first rank's host, the same on all ranks",
        )
    return port


def _port_of_job(environ: Mapping[str, str]) -> int:
    """Derive a port that is equal on all ranks of a SLURM step, and rarely that of another step,
    without communication.
    """
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID", default=0)
    return 20000 + (job * 7 + step) % 10000


def _first_host(environ: Mapping[str, str]) -> str:
    """Return ``node03`` for ``node[03-05,9],other``, SLURM's short form of a list of hosts."""
    hosts = _text(environ, "SLURM_STEP_NODELIST")
    found = re.match(r"([A-Za-z0-9.-]+)(?:\[([0-9]+)[^\]]*\])?([A-Za-z0-9.-]*)(?:,|$)", hosts)
    if found is None:
        raise BadInput(
            f"the first host of SLURM_STEP_NODELIST {printable(repr(hosts), most=60)} cannot be "
            "parsed",
            expected="host, host1,host2 or host[1-4]",
            remedy=f"set {_MASTER} for all ranks",
        )
    return "".join(part or "" for part in found.groups())
