"""Measures compressed gradients: bytes on the wire by the kernel's count, and CPU time of coding.

    python benchmarks/codes.py [wire | cores]

Wire: two to six hosts, each a rank of gloo, sum a tensor of 4 MB, once by an all-reduce and once
with each codec, as the trades exchange it. The kernel counts the bytes that each host sends,
headers included (few of them, because a link without shaping takes 64 kB at a time). They are
compared with the bytes that a plan predicts. Needs root.

Cores: the CPU seconds of coding are compared with those of copying the same tensor of 16 MB, in
turns. For factors of rank 4, the figure is the time that a backward pass of four such matrices
takes more with factors, compared with the same difference for torch's PowerSGD hook.

Not for the decision to compress, which a plan makes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._linked import run_on
from benchmarks.hosts import FEWEST, MOST, hosts
from benchmarks.runner import interval

# Figures without a target are only reported: the bytes and the time of ``largest``, and the time of
# int8.
WIRE_TARGETS = {"ternary": 1 / 15, "int8": 1 / 3.9, "largest": None}
PREDICTED_TARGET = 0.03
CORE_TARGETS = {
    "ternary": {"encode": 3.5, "decode and add": 1.6},
    "int8": {"encode": None, "decode and add": None},
    "largest": {"encode": None, "decode and add": None},
}
# The largest ratio of the CPU time of our hook to that of torch's hook.
FACTORS_TARGET, RANK, MATRICES, WIDTH = 0.5, 4, 4, 1024
WIRE_NUMEL, CORE_NUMEL, TIMES, ROUNDS = 1 << 20, 4 << 20, 10, 40


def main() -> None:
    parts = {"cores": cores, "wire": wire}
    wanted = sys.argv[1:] or [*parts]
    if odd := set(wanted) - parts.keys():
        raise SystemExit(f"unknown part {min(odd)}, expected {' or '.join(parts)}")
    figures: list[dict[str, Any]] = []
    for what, found in parts.items():
        for figure in found() if what in wanted else ():
            print(json.dumps(figure), file=sys.stderr, flush=True)
            figures.append(figure)
    judged = [f for f in figures if f["target"] is not None]
    worst = max(judged, key=lambda f: f["value"] / f["target"])
    print(
        json.dumps(
            {
                "name": f"codes: the furthest from its target, {worst['name']}",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": worst["target"],
                "ok": all(f["ok"] for f in judged),
                "figures": figures,
            }
        )
    )


# --- bytes ----------------------------------------------------------------------------------------


def wire() -> Iterator[dict[str, Any]]:
    for count in range(FEWEST, MOST + 1):
        sent = {way: _sent(count, way) for way in ("plain", *WIRE_TARGETS)}
        for codec, target in WIRE_TARGETS.items():
            share = sent[codec][0] / sent["plain"][0]
            yield _figure(f"{codec}, {count} hosts: bytes / fp32 all-reduce", share, target)
        for way, (counted, predicted) in sent.items():
            off = abs(counted / predicted - 1)
            name = f"{way}, {count} hosts: bytes counted beside those predicted"
            # With so few bytes, headers alone are more than the target allows.
            is_asked = way == "plain" or WIRE_TARGETS[way] is not None
            yield _figure(name, off, PREDICTED_TARGET if is_asked else None)


def _sent(count: int, way: str) -> tuple[float, float]:
    """Return the bytes of one sum on the rank that sends most, counted and predicted."""
    with tempfile.TemporaryDirectory() as folder, hosts(count) as made:
        here = Path(folder)
        found = []
        # The difference of two runs leaves out the bytes of the rendezvous.
        for times in (TIMES, 2 * TIMES):
            before = [made.sent_bytes(host) for host in range(count)]
            given = [__file__, "--rank", folder, way, str(count), str(times)]
            run_on(made, here, [[*given, str(rank)] for rank in range(count)])
            found.append([made.sent_bytes(host) - b for host, b in enumerate(before)])
            (here / f"store-{times}").unlink(missing_ok=True)
        counted = max((b - a) / TIMES for a, b in zip(*found, strict=True))
        predicted = json.loads((here / "predicted.json").read_text())
    return counted, predicted


def work(folder: str, way: str, count: int, times: int, rank: int) -> None:
    from steelyard.comm.gloo.direct_collectives import all_gather_into, all_to_all_into
    from steelyard.ir.collective import GLOO, Exchange
    from steelyard.ir.gradient_codec import CODECS, blocks_of
    from steelyard.operators import gradient_codecs as codes

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{times}", rank=rank, world_size=count
    )
    group = dist.group.WORLD
    assert group is not None, "it was just made"
    x = torch.randn(WIRE_NUMEL)
    sent: list[tuple[Exchange, int]] = []

    def summed() -> None:
        sent.clear()
        if way == "plain":
            dist.all_reduce(x)
            sent.append((Exchange.ALL_REDUCE, x.nbytes))
            return
        parts = 1 if count == FEWEST else count
        blocks = blocks_of(x.numel(), parts=parts)
        coded = codes.encode_gradients([x], None, way, parts)
        assert coded.shape[1] == CODECS[way].row_bytes(blocks // parts)
        if parts > 1:
            received = torch.empty_like(coded)
            all_to_all_into(received, coded, group)
            sent.append((Exchange.ALL_TO_ALL, coded.nbytes))
            coded = codes.encode_sum(received, None, way)
        whole = coded.new_empty((count, coded.shape[1]))
        all_gather_into(whole, coded, group)
        sent.append((Exchange.ALL_GATHER, whole.nbytes))

    for _ in range(times):
        summed()
    dist.barrier()
    if rank == 0:
        nbytes = sum(
            GLOO.collective(kind, axis="", num_ranks=count, nbytes=nbytes).wire_bytes
            for kind, nbytes in sent
        )
        (Path(folder) / "predicted.json").write_text(json.dumps(nbytes))
    dist.destroy_process_group()


# --- cores ----------------------------------------------------------------------------------------


def cores() -> Iterator[dict[str, Any]]:
    from steelyard.ir.gradient_codec import CODECS
    from steelyard.operators import gradient_codecs as codes

    torch.set_num_threads(1)
    x, into = torch.randn(CORE_NUMEL), torch.empty(CORE_NUMEL)
    lost, total = torch.zeros(CORE_NUMEL), torch.zeros(CORE_NUMEL)
    for codec, targets in CORE_TARGETS.items():
        kept = lost.zero_() if CODECS[codec].has_residual else None
        coded = codes.encode_gradients([x], kept, codec, 1)
        sides: dict[str, Callable[[], object]] = {
            "copy": lambda: into.copy_(x),
            "encode": partial(codes.encode_gradients, [x], kept, codec, 1),
            "decode and add": partial(codes.add_decoded, coded, total, codec),
        }
        with torch.no_grad():
            seconds = _in_turn(sides)
        for side, target in targets.items():
            ratios = [a / b for a, b in zip(seconds[side], seconds["copy"], strict=True)]
            name = f"{codec}, {side}: processor seconds / a copy"
            taken = round(1e3 * median(seconds[side]), 3)
            yield {**_spread(name, ratios, target), "milliseconds": taken}
    yield factors()


def _in_turn(sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Run the sides in turns and return the CPU seconds of each, over all threads."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(ROUNDS + 3):
        for side, call in sides.items():
            begin = time.process_time()
            call()
            if turn >= 3:
                seconds[side].append(time.process_time() - begin)
    return seconds


class Given(nn.Module):
    """A model whose gradients are its inputs, so that a backward pass computes almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.zeros(WIDTH, WIDTH) for _ in range(MATRICES)])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for matrix, gradient in zip(self.matrices, gradients, strict=True):
            total = total + (matrix * gradient).sum()
        return total


