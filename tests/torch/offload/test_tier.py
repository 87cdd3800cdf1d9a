"""Offload memory returns the same bits, no faster than declared, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.errors import BadInput, RunFailed
from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.graph import Body, Node, Ref, SlicedValue, Tensor
from steelyard.offload import tier as module
from steelyard.offload.activations import Slots
from steelyard.offload.sliced_matmul import OffloadedMatrix, SlicedMatmuls
from steelyard.offload.tier import OffloadFile

FAST = "100 GB/s"


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 5),
        torch.randn(1 << 19),  # two pieces
        torch.randn((1 << 18) + 3),  # slightly more than one piece
        torch.randn(64, 48).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randint(0, 2, (77,), dtype=torch.bool),
        torch.randn(9, dtype=torch.bfloat16),
        torch.tensor([float("nan"), float("-inf"), -0.0]),
        torch.zeros(0),
    ],
    ids=["small", "pieces", "odd", "turned", "channels last", "bool", "bfloat16", "nan", "empty"],
)
def test_offloaded_tensors_return_with_the_same_bits_and_strides(
    tmp_path: Path, x: torch.Tensor
) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="64 MiB"))
    slots = Slots.of(memory, [100, x.nbytes])
    assert slots.sent(1, slots.send(1, x), x) is None
    back = slots.fetched(1, slots.fetch(1, None))
    assert back.data_ptr() != x.data_ptr() or not x.numel()
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    assert torch.equal(back.flatten().view(torch.uint8), x.flatten().view(torch.uint8))
    assert memory.moved_bytes == 2 * x.nbytes
    memory.close()


@pytest.mark.parametrize("x", [torch.zeros(8, 8)[:, :4], torch.zeros(4, 1).expand(4, 3)])
def test_tensors_with_gaps_or_overlaps_are_copied_correctly(
    tmp_path: Path, x: torch.Tensor
) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="1 MiB"))
    with pytest.raises(RunFailed, match="has gaps"):
        Slots.of(memory, [x.nbytes]).send(0, x)


def test_slots_do_not_overlap(tmp_path: Path) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="64 MiB"))
    values = [torch.full((n,), float(n)) for n in (1000, 5000, 7, 300_000)]
    slots = Slots.of(memory, [v.nbytes for v in values])
    sending = [slots.send(i, v) for i, v in enumerate(values)]
    for i, (ticket, v) in enumerate(zip(sending, values)):
        slots.sent(i, ticket, v)
    fetching = [slots.fetch(i, None) for i in range(len(values))]
    for i, v in enumerate(values):
        assert torch.equal(slots.fetched(i, fetching[i]), v)


def test_a_sum_in_half_precision_is_not_rounded_with_every_slice(tmp_path: Path) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate="2 GB/s", size="16 MiB"))
    torch.manual_seed(0)
    weight, x = (torch.randn(s, dtype=torch.bfloat16) for s in ((4096, 256), (32, 4096)))
    (offset,) = memory.reserve_permanent([weight.nbytes])
    memory.await_sent(memory.send(offset, weight))
    products = SlicedMatmuls(memory)
    there = OffloadedMatrix(
        offset=offset, rows=len(weight), columns=weight.shape[1], dtype=weight.dtype
    )
    products.begin("weight", there, 16)
    exact = x.double() @ weight.double()

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    (y,) = products.carrying_out(summing(weight, x, each=256))(["weight"], x)
    assert y.dtype is torch.bfloat16
    assert error(y) < 1.5 * error(x @ weight)


def summing(weight: torch.Tensor, x: torch.Tensor, *, each: int) -> Body:
    """Compute ``x @ weight`` on this many rows of the weight at a time."""

    def tensor(*shape: int) -> Tensor:
        return Tensor(shape=shape, stride=(shape[1], 1), dtype="bfloat16", storage=0)

    rows, columns = weight.shape
    product = Node(
        name="y",
        op="aten.mm.default",
        args=(Ref("x"), Ref("weight")),
        inputs=("x", "weight"),
        outputs=(tensor(len(x), columns),),
    )
    return Body(
        rows=rows,
        parts=rows // each,
        each=each,
        takes=(
            SlicedValue(name="weight", tensor=tensor(rows, columns), along=0),
            SlicedValue(name="x", tensor=tensor(len(x), rows), along=-1),
        ),
        calls=((each, (product,)),),
        gives=(SlicedValue(name="y", tensor=product.outputs[0], along=None),),
    )


def test_a_forked_process_without_threads_is_refused(tmp_path: Path) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate="1 GB/s", size="1 MiB"))
    slots = Slots.of(memory, [4096])
    x = torch.zeros(1024)
    slots.sent(0, slots.send(0, x), x)
    child = os.fork()
    if not child:
        try:
            slots.send(0, x)
        except RunFailed as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_declared_rate_is_not_exceeded(tmp_path: Path) -> None:
    """A lower bound on the time holds on any machine."""
    memory = OffloadFile(OffloadMemory(tmp_path, rate="50 MB/s", size="64 MiB"))
    x = torch.zeros(5_000_000, dtype=torch.uint8)
    slots = Slots.of(memory, [x.nbytes])
    begin = time.perf_counter()
    slots.sent(0, slots.send(0, x), x)
    slots.fetched(0, slots.fetch(0, None))
    assert time.perf_counter() - begin >= 2 * 5 / 50
    assert memory.busy_seconds >= 2 * 5 / 50
    assert 0 < memory.waited_seconds <= time.perf_counter() - begin


def test_offloaded_values_are_not_in_memory(tmp_path: Path) -> None:
    """The file's pages are not in the page cache, according to mincore."""
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="64 MiB"))
    x = torch.ones(16 << 20, dtype=torch.uint8)
    slots = Slots.of(memory, [x.nbytes])
    slots.sent(0, slots.send(0, x), x)
    slots.fetched(0, slots.fetch(0, None))
    assert resident_pages(memory._file, x.nbytes) == 0


