"""Inside a rank: meet the others, agree with them, and leave without cutting anybody off.

Not for what ranks exchange then: those are nodes of the graph.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public by its documentation

from steelyard.core.errors import RankFailed
from steelyard.run.ranks.agreement import agree
from steelyard.run.ranks.interface import speak_between_hosts
from steelyard.run.ranks.who import Who
from steelyard.run.ranks.witness import answer_when_asked, recorded


@contextlib.contextmanager
def joined(
    who: Who,
    words: Mapping[str, str],
    *,
    timeout_seconds: float,
    start_seconds: float = 300,
    store: Store | None = None,
    backend: str = "gloo",
) -> Iterator[None]:
    """The default process group, while this stands; a rank alone needs none.

    ``words`` have to be the same on all ranks (see agreement.py). A rank may come up to
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


def meeting_place(who: Who, *, timeout_seconds: float = 300) -> Store:
    """A prefix for each try: addresses of the last one are stale (torchrun restarted in vain)."""
    store: Store
    timeout = timedelta(seconds=timeout_seconds)
    if who.place is not None:
        store = FileStore(str(who.place.store))
        store.set_timeout(timeout)
    else:
        try:
            store = TCPStore(
                who.address,
                who.port,
                who.size,
                is_master=who.rank == 0 and not who.agent_holds_store,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistError as error:
            raise RankFailed(
                f"rank {who.rank} met nobody at {who.address}:{who.port}",
                expected="rank 0, or torchrun's agent, listening there",
                remedy="check MASTER_ADDR and MASTER_PORT, and that rank 0 runs",
                rank=0,
                cause="absent",
            ) from error
    return PrefixStore(f"attempt-{who.attempt}", store)
