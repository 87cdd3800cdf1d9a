"""Multi-host planning: one host measures and plans, then broadcasts the plan to the others.

The other hosts run a background load while the planning host measures, and take part when links are
measured. Not for communication during training: see comm/.
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
from steelyard.measure.links.current_links import probe_link
from steelyard.measure.links.link_fit import ALIKE_SHARE
from steelyard.measure.links.probe import (
    measured_joins,
    measured_ranks,
    remember_hosts,
    remembered_probe,
)
from steelyard.measure.links.rank_speeds import quick_product_seconds, work_until
from steelyard.measure.links.worker import figures_of_this_rank
from steelyard.predict.rank_subsets import PARTS_OF_CORES
from steelyard.run.launch.coordination import Coordinator
from steelyard.run.launch.environment import RankInfo, rank_info
from steelyard.run.launch.rendezvous import joined, meeting_place
from steelyard.run.launch.status_reporter import reporting_lost_connections
from steelyard.safe_text import printable

# The cached measurement of a link is repeated if the time of the link has changed by more than
# this; smaller changes are noise.
_CHANGED_SHARE, _CHANGED_SECONDS = 0.25, 5e-4
# A torch Store takes no more than 8 MiB in one value.
_PIECE = 4 << 20
# Capturing, measuring and searching a large model may take this long on the planning host.
_PLANNING_SECONDS, _MEETING_SECONDS, _RECEIPT_SECONDS = 6 * 3600.0, 600.0, 60.0
_START_SECONDS, _POLL_SECONDS = 120.0, 0.05
_TEXT_KEY, _REQUEST_COUNTER, _LOAD = "told", "called to work", "work"
# Requests of the planning rank: run a load, or measure the links from a device of this type.
_REQUESTS = (_LOAD, "cpu", "cuda")
# Size limit of a plan and its predictions; the JSON file of a plan may be as large.
_MAX_TEXT_BYTES, _MAX_PIECES = 256 << 20, 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRendezvous:
    """All ranks that make a plan together; each host has the same number of them.

    Rank ``planner`` measures and plans.
    """

    who: RankInfo
    store: Store
    planner: int = 0
    # Device types whose links have been measured.
    _measured_devices: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

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
    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.planner]

    @contextlib.contextmanager
    def with_background_load(self) -> Iterator[None]:
        """Let the other ranks generate load while this one measures, and take part in link
        measurements.
        """
        before, known = OTHER_HOSTS.set(self._others_at_work), ALL_HOSTS.set(self._ensure_measured)
        try:
            yield
        finally:
            OTHER_HOSTS.reset(before)
            ALL_HOSTS.reset(known)

    @contextlib.contextmanager
    def _others_at_work(self) -> Iterator[None]:
        number = self._request(_LOAD)
        try:
            self._wait_for_others(number)
            yield
        finally:
            self.store.set(f"rest/{number}", "")

    def _ensure_measured(self, torch_device: torch.device) -> None:
        if torch_device.type not in self._measured_devices:
            number = self._request(torch_device.type)
            self._wait_for_others(number)
            # Ranks that have come need not wait for a rank that does not come.
            self.store.set(f"all came/{number}", "")
            self._measure(number, torch_device)
            self._measured_devices.add(torch_device.type)

    def _request(self, request: str) -> int:
        number = int(self.store.add(_REQUEST_COUNTER, 1))
        self.store.set(f"work/{number}", request)
        return number

    def _measure(self, number: int, torch_device: torch.device) -> None:
        """Measure the links together with all ranks that received the request."""
        who, words = self.who, gpu_description(torch_device, self.who)
        store = PrefixStore(f"measured/{number}", self.store)
        backend = backend_for(torch_device, ranks=who.size // who.hosts)
        with (
            reporting_lost_connections(who),
            joined(
                who,
                words,
                timeout_seconds=_MEETING_SECONDS,
                start_seconds=_START_SECONDS,
                store=store,
                backend=backend,
            ),
        ):
            probe_hosts(who, torch_device)

    def _wait_for_others(self, number: int) -> None:
        started_keys = [f"at work/{number}/{rank}" for rank in self._other_ranks]
        try:
            self._poll(started_keys, _START_SECONDS)
        except DistError as error:
            raise RankFailed(
                "another host did not start its load while this one was measured",
                expected="all hosts to wait for the plan of this one",
                remedy="read the output of the other hosts, and start all of them again",
                cause="absent",
            ) from error

    def broadcast(self, text: str) -> None:
        """Send ``text`` to all other ranks, and wait until they have received it.

        The store may end with this process, so returning earlier could lose the text.
        """
        # The store drops larger values. The text is compressed, which pays because it is
        # repetitive.
        packed = base64.b64encode(zlib.compress(text.encode())).decode()
        pieces = [packed[n : n + _PIECE] for n in range(0, len(packed), _PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{_TEXT_KEY}/{number}", piece)
        self.store.set(_TEXT_KEY, str(len(pieces)))
        received_keys = [f"heard/{rank}" for rank in self._other_ranks]
        # If a rank has exited in the meantime, its launcher reports that.
        with contextlib.suppress(DistError):
            self._poll(received_keys, _RECEIPT_SECONDS)

    def receive(self) -> str:
        """Return the text that the planning rank sends; generate load whenever that rank asks for
        it.
        """
        try:
            failed = self._serve_until_sent()
            packed = self._received_bytes()
            self.store.set(f"heard/{self.who.rank}", "")
        except DistError as error:
            raise RankFailed(
                f"rank {self.planner} exited without sending a plan",
                expected="a plan or an error from the host that plans",
                remedy=f"read the output of rank {self.planner}",
                rank=self.planner,
                cause="absent",
            ) from error
        if failed is not None:
            raise failed
        return _decompressed(packed)

    def _received_bytes(self) -> bytes:
        """Return all pieces of the text, still compressed; their number and size are bounded."""
        num_pieces, packed = self.store.get(_TEXT_KEY), bytearray()
        if not num_pieces.isdigit() or len(num_pieces) > len(str(_MAX_PIECES)):
            raise _no_plan()
        for number in range(int(num_pieces)):
            packed += self.store.get(f"{_TEXT_KEY}/{number}")
            if len(packed) > _MAX_TEXT_BYTES:
                raise _no_plan()
        return bytes(packed)

    def _serve_until_sent(self) -> SteelyardError | None:
        """Serve requests until the text is sent; return the error of a failed link measurement.

        By then, the planning rank has seen the same error.
        """
        until, number = time.monotonic() + _PLANNING_SECONDS, 1
        failure = None

        def is_over(number: int) -> bool:
            # The planning rank may have been stopped, and may report that instead.
            end_keys = [f"rest/{number}"], [_TEXT_KEY]
            return any(map(self.store.check, end_keys)) or time.monotonic() > until

        while not self.store.check([_TEXT_KEY]):
            if time.monotonic() > until:
                raise DistError(f"no message within {_PLANNING_SECONDS:g} s")
            if self.store.check([f"work/{number}"]):
                request = self.store.get(f"work/{number}").decode(errors="replace")
                if request not in _REQUESTS:
                    raise _no_plan()
                self.store.set(f"at work/{number}/{self.who.rank}", "")
                if request == _LOAD:
                    with on_own_cores(self.who):
                        work_until(partial(is_over, number))
                elif self._all_came(number):
                    try:
                        self._measure(number, own_device(request))
                    except SteelyardError as error:
                        failure = error
                number += 1
            else:
                time.sleep(_POLL_SECONDS)
        return failure

    def _all_came(self, number: int) -> bool:
        """Return True once all ranks have come to measure; False if the text was sent or time ran
        out.

        The caller then handles the text, or the absence of the planning rank.
        """
        until = time.monotonic() + 2 * _START_SECONDS
        while not self.store.check([f"all came/{number}"]):
            if self.store.check([_TEXT_KEY]) or time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _poll(self, keys: Sequence[str], seconds: float) -> None:
        """Poll until all keys are set; a blocking wait would ignore signals and log timeouts."""
        until = time.monotonic() + seconds
        while not self.store.check(list(keys)):
            if time.monotonic() > until:
                raise DistError(f"no message within {seconds:g} s")
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def meeting(asked: Mapping[str, str], *, speeds: Sequence[float] = ()) -> Iterator[HostRendezvous]:
    """Join all ranks that were started together, and yield their rendezvous.

    ``asked`` and ``speeds`` must be the same on all ranks. ``speeds`` declares how fast each rank
    computes; without it, the ranks measure their speeds. The fastest host measures and plans.
    """
    who = rank_info(os.environ)
    if who.hosts == 1:
        raise BadInput(
            f"{who.size} ranks were started on one host to plan",
            expected="ranks on several hosts, the same number on each",
            remedy="start torchrun --nnodes 2 --nproc-per-node 1 ...; for ranks of one host, run "
            "steelyard plan --ranks 2 without torchrun",
        )
    if who.size % who.hosts:
        raise BadInput(
            f"{who.size} ranks were started on {who.hosts} hosts to plan",
            expected="the same number of ranks on each host",
            remedy="use the same --nproc-per-node on all hosts",
        )
    keep_to_own_gpu()
    store = meeting_place(who)
    words = {"torch": torch.__version__, **asked}
    with (
        reporting_lost_connections(who),
        joined(who, words, timeout_seconds=_MEETING_SECONDS, store=store),
    ):
        check_neighbours(who)
        # If the number of speeds is wrong, the planning rank refuses them.
        all_speeds = speeds if len(speeds) == who.size else _quick_speeds(who)
        planner = planner_of(all_speeds, each=who.size // who.hosts)
    yield HostRendezvous(who=who, store=store, planner=planner)


def planner_of(speeds: Sequence[float], *, each: int) -> int:
    """Return the first rank of the fastest host, or rank 0 if no host is clearly faster."""
    firsts = range(0, len(speeds), each)
    fastest = max(firsts, key=lambda rank: (speeds[rank], -rank))
    return fastest if speeds[0] < (1 - ALIKE_SHARE) * speeds[fastest] else 0


def _quick_speeds(who: RankInfo) -> list[float]:
    """Return how much work each rank does in a second while all ranks work."""
    with torch.no_grad(), on_own_cores(who):
        seconds = quick_product_seconds(who.size // who.hosts)
    return gathered(1 / seconds, float)


def probe_hosts(who: RankInfo, torch_device: torch.device) -> None:
    """Measure the links of all ranks of the current group, from the device ``torch_device``.

    This is skipped if every rank has a cached measurement of exactly these hosts and a short probe
    shows that it is still valid.
    """
    cache, hosts = CostCache(), who.hosts
    names = gathered(socket.gethostname(), str)
    before = gathered(
        remembered_probe(names, hosts=hosts, torch_device=torch_device, cache=cache),
        tuple[float, ...] | None,
    )
    with on_own_cores(who):
        last = before[0]
        if last is not None and len({*before}) == 1 and _is_unchanged(last, torch_device):
            return
        figures = figures_of_this_rank(hosts=hosts, torch_device=torch_device)
        figures_of_ranks, session = gathered(figures, dict[str, float]), probe_link(torch_device)
        # If there are two hosts, measurements cannot show which of them has the slow link.
        joins = (
            measured_joins(figures_of_ranks, hosts=hosts, torch_device=torch_device)
            if hosts > 2
            else {}
        )
    # Stored for all cores of the host, because planning uses all of them.
    remember_hosts(
        figures_of_ranks,
        names,
        hosts=hosts,
        torch_device=torch_device,
        session=session,
        joins=joins,
        cache=cache,
    )


def probe_local_ranks(num_ranks: int, model: nn.Module) -> None:
    """Measure the links of ``num_ranks`` ranks of this host, unless they are in the cache."""
    measured_ranks(num_ranks, torch_device=torch_device_of(model), cache=CostCache())


def own_device(kind: str) -> torch.device:
    """Return the device of this process of the given type."""
    if kind == "cpu" or not torch.cuda.is_available():
        return CPU
    return torch.device(kind, torch.cuda.current_device())


def gpu_description(torch_device: torch.device, who: RankInfo) -> dict[str, str]:
    """Return the properties of the device that must be equal on all hosts.

    A device of another kind would have other times and another memory size.
    """
    if torch_device.type == "cpu":
        return {"kind of device": "a processor"}
    many = "" if who.size // who.hosts <= torch.cuda.device_count() else ", shared by ranks"
    return {"kind of device": f"{torch.cuda.get_device_properties(torch_device).name}{many}"}


def check_neighbours(who: RankInfo) -> None:
    """Check that ranks are numbered host by host, and that ranks of a host see the same cores.

    All ranks raise the same error, so none waits for one that has exited.
    """
    each = who.size // who.hosts
    found = gathered((who.local_rank, os.sched_getaffinity(0)), tuple[int, set[int]])
    for rank, (local_rank, cores) in enumerate(found):
        if local_rank != rank % each:
            raise BadInput(
                f"rank {rank} is local rank {local_rank} of its host, but {who.size} ranks were "
                f"started on {who.hosts} hosts",
                expected=f"ranks numbered host by host: the first {each} ranks on the first host "
                "and so on",
                remedy="start them with torchrun, or with srun --distribution=block",
            )
        if cores != found[rank - rank % each][1]:
            raise BadInput(
                f"rank {rank} may use different cores than rank {rank - rank % each} of its host",
                expected="ranks that may use all cores of their host; Steelyard assigns each its "
                "part",
                remedy="start them without binding: srun --cpu-bind=none",
            )


@contextlib.contextmanager
def on_own_cores(who: RankInfo) -> Iterator[None]:
    """Pin this process to its own cores within the context; other ranks use the other cores."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    keep_to_cores_of(who)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def keep_to_cores_of(who: RankInfo) -> None:
    """Pin this process to the cores of its rank.

    Ranks that share all cores of a machine slow each other down.
    """
    each_host = max(1, who.size // who.hosts)
    part, parts = who.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", each_host))
    if parts_of_cores := os.environ.get(PARTS_OF_CORES):
        own_parts, _, num_parts = parts_of_cores.partition("/")
        part, parts = int(own_parts.split(",")[part]), int(num_parts)
    cores = cores_of(part, parts)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def keep_to_own_gpu() -> None:
    """Make ``cuda`` without an index a different GPU for each rank, if there are enough GPUs.

    The device is set only when CUDA is first used.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        own = rank_info(os.environ).local_rank % count
        _torch.when_cuda_begins(partial(torch.cuda.set_device, own))


def _is_unchanged(before: tuple[float, ...], torch_device: torch.device) -> bool:
    """True if a small and a larger collective take about as long as they did before."""
    pairs = zip(probe_link(torch_device), before, strict=True)
    return all(
        abs(seconds - before_seconds) <= _CHANGED_SHARE * before_seconds + _CHANGED_SECONDS
        for seconds, before_seconds in pairs
    )


def _decompressed(packed: bytes) -> str:
    """Return the decompressed text; its size is bounded, however small the compressed data is."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(base64.b64decode(packed, validate=True), _MAX_TEXT_BYTES)
        if not unpacking.eof:
            raise _no_plan()
        return text.decode()
    except (zlib.error, binascii.Error, UnicodeDecodeError):
        raise _no_plan() from None


def _no_plan() -> RankFailed:
    return RankFailed(
        "the process connected as rank 0 sent data that is not a plan",
        expected="a plan, packed as Steelyard packs it",
        remedy="install the same version on all hosts; docs/security.md says who may connect",
        rank=0,
        cause="absent",
    )


def check_seen_by_all(folder: Path, coordinator: Coordinator) -> None:
    """Check that ``folder`` is one folder shared by all ranks: one rank saves to it, all resume
    from it.
    """
    mark, failure = "", ""
    if coordinator.saves:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder, delete=False) as file:
                mark = Path(file.name).name
        except OSError as error:
            failure = f" {error.strerror}"
    # A failure starts with a space, which is not part of any mark.
    answer = coordinator.words(mark or failure)
    unseen = coordinator.most(int(not answer.startswith(" ") and not (folder / answer).exists()))
    if mark:
        (folder / mark).unlink(missing_ok=True)
    shown_folder = printable(str(folder))
    if answer.startswith(" "):
        raise CheckpointError(
            f"the first host cannot write to {shown_folder}:{answer}",
            expected="a folder that the first host can write to",
            remedy="name another folder with --checkpoint",
        )
    if unseen:
        raise BadInput(
            f"{shown_folder} is not the same folder on all hosts",
            expected="a shared folder: the first host saves there, and all hosts resume from it",
            remedy="name a folder on a file system that the hosts share, or leave out --checkpoint",
        )