def resident_pages(file: int, nbytes: int) -> int:
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file, nbytes) as mapped:
        pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        held = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(held))
        assert libc.mincore(address, ctypes.c_size_t(nbytes), pages) == 0
        del held
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "os.kill(os.getpid(), 9)", "x = 1"])
def test_no_file_is_left_however_the_process_ends(tmp_path: Path, end: str) -> None:
    script = f"""
        import os, torch
        from steelyard.hardware.cluster import OffloadMemory
        from steelyard.offload.tier import OffloadFile
        from steelyard.offload.activations import Slots
        memory = OffloadFile(OffloadMemory({str(tmp_path)!r}, rate="1 MB/s", size="64 MiB"))
        slots = Slots.of(memory, [4 << 20])
        x = torch.ones(4 << 20, dtype=torch.uint8)
        slots.send(0, x)
        {end}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=120)
    assert list(tmp_path.iterdir()) == []


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_file_closed_midway_touches_no_other_file(tmp_path: Path) -> None:
    before = open_files()
    memory = OffloadFile(OffloadMemory(tmp_path, rate="20 MB/s", size="64 MiB"))
    x = torch.ones(8 << 20, dtype=torch.uint8)
    slots = Slots.of(memory, [x.nbytes])
    first, second = slots.send(0, x), slots.send(0, x)
    memory.close()
    others = [(tmp_path / f"other{n}").open("wb+") for n in range(4)]  # would reuse its descriptors
    for transfer in (first, second):
        with pytest.raises(CancelledError):
            transfer.result(timeout=60)
    for other in others:
        other.seek(0)
        assert other.read() == b""
        other.close()
    deadline = time.monotonic() + 60
    while open_files() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before


def test_a_folder_in_memory_is_refused() -> None:
    shared = Path("/dev/shm")
    assert module.filesystem_of(shared) == "tmpfs", "as on any Linux with glibc"
    with pytest.raises(BadInput, match="is on tmpfs, which is main memory"):
        OffloadFile(OffloadMemory(shared, rate=FAST, size="1 MiB"))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"the folder .* does not exist"):
        OffloadFile(OffloadMemory(tmp_path / "absent", rate=FAST, size="1 MiB"))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "open", refuse)
    with pytest.raises(BadInput, match=f"cannot be used: {os.strerror(number)}"):
        OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="1 MiB"))


def test_a_full_disk_is_reported_before_the_run(tmp_path: Path) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="4000 TiB"))
    with pytest.raises(BadInput, match="cannot hold"):
        Slots.of(memory, [3 << 50])


def test_more_than_the_declared_size_is_refused(tmp_path: Path) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="1 MiB"))
    with pytest.raises(BadInput, match=r"offloads 2\.00 MiB"):
        Slots.of(memory, [2 << 20])


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="1 MiB"))
    x = torch.ones(1000)
    slots = Slots.of(memory, [x.nbytes])

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "pwrite", fail)
    with pytest.raises(RunFailed, match="failed: Input/output error"):
        slots.sent(0, slots.send(0, x), x)


def test_a_disk_that_stalls_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="1 MiB"))
    monkeypatch.setattr(module, "_LEAST_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    begun = threading.Event()

    def stall(*_: Any) -> int:
        begun.wait(30)
        return 4096

    monkeypatch.setattr(module.os, "pwrite", stall)
    x = torch.ones(100)
    slots = Slots.of(memory, [x.nbytes])
    with pytest.raises(RunFailed, match=r"stalls: 1\.00 MiB were not transferred within"):
        slots.sent(0, slots.send(0, x), x)
    begun.set()


def test_a_long_queue_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer that is waited for first may have been queued last."""
    monkeypatch.setattr(module, "_LEAST_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    memory = OffloadFile(OffloadMemory(tmp_path, rate="4 MB/s", size="64 MiB"))
    x = torch.ones(1 << 20, dtype=torch.uint8)
    slots = Slots.of(memory, [x.nbytes] * 6)
    sending = [slots.send(i, x) for i in range(6)]
    begin = time.perf_counter()
    slots.sent(5, sending[5], x)
    assert time.perf_counter() - begin > 2 * 0.5


def test_using_a_closed_file_is_refused(tmp_path: Path) -> None:
    memory = OffloadFile(OffloadMemory(tmp_path, rate=FAST, size="1 MiB"))
    slots = Slots.of(memory, [400])
    memory.close()
    with pytest.raises(RunFailed, match="was closed"):
        slots.send(0, torch.ones(100))


def test_an_interrupted_process_does_not_wait_for_queued_transfers(tmp_path: Path) -> None:
    """At the declared rate, the queue takes twenty seconds; a process ends much sooner."""
    script = f"""
        import torch
        from steelyard.hardware.cluster import OffloadMemory
        from steelyard.offload.tier import OffloadFile
        from steelyard.offload.activations import Slots
        memory = OffloadFile(OffloadMemory({str(tmp_path)!r}, rate="1 MB/s", size="64 MiB"))
        slots = Slots.of(memory, [20 << 20])
        slots.send(0, torch.ones(20 << 20, dtype=torch.uint8))
        raise KeyboardInterrupt
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=18)
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")
    assert ended.returncode not in (0, 1)
