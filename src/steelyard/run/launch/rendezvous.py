"""Inside a rank: meet the others, agree with them, and leave without cutting anybody off.

Not for what ranks exchange then: those are nodes of the graph.
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
from steelyard.run.launch.network_interface import speak_between_hosts, speak_on_one_host
from steelyard.run.launch.rendezvous_port import served_store
from steelyard.run.launch.status_reporter import answer_when_asked, recorded
from steelyard.run_token import VARIABLE, token_of

_NO_SECRET = (
    "steelyard: ranks meet at {}:{} without a shared secret, so that whoever reaches that port can "
    f"take a rank's place; set {VARIABLE} on all hosts (docs/security.md)\n"
)
_NEEDED, _NO_MORE = "store is needed", "no more"
# How often ranks say that they need the store; how long they may take to say it first, and again.
_BEAT_SECONDS, _COMING_SECONDS, _PATIENCE_SECONDS, _LOOK_SECONDS = 2.0, 900.0, 120.0, 0.5


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
    """The default process group, while this stands; a rank alone needs none.

    ``words`` have to be the same on all ranks (see consistency_check.py). A rank may come up to
    ``start_seconds`` after another; from then on every wait ends after ``timeout_seconds``.
    ``store`` is where they meet, unless that is for this alone.
    """
    with recorded(who):
        if who.size == 1:
            yield
            return
        if who.place is not None:
            answer_when_asked(who.place)
        store = store or meeting_place(who, timeout_seconds=start_seconds)
        agree(store, who, words, timeout_seconds=start_seconds)
        if who.hosts > 1:
            speak_between_hosts(store, who, os.environ)
        elif who.place is None:
            speak_on_one_host(who, os.environ)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=who.rank,
            world_size=who.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        try:
            # Written down before the connections close: the others' complaints come after it.
            with recorded(who):
                yield
                # Who hangs up first would cut off those that still listen.
                dist.barrier()
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def needing_store(who: RankInfo) -> Iterator[None]:
    """Within it a process that only holds the store for these ranks knows that they need it."""
    if not who.store_is_held or who.rank != 0:
        yield
        return
    # One connection is for one thread.
    store, is_over = _store_to_hold(who), threading.Event()

    def beat() -> None:
        count = 0
        while not is_over.wait(_BEAT_SECONDS):
            count += 1
            try:
                store.set(_NEEDED, str(count))
            except dist.DistError:
                return  # the holder is gone, and what needs it will say so

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with contextlib.suppress(dist.DistError):
            store.set(_NEEDED, _NO_MORE)


def _store_to_hold(who: RankInfo) -> Store:
    """Without the proof that ranks give each other: all that is read is whether it is needed."""
    store = _store_at_port(who, timedelta(seconds=_COMING_SECONDS))
    return PrefixStore(f"held in attempt-{who.attempt}", store)


def hold_meeting_place(who: RankInfo) -> None:
    """Until the ranks that meet there end, or none of them has said for long that it needs it."""
    store = _store_to_hold(who)
    said, until = b"", time.monotonic() + _COMING_SECONDS
    while time.monotonic() < until:
        now = store.get(_NEEDED) if store.check([_NEEDED]) else b""
        if now == _NO_MORE.encode():
            return
        if now != said:
            said, until = now, time.monotonic() + _PATIENCE_SECONDS
        time.sleep(_LOOK_SECONDS)


def meeting_place(who: RankInfo, *, timeout_seconds: float = 300) -> Store:
    """A prefix for each try: addresses of the last one are stale (torchrun restarted in vain).

    Ranks that our launcher started meet in a file that only their user can open. All others meet at
    a port, and prove to each other there that they know ``STEELYARD_TOKEN`` if they have one.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if who.place is not None:
        store = FileStore(str(who.place.store))
        store.set_timeout(timeout)
        return PrefixStore(f"attempt-{who.attempt}", store)
    met = PrefixStore(f"attempt-{who.attempt}", _store_at_port(who, timeout))
    token = token_of(os.environ)
    if who.rank == 0 and not token and not is_within_host(who):
        sys.stderr.write(_NO_SECRET.format(who.address, who.port))
    return authenticated(met, who, token, timeout_seconds=timeout_seconds)


def _store_at_port(who: RankInfo, timeout: timedelta) -> Store:
    """Rank 0 has the store in its own process, unless torchrun's agent has it."""
    if who.rank == 0 and not (who.agent_holds_store or who.store_is_held):
        return served_store(who, os.environ, timeout=timeout)
    try:
        return TCPStore(
            who.address, who.port, who.size, is_master=False, timeout=timeout,
            wait_for_workers=False,
        )  # fmt: skip
    except dist.DistError as error:
        raise RankFailed(
            f"rank {who.rank} met nobody at {who.address}:{who.port}",
            expected="rank 0, or torchrun's agent, listening there",
            remedy="check MASTER_ADDR and MASTER_PORT, and that rank 0 runs",
            rank=0,
            cause="absent",
        ) from error


def is_within_host(who: RankInfo) -> bool:
    """Whether only processes of this host reach the port: of several hosts the first one's name may
    stand for its own loopback, and the others come from elsewhere all the same."""
    try:
        return ipaddress.ip_address(who.address).is_loopback
    except ValueError:
        return who.hosts == 1 and address_towards(who.address).startswith("127.")
