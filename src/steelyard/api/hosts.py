"""Ranks on several hosts, one on each: they meet to be measured, and to hear the first's plan.

Not for what they exchange while they train, which is as among ranks of one machine.
"""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.core.cluster import Link
from steelyard.core.errors import BadInput, RankFailed
from steelyard.core.printable import printable
from steelyard.measure.cache import CostCache
from steelyard.measure.exchanges import figures_of_this_rank, measured_now
from steelyard.measure.links import remember_hosts, remembered_link
from steelyard.run.ranks.join import joined, meeting_place
from steelyard.run.ranks.together import Together
from steelyard.run.ranks.who import Who, who_am_i

# A link that has become another by so much is measured anew.
_OTHER_SHARE = 0.25
# Capturing, measuring and searching a large model; who plans may take so long.
_PLANNING_SECONDS, _MEETING_SECONDS, _HEARING_SECONDS = 6 * 3600.0, 600.0, 60.0
_TOLD = "told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Of all ranks, one on each host."""

    who: Who
    store: Store

    @property
    def num_ranks(self) -> int:
        return self.who.size

    @property
    def is_first(self) -> bool:
        return self.who.rank == 0

    def tell(self, text: str) -> None:
        """To all others; until they have heard it, for the store may end with this process."""
        self.store.set(_TOLD, text)
        heard = [f"heard/{rank}" for rank in range(1, self.num_ranks)]
        # Who has gone meanwhile is missed by whoever started it.
        with contextlib.suppress(DistError):
            self.store.wait(heard, timedelta(seconds=_HEARING_SECONDS))

    def hear(self) -> str:
        try:
            self.store.wait([_TOLD], timedelta(seconds=_PLANNING_SECONDS))
            text = self.store.get(_TOLD).decode()
            self.store.set(f"heard/{self.who.rank}", "")
        except DistError as error:
            raise RankFailed(
                "rank 0 has told nothing of a plan, and is not there any more",
                expected="a plan from the first host, or what it found wrong",
                remedy="look at what rank 0 wrote",
                rank=0,
                cause="absent",
            ) from error
        return text


@contextlib.contextmanager
def meeting(asked: Mapping[str, str]) -> Iterator[Meeting]:
    """All that were started together know what joins them; ``asked`` is the same on all."""
    who = who_am_i(os.environ)
    if who.size != who.hosts:
        one = "one host" if who.hosts == 1 else f"{who.hosts} hosts"
        raise BadInput(
            f"{who.size} ranks were started on {one} to make a plan",
            expected="one rank on each of several hosts",
            remedy="torchrun --nnodes 2 --nproc-per-node 1 ...; for ranks of one host, "
            "steelyard plan --ranks 2 alone",
        )
    store = meeting_place(who)
    with joined(who, asked, timeout_seconds=_MEETING_SECONDS, store=store):
        know_hosts(who)
    yield Meeting(who=who, store=store)


def know_hosts(who: Who) -> None:
    """Within a group of one rank on each host: what joins them is measured, unless all remember it
    of just these hosts and it is as it was."""
    cache = CostCache()
    names = [str(name) for name in _gathered(socket.gethostname())]
    before = _gathered(remembered_link(names, cache=cache))
    if None not in before and len({*before}) == 1 and _is_as_it_was(before[0]):
        return
    said = _gathered(figures_of_this_rank(hosts=who.hosts))
    remember_hosts(said, names, cache=cache)


def _is_as_it_was(before: Link) -> bool:
    now = measured_now(before)
    share = now.bytes_per_second / before.bytes_per_second
    return 1 - _OTHER_SHARE < share < 1 / (1 - _OTHER_SHARE)


def check_seen_by_all(folder: Path, together: Together) -> None:
    """One rank saves, and all go on from what it saved: the folder has to be one that all see."""
    mark = ""
    if together.saves:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder, delete=False) as file:
            mark = file.name
    told = together.words(Path(mark).name)
    unseen = together.most(int(not (folder / told).exists()))
    if mark:
        Path(mark).unlink()
    if unseen:
        raise BadInput(
            f"{printable(str(folder))} is not the same folder on all hosts",
            expected="one that all see: the first host saves there, and all go on from it",
            remedy="name a folder on a file system that the hosts share, or leave out --checkpoint",
        )


def _gathered(said: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, said)
    return everyones
