"""Starts the ranks of one command on this host, with torchrun's elastic agent as a library.

Nothing listens beyond loopback: ranks rendezvous in a file, and gloo uses the loopback interface.
The agent's own rendezvous is made for several hosts. For a single host, our replacement answers at
once, without a TCP store or sharing one (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). Not for several
hosts: there torchrun or srun starts the ranks, which meet through rendezvous.py.
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

# Failures that may not happen again. An exception would happen again with the same code and data.
RESTARTED_AFTER: frozenset[Cause] = frozenset(
    {"killed", "exit code", "stopped", "hanging", "absent", "exchange"}
)
_POLL_SECONDS = 0.1
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """The end of a run: all ranks succeeded after ``restarts``, or ``stopped_by`` names the signal
    that stopped the launcher.
    """

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
) -> LaunchResult:
    """Run ``command`` as ``num_ranks`` ranks until all have ended; raise the last failure and its
    cause.

    ``timeout_seconds`` is the time that ranks wait for each other, as given to ``joined``. Rank 0
    prints to this process's streams; the others write to files below ``logs``, which error messages
    name if ``logs_stay``. Signals that ask to stop are forwarded. Ranks that have not ended
    ``shutdown_seconds`` later are killed.
    """
    # Python delivers signals to the main thread only, and ranks end with the thread that started
    # them.
    assert threading.current_thread() is threading.main_thread()
    if shutil.which(command[0]) is None:
        raise BadInput(
            f"{printable(command[0])} cannot be run",
            expected="an executable program",
            remedy="check the name and that the file is executable",
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
    with _quiet(), _signal_handlers_restored():
        try:
            if agent.run().is_failed():
                raise group.failures[-1]
        except SignalException as stop:
            stopped_by = signal.Signals(stop.sigval).name
    return LaunchResult(restarts=tuple(group.failures), stopped_by=stopped_by, logs=run)


def _spec(command: Sequence[str], num_ranks: int, run_id: str, max_restarts: int) -> WorkerSpec:
    return WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=_OneHost(run_id),
        entrypoint=sys.executable,
        args=("-I", "-S", orphan_guard.__file__, os.getpid(), *command),
        max_restarts=max_restarts,
        monitor_interval=_POLL_SECONDS,
    )


class _Group(LogsSpecs):
    """The ranks of each attempt: their log files and their monitor.

    The agent requests the logs of an attempt before it starts the attempt; this request begins a
    new attempt here.
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
        files = [
            RankFiles.of(self._run, attempt=self._attempt, rank=r) for r in range(self._num_ranks)
        ]
        logs = LogsDest()
        for rank, own_files in enumerate(files):
            own_files.path.mkdir(parents=True)
            envs[rank] |= {
                **self._environ,
                FOLDER_VARIABLE: str(own_files.path),
                "TORCHELASTIC_ERROR_FILE": str(own_files.error),
                "GLOO_SOCKET_IFNAME": "lo",
                # A process that used these addresses would listen on every interface.
                "MASTER_ADDR": "",
                "MASTER_PORT": "",
            }
            # The agent redirects nothing, because orphan_guard.py does.
            logs.stdouts[rank] = logs.stderrs[rank] = ""
            logs.error_files[rank] = str(own_files.error)
        self._watch = Watch(files, timeout_seconds=self._timeout_seconds, logs_stay=self._logs_stay)
        return logs

    def have_ended(self, pids: Mapping[int, int]) -> bool:
        found = self._watch.poll(pids)
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
    """A rendezvous for a single host."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "steelyard"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other host could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's log on stderr, because the raised error is the report."""
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
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers, because the agent installs its own and does not remove them."""
    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None means a handler that was not set from Python; it cannot be restored.
            if handler is not None:
                signal.signal(number, handler)