def factors() -> dict[str, Any]:
    from steelyard.hooks import compress

    gradients = [torch.randn(WIDTH, WIDTH) for _ in range(MATRICES)]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        # Use one bucket: torch's hook has a thread of gloo wait for the second exchange of each
        # bucket, and there are only two threads.
        one_bucket = partial(
            DistributedDataParallel, bucket_cap_mb=2 * MATRICES * WIDTH**2 * 4 >> 20
        )
        plain, theirs, ours = (one_bucket(Given()) for _ in range(3))
        # The hook starts with steps without compression; they are among the warm-up steps here.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=2
        )
        theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        compress(ours, f"rank {RANK}")
        models = {"plain": plain, "torch": theirs, "ours": ours}
        seconds = _in_turn({side: partial(_backward, m, gradients) for side, m in models.items()})
        dist.destroy_process_group()
    more = {
        side: [a - b for a, b in zip(seconds[side], seconds["plain"], strict=True)]
        for side in ("torch", "ours")
    }
    ratios = [a / b for a, b in zip(more["ours"], more["torch"], strict=True)]
    name = f"rank {RANK}: processor seconds that the hook takes / those of torch's PowerSGD hook"
    taken = {side: round(1e3 * median(found), 3) for side, found in more.items()}
    return {**_spread(name, ratios, FACTORS_TARGET), "milliseconds": taken}


def _backward(ddp: nn.Module, gradients: list[torch.Tensor]) -> None:
    ddp.zero_grad()
    ddp(gradients).backward()


def _spread(name: str, ratios: list[float], target: float | None) -> dict[str, Any]:
    low, value, high = interval(ratios)
    return {
        "name": name, "value": round(value, 3), "interval": [round(low, 3), round(high, 3)],
        "target": target, "ok": target is None or value <= target,
    }  # fmt: skip


def _figure(name: str, value: float, target: float | None) -> dict[str, Any]:
    return {
        "name": name, "value": round(value, 4), "interval": None,
        "target": None if target is None else round(target, 4),
        "ok": target is None or value <= target,
    }  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["--rank"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
