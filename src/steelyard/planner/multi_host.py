"""Ranks on several hosts, as many on each: they meet to be measured, are at work while the first
measures, and hear its plan.

Not for what they exchange while they train, which is as among ranks of one machine.
"""

import base64
import binascii
import contextlib
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard import _torch
from steelyard.comm.backends import backend_for
from steelyard.comm.devices import CPU, torch_device_of
from steelyard.comm.json_gather import gathered
from steelyard.errors import BadInput, CheckpointError, RankFailed, SteelyardError
from steelyard.hardware.host_os import cores_of
from steelyard.measure.cache import CostCache
from steelyard.measure.links.background_load import ALL_HOSTS, OTHER_HOSTS
from steelyard.measure.links.probe import (
    ALIKE_SHARE,
    measured_joins,
    measured_ranks,
    remember_hosts,
    remembered_probe,
)
from steelyard.measure.links.worker import (
    figures_of_this_rank,
    probe_link,
    quick_product_seconds,
    work_until,
)
from steelyard.predict.rank_subsets import PARTS_OF_CORES
from steelyard.run.launch.coordination import Coordinator
from steelyard.run.launch.environment import RankInfo, who_am_i
from steelyard.run.launch.rendezvous import joined, meeting_place
from steelyard.run.launch.status_reporter import told_by_itself
from steelyard.safe_text import printable

