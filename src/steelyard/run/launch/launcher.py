"""Starts the ranks of one command on this host, through torchrun's elastic agent as a library.

Nothing listens beyond loopback: ranks meet in a file, and gloo is told the loopback interface. The
agent's own rendezvous is between hosts; of one host there is nothing to find out, so ours answers
at once, and neither a TCP store nor its sharing (TORCH_DISABLE_SHARE_RDZV_TCP_STORE) comes in.
Not for several hosts: there torchrun or srun starts the ranks, and rendezvous.py meets them.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public by its documentation
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from steelyard import _torch
from steelyard.errors import BadInput, Cause, RankFailed
from steelyard.run.launch import orphan_guard
from steelyard.run.launch.monitor import Watch
from steelyard.run.launch.run_files import FOLDER_VARIABLE, RankFiles
from steelyard.safe_text import printable

# What may go well a second time. An exception comes again from the same code and the same data.
RESTARTED_AFTER: frozenset[Cause] = frozenset(
    {"killed", "exit code", "stopped", "hanging", "absent", "exchange"}
)
_LOOK_SECONDS = 0.1
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All ranks ended well, after ``restarts``; or ``stopped_by`` names the signal we were sent."""

    restarts: tuple[RankFailed, ...] = ()
    stopped_by: str = ""
    logs: Path


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    logs: Path,
    timeout_seconds: float,
    logs_stay: bool = True,
    max_restarts: int = 1,
    shutdown_seconds: int = 30,
    environ: Mapping[str, str] | None = None,
    on_restart: Callable[[RankFailed], None] | None = None,
) -> Ended:
    """Run ``command`` as ``num_ranks`` ranks until all ended; raises who failed last, and of what.

    ``timeout_seconds`` is what ranks give to ``joined``: how long one may be waited for. Rank 0
    prints as this process does; the others write below ``logs``, which an error names if these are
    to stay. Signals that ask to stop are
    passed on, and ranks that have not ended ``shutdown_seconds`` later are killed.
    """
    # Signals reach only this thread, and ranks end with the thread that started them.
    assert threading.current_thread() is threading.main_thread()
    if shutil.which(command[0]) is None:
        raise BadInput(
            f"{printable(command[0])} cannot be run",
            expected="a program",
            remedy="check the name, and that the file is executable",
        )
    logs.mkdir(parents=True, exist_ok=True)
    run = Path(tempfile.mkdtemp(prefix="run-", dir=logs))
    group = _Group(
        num_ranks,
        run,
        timeout_seconds,
        environ or {},
        max_restarts=max_restarts,
        on_restart=on_restart,
        logs_stay=logs_stay,
    )
    agent = _torch.supervised_agent(
        _spec(command, num_ranks, run.name, max_restarts),
        group,
        have_ended=group.have_ended,
        shutdown_seconds=shutdown_seconds,
    )
    stopped_by = ""
    with _quiet(), _handlers_kept():
        try:
            if agent.run().is_failed():
                raise group.failures[-1]
        except SignalException as stop:
            stopped_by = signal.Signals(stop.sigval).name
    return Ended(restarts=tuple(group.failures), stopped_by=stopped_by, logs=run)


def _spec(command: Sequence[str], num_ranks: int, run_id: str, max_restarts: int) -> WorkerSpec:
    return WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=_OneHost(run_id),
        entrypoint=sys.executable,
        args=("-I", "-S", orphan_guard.__file__, os.getpid(), *command),
        max_restarts=max_restarts,
        monitor_interval=_LOOK_SECONDS,
    )


class _Group(LogsSpecs):
    """The ranks of each try: where they write, and a watch over them.

    The agent asks for the logs of each try before it starts it; that is where a try begins.
    """

    def __init__(
        self,
        num_ranks: int,
        run: Path,
        timeout_seconds: float,
        environ: Mapping[str, str],
        *,
        max_restarts: int,
        on_restart: Callable[[RankFailed], None] | None,
        logs_stay: bool,
    ) -> None:
        super().__init__(str(run))
        self._num_ranks = num_ranks
        self._run = run
        self._timeout_seconds = timeout_seconds
        self._environ = environ
        self._restarts_left = max_restarts
        self._on_restart = on_restart
        self._logs_stay = logs_stay
        self._attempt = -1
        self._watch = Watch([], timeout_seconds=timeout_seconds)
        self.failures: list[RankFailed] = []

    @property
    def root_log_dir(self) -> str:
        return str(self._run)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._attempt += 1
        places = [
            RankFiles.of(self._run, attempt=self._attempt, rank=r) for r in range(self._num_ranks)
        ]
        logs = LogsDest()
        for rank, place in enumerate(places):
            place.path.mkdir(parents=True)
            envs[rank] |= {
                **self._environ,
                FOLDER_VARIABLE: str(place.path),
                "TORCHELASTIC_ERROR_FILE": str(place.error),
                "GLOO_SOCKET_IFNAME": "lo",
                # Whoever would meet there by himself would listen on every interface.
                "MASTER_ADDR": "",
                "MASTER_PORT": "",
            }
            # Nothing is redirected by the agent: orphan_guard.py does that.
            logs.stdouts[rank] = logs.stderrs[rank] = ""
            logs.error_files[rank] = str(place.error)
        self._watch = Watch(
            places, timeout_seconds=self._timeout_seconds, logs_stay=self._logs_stay
        )
        return logs

    def have_ended(self, pids: Mapping[int, int]) -> bool:
        found = self._watch.look(pids)
        if isinstance(found, bool):
            return found
        if not isinstance(found, RankFailed) or found.cause not in RESTARTED_AFTER:
            raise found
        self.failures.append(found)
        if self._restarts_left > 0:
            self._restarts_left -= 1
            if self._on_restart is not None:
                self._on_restart(found)
        return True


class _OneHost(RendezvousHandler):
    """This host is the first of one."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "steelyard"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The agent tells its own story on stderr; ours is the error."""
    logger = logging.getLogger("torch.distributed.elastic")
    silent, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """The agent puts its own in their place, and leaves them there."""
    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that is not Python's, and cannot be put back.
            if handler is not None:
                signal.signal(number, handler)
