"""Inside a rank: finds the others, checks consistency, and exits when no rank needs it any more.

Not for the collectives of a step, which are nodes of its graph.
"""

import contextlib
import ipaddress
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public by its documentation

from steelyard.comm.network_interfaces import address_towards
from steelyard.errors import RankFailed
from steelyard.run.launch.authenticated_store import authenticated
from steelyard.run.launch.consistency_check import agree
from steelyard.run.launch.environment import RankInfo
from steelyard.run.launch.network_interface import (
    set_interface_between_hosts,
    set_interface_on_one_host,
)
from steelyard.run.launch.rendezvous_port import served_store
from steelyard.run.launch.status_reporter import answer_when_asked, recorded
from steelyard.run_token import VARIABLE, token_of

_NO_SECRET = (
    "steelyard: ranks connect at {}:{} without a shared secret, so that any process that "
    f"reaches that port can act as a rank; set {VARIABLE} on all hosts (docs/security.md)\n"
)
_STORE_KEY, _NOT_NEEDED = "store is needed", "no more"
# The interval at which ranks refresh their claim on the store, the time allowed for the first
# claim, and that for each later one.
_HEARTBEAT_SECONDS, _START_SECONDS, _PATIENCE_SECONDS, _POLL_SECONDS = 2.0, 900.0, 120.0, 0.5


@contextlib.contextmanager
def joined(
    who: RankInfo,
    words: Mapping[str, str],
    *,
    timeout_seconds: float,
    start_seconds: float = 300,
    store: Store | None = None,
    backend: str = "gloo",
) -> Iterator[None]:
    """Provide the default process group within this context; a single rank needs none.

    ``words`` must be equal on all ranks (see consistency_check.py). A rank may come up to
    ``start_seconds`` after another; from then on every wait times out after ``timeout_seconds``.
    ``store`` is an existing rendezvous store to use.
    """
    with recorded(who):
        if who.size == 1:
            yield
            return
        if who.files is not None:
            answer_when_asked(who.files)
        store = store or meeting_place(who, timeout_seconds=start_seconds)
        agree(store, who, words, timeout_seconds=start_seconds)
        if who.hosts > 1:
            set_interface_between_hosts(store, who, os.environ)
        elif who.files is None:
            set_interface_on_one_host(who, os.environ)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=who.rank,
            world_size=who.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        try:
            # Recorded before the connections close, because the complaints of other ranks come
            # after that.
            with recorded(who):
                yield
                # A rank that disconnects early would cut off those that still receive.
                dist.barrier()
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def needing_store(who: RankInfo) -> Iterator[None]:
    """Within this context, rank 0 tells a process that only hosts the store that the ranks still
    need the store.
    """
    if not who.store_is_external or who.rank != 0:
        yield
        return
    # A connection to the store serves a single thread.
    store, is_over = _external_store(who), threading.Event()

    def heartbeat() -> None:
        count = 0
        while not is_over.wait(_HEARTBEAT_SECONDS):
            count += 1
            try:
                store.set(_STORE_KEY, str(count))
            except dist.DistError:
                return  # the hosting process has ended; ranks that need the store will report it

    thread = threading.Thread(target=heartbeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with contextlib.suppress(dist.DistError):
            store.set(_STORE_KEY, _NOT_NEEDED)


def _external_store(who: RankInfo) -> Store:
    """Connect without authentication, because only one value is read: if the store is still
    needed.
    """
    store = _store_at_port(who, timedelta(seconds=_START_SECONDS))
    return PrefixStore(f"held in attempt-{who.attempt}", store)


def hold_meeting_place(who: RankInfo) -> None:
    """Host the store until its ranks end, or have not claimed it for a long time."""
    store = _external_store(who)
    last, until = b"", time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        current = store.get(_STORE_KEY) if store.check([_STORE_KEY]) else b""
        if current == _NOT_NEEDED.encode():
            return
        if current != last:
            last, until = current, time.monotonic() + _PATIENCE_SECONDS
        time.sleep(_POLL_SECONDS)


def meeting_place(who: RankInfo, *, timeout_seconds: float = 300) -> Store:
    """Return the rendezvous store, with a prefix for each attempt. Addresses of the last attempt
    are stale; torchrun's restarts failed when they were used.

    Ranks of our launcher use a file that only their user can open. All others use a port; if they
    have a ``STEELYARD_TOKEN``, they prove to each other that they know it.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if who.files is not None:
        store = FileStore(str(who.files.store))
        store.set_timeout(timeout)
        return PrefixStore(f"attempt-{who.attempt}", store)
    prefixed = PrefixStore(f"attempt-{who.attempt}", _store_at_port(who, timeout))
    token = token_of(os.environ)
    if who.rank == 0 and not token and not is_within_host(who):
        sys.stderr.write(_NO_SECRET.format(who.address, who.port))
    return authenticated(prefixed, who, token, timeout_seconds=timeout_seconds)


def _store_at_port(who: RankInfo, timeout: timedelta) -> Store:
    """Host the store in rank 0, unless torchrun's agent or another process does; connect on the
    others."""
    if who.rank == 0 and not (who.agent_holds_store or who.store_is_external):
        return served_store(who, os.environ, timeout=timeout)
    try:
        return TCPStore(
            who.address, who.port, who.size, is_master=False, timeout=timeout,
            wait_for_workers=False,
        )  # fmt: skip
    except dist.DistError as error:
        raise RankFailed(
            f"rank {who.rank} could not connect to {who.address}:{who.port}",
            expected="rank 0, or torchrun's agent, listening there",
            remedy="check MASTER_ADDR and MASTER_PORT, and that rank 0 runs",
            rank=0,
            cause="absent",
        ) from error


def is_within_host(who: RankInfo) -> bool:
    """True if only processes of this host can reach the port. With several hosts, the first host's
    name may resolve to loopback there, and the others still connect from outside.
    """
    try:
        return ipaddress.ip_address(who.address).is_loopback
    except ValueError:
        return who.hosts == 1 and address_towards(who.address).startswith("127.")