# A link that has become another by so much is measured anew; what is less than the other varies by
# itself.
_OTHER_SHARE, _OTHER_SECONDS = 0.25, 5e-4
# A store of torch's takes no more than 8 MiB at once.
_PIECE = 4 << 20
# Capturing, measuring and searching a large model; who plans may take so long.
_PLANNING_SECONDS, _MEETING_SECONDS, _HEARING_SECONDS = 6 * 3600.0, 600.0, 60.0
_BEGINNING_SECONDS, _ASKING_SECONDS = 120.0, 0.05
_TOLD, _CALLED, _WORK = "told", "called to work", "work"
# What rank 0 calls the others to: to work, or to measure what joins them from such a device.
_CALLS = (_WORK, "cpu", "cuda")
# Of a plan and what is predicted of it; the file beside a plan may be as large.
_MOST_TOLD_BYTES, _MOST_PIECES = 256 << 20, 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRendezvous:
    """Of all ranks, as many on each host; rank ``planner`` measures and plans."""

    who: RankInfo
    store: Store
    planner: int = 0
    # Kinds of device on which it is known what joins them.
    _known: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        return self.who.size

    @property
    def hosts(self) -> int:
        return self.who.hosts

    @property
    def is_planner(self) -> bool:
        return self.who.rank == self.planner

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.planner]

    @contextlib.contextmanager
    def in_company(self) -> Iterator[None]:
        """Within it the others are called to work whenever something is measured here, and come to
        measure what joins all."""
        before, known = OTHER_HOSTS.set(self._others_at_work), ALL_HOSTS.set(self._know)
        try:
            yield
        finally:
            OTHER_HOSTS.reset(before)
            ALL_HOSTS.reset(known)

    @contextlib.contextmanager
    def _others_at_work(self) -> Iterator[None]:
        number = self._called(_WORK)
        try:
            self._wait_for_others(number)
            yield
        finally:
            self.store.set(f"rest/{number}", "")

    def _know(self, home: torch.device) -> None:
        if home.type not in self._known:
            number = self._called(home.type)
            self._wait_for_others(number)
            # Who came waits no longer for one that does not.
            self.store.set(f"all came/{number}", "")
            self._measure(number, home)
            self._known.add(home.type)

    def _called(self, to: str) -> int:
        number = int(self.store.add(_CALLED, 1))
        self.store.set(f"work/{number}", to)
        return number

    def _measure(self, number: int, home: torch.device) -> None:
        """All that were called do."""
        who, words = self.who, gpu_description(home, self.who)
        store = PrefixStore(f"measured/{number}", self.store)
        backend = backend_for(home, ranks=who.size // who.hosts)
        with (
            told_by_itself(who),
            joined(
                who,
                words,
                timeout_seconds=_MEETING_SECONDS,
                start_seconds=_BEGINNING_SECONDS,
                store=store,
                backend=backend,
            ),
        ):
            probe_hosts(who, home)

    def _wait_for_others(self, number: int) -> None:
        begun = [f"at work/{number}/{rank}" for rank in self._others]
        try:
            self._wait(begun, _BEGINNING_SECONDS)
        except DistError as error:
            raise RankFailed(
                "another host does not come to work while this one is measured",
                expected="all hosts that met, waiting for this one's plan",
                remedy="look at what the others wrote, and start all again",
                cause="absent",
            ) from error

    def tell(self, text: str) -> None:
        """To all others; until they have heard it, for the store may end with this process."""
        # Larger ones the store drops; what is written twice in it is written small.
        whole = base64.b64encode(zlib.compress(text.encode())).decode()
        pieces = [whole[n : n + _PIECE] for n in range(0, len(whole), _PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{_TOLD}/{number}", piece)
        self.store.set(_TOLD, str(len(pieces)))
        heard = [f"heard/{rank}" for rank in self._others]
        # Who has gone meanwhile is missed by whoever started it.
        with contextlib.suppress(DistError):
            self._wait(heard, _HEARING_SECONDS)

    def hear(self) -> str:
        """What the first tells; at work meanwhile, whenever it is called to."""
        try:
            failed = self._work_until_told()
            whole = self._told()
            self.store.set(f"heard/{self.who.rank}", "")
        except DistError as error:
            raise RankFailed(
                f"rank {self.planner} has told nothing of a plan, and is not there any more",
                expected="a plan from the host that makes it, or what it found wrong",
                remedy=f"look at what rank {self.planner} wrote",
                rank=self.planner,
                cause="absent",
            ) from error
        if failed is not None:
            raise failed
        return _unpacked(whole)

    def _told(self) -> bytes:
        """All pieces of what the first tells, of a bounded number and size."""
        said, whole = self.store.get(_TOLD), bytearray()
        if not said.isdigit() or len(said) > len(str(_MOST_PIECES)):
            raise _no_plan()
        for number in range(int(said)):
            whole += self.store.get(f"{_TOLD}/{number}")
            if len(whole) > _MOST_TOLD_BYTES:
                raise _no_plan()
        return bytes(whole)

    def _work_until_told(self) -> SteelyardError | None:
        """What went wrong here meanwhile, of which the first is told by then."""
        until, number = time.monotonic() + _PLANNING_SECONDS, 1
        failed = None

        def is_over(number: int) -> bool:
            # Who called may have been stopped, and say so.
            ends = [f"rest/{number}"], [_TOLD]
            return any(map(self.store.check, ends)) or time.monotonic() > until

        while not self.store.check([_TOLD]):
            if time.monotonic() > until:
                raise DistError(f"nothing within {_PLANNING_SECONDS:g} s")
            if self.store.check([f"work/{number}"]):
                to = self.store.get(f"work/{number}").decode(errors="replace")
                if to not in _CALLS:
                    raise _no_plan()
                self.store.set(f"at work/{number}/{self.who.rank}", "")
                if to == _WORK:
                    with on_own_cores(self.who):
                        work_until(partial(is_over, number))
                elif self._all_came(number):
                    try:
                        self._measure(number, own_device(to))
                    except SteelyardError as error:
                        failed = error
                number += 1
            else:
                time.sleep(_ASKING_SECONDS)
        return failed

    def _all_came(self, number: int) -> bool:
        """To measure; what the first tells instead, or that it has gone, is seen to next."""
        until = time.monotonic() + 2 * _BEGINNING_SECONDS
        while not self.store.check([f"all came/{number}"]):
            if self.store.check([_TOLD]) or time.monotonic() > until:
                return False
            time.sleep(_ASKING_SECONDS)
        return True

    def _wait(self, keys: Sequence[str], seconds: float) -> None:
        """By asking: while a store waits no signal is heard, and what it waits in vain it says."""
        until = time.monotonic() + seconds
        while not self.store.check(list(keys)):
            if time.monotonic() > until:
                raise DistError(f"nothing within {seconds:g} s")
            time.sleep(_ASKING_SECONDS)


@contextlib.contextmanager
def meeting(asked: Mapping[str, str], *, speeds: Sequence[float] = ()) -> Iterator[HostRendezvous]:
    """All that were started together; ``asked`` is the same on all, and so are ``speeds``, where
    somebody says how fast each computes. The fastest measures and plans."""
    who = who_am_i(os.environ)
    if who.hosts == 1:
        raise BadInput(
            f"{who.size} ranks were started on one host to make a plan",
            expected="ranks on several hosts, as many on each",
            remedy="torchrun --nnodes 2 --nproc-per-node 1 ...; for ranks of one host, "
            "steelyard plan --ranks 2 alone",
        )
    if who.size % who.hosts:
        raise BadInput(
            f"{who.size} ranks were started on {who.hosts} hosts to make a plan",
            expected="as many ranks on each of the hosts",
            remedy="give all the same --nproc-per-node",
        )
    keep_to_own_gpu()
    store = meeting_place(who)
    words = {"torch": torch.__version__, **asked}
    with told_by_itself(who), joined(who, words, timeout_seconds=_MEETING_SECONDS, store=store):
        check_neighbours(who)
        # Speeds of another number of ranks are refused by whoever plans.
        said = speeds if len(speeds) == who.size else _quick_speeds(who)
        planner = planner_of(said, each=who.size // who.hosts)
    yield HostRendezvous(who=who, store=store, planner=planner)


def planner_of(speeds: Sequence[float], *, each: int) -> int:
    """The first rank of the fastest host; that of the first host where none is clearly faster."""
    firsts = range(0, len(speeds), each)
    fastest = max(firsts, key=lambda rank: (speeds[rank], -rank))
    return fastest if speeds[0] < (1 - ALIKE_SHARE) * speeds[fastest] else 0


def _quick_speeds(who: RankInfo) -> list[float]:
    """How much of some work each rank does in a second, while all do it."""
    with torch.no_grad(), on_own_cores(who):
        seconds = quick_product_seconds(who.size // who.hosts)
    return gathered(1 / seconds, float)


def probe_hosts(who: RankInfo, home: torch.device) -> None:
    """Within a group of as many ranks on each host: what joins them is measured from where a step
    lies, unless all remember it of just these hosts and it is as it was."""
    cache, hosts = CostCache(), who.hosts
    names = gathered(socket.gethostname(), str)
    before = gathered(
        remembered_probe(names, hosts=hosts, home=home, cache=cache), tuple[float, ...] | None
    )
    with on_own_cores(who):
        last = before[0]
        if last is not None and len({*before}) == 1 and _is_as_it_was(last, home):
            return
        figures = figures_of_this_rank(hosts=hosts, home=home)
        said, session = gathered(figures, dict[str, float]), probe_link(home)
        # Of two hosts nobody could say whose link is slow.
        joins = measured_joins(said, hosts=hosts, home=home) if hosts > 2 else {}
    # By the cores of the host, on all of which a plan is made.
    remember_hosts(said, names, hosts=hosts, home=home, session=session, joins=joins, cache=cache)


def probe_local_ranks(num_ranks: int, model: nn.Module) -> None:
    """What joins so many ranks of this host alone, where nobody has measured it."""
    measured_ranks(num_ranks, home=torch_device_of(model), cache=CostCache())


def own_device(kind: str) -> torch.device:
    """The one of this process."""
    if kind == "cpu" or not torch.cuda.is_available():
        return CPU
    return torch.device(kind, torch.cuda.current_device())


def gpu_description(home: torch.device, who: RankInfo) -> dict[str, str]:
    """What has to be alike on all hosts: one of another kind would take other times, and hold
    less."""
    if home.type == "cpu":
        return {"kind of device": "a processor"}
    many = "" if who.size // who.hosts <= torch.cuda.device_count() else ", shared by ranks"
    return {"kind of device": f"{torch.cuda.get_device_properties(home).name}{many}"}


def check_neighbours(who: RankInfo) -> None:
    """All say the same of it: nobody waits for one that has gone."""
    each = who.size // who.hosts
    found = gathered((who.local_rank, os.sched_getaffinity(0)), tuple[int, set[int]])
    for rank, (local_rank, cores) in enumerate(found):
        if local_rank != rank % each:
            raise BadInput(
                f"rank {rank} is number {local_rank} of its host, and {who.size} ranks were "
                f"started on {who.hosts} hosts",
                expected=f"as many on each, the first {each} on the first host and so on",
                remedy="torchrun starts them so; srun with --distribution=block",
            )
        if cores != found[rank - rank % each][1]:
            raise BadInput(
                f"rank {rank} may use other cores than rank {rank - rank % each} of its host",
                expected="ranks that may use all that their host gives; each keeps to its part",
                remedy="start them unbound: srun --cpu-bind=none",
            )


@contextlib.contextmanager
def on_own_cores(who: RankInfo) -> Iterator[None]:
    """Within it this process does not wander over those of the other ranks of its host."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    keep_to_cores_of(who)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def keep_to_cores_of(who: RankInfo) -> None:
    """Ranks of one machine that wander over all of its cores get in each other's way."""
    each_host = max(1, who.size // who.hosts)
    part, parts = who.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", each_host))
    if said := os.environ.get(PARTS_OF_CORES):
        own, _, among = said.partition("/")
        part, parts = int(own.split(",")[part]), int(among)
    cores = cores_of(part, parts)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def keep_to_own_gpu() -> None:
    """``cuda``, without a number, is one for each rank of this machine, as far as there are so
    many: from when CUDA is first used, if it is."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        own = who_am_i(os.environ).local_rank % count
        _torch.when_cuda_begins(partial(torch.cuda.set_device, own))


def _is_as_it_was(before: tuple[float, ...], home: torch.device) -> bool:
    """Of a small and a larger exchange, each."""
    pairs = zip(probe_link(home), before, strict=True)
    return all(abs(now - then) <= _OTHER_SHARE * then + _OTHER_SECONDS for now, then in pairs)


def _unpacked(whole: bytes) -> str:
    """The text in what was told: of a bounded size, however small it was packed."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(base64.b64decode(whole, validate=True), _MOST_TOLD_BYTES)
        if not unpacking.eof:
            raise _no_plan()
        return text.decode()
    except (zlib.error, binascii.Error, UnicodeDecodeError):
        raise _no_plan() from None


def _no_plan() -> RankFailed:
    return RankFailed(
        "whoever came as rank 0 tells what no rank of steelyard tells",
        expected="a plan, packed as steelyard packs it",
        remedy="install one version on all hosts; who may come there: docs/security.md",
        rank=0,
        cause="absent",
    )


def check_seen_by_all(folder: Path, together: Coordinator) -> None:
    """One rank saves, and all go on from what it saved: the folder has to be one that all see."""
    mark, failure = "", ""
    if together.saves:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder, delete=False) as file:
                mark = Path(file.name).name
        except OSError as error:
            failure = f" {error.strerror}"
    # A space is in no mark.
    told = together.words(mark or failure)
    unseen = together.most(int(not told.startswith(" ") and not (folder / told).exists()))
    if mark:
        (folder / mark).unlink(missing_ok=True)
    said = printable(str(folder))
    if told.startswith(" "):
        raise CheckpointError(
            f"the first host cannot save in {said}:{told}",
            expected="a folder that it may write to",
            remedy="name another one with --checkpoint",
        )
    if unseen:
        raise BadInput(
            f"{said} is not the same folder on all hosts",
            expected="one that all see: the first host saves there, and all go on from it",
            remedy="name a folder on a file system that the hosts share, or leave out --checkpoint",
        )
