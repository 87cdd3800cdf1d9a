"""Measurements by one rank of a group: collectives, messages, their CPU cost, and compute speed.

As a command it joins other ranks that a parent process started, each on its share of the cores or
on its own GPU. Not for the exchanges of a step, which are torch operators. Not for starting ranks:
see local_ranks.py. Not for fitting their figures: see link_fit.py.
"""

import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from steelyard.comm.backends import backend_for
from steelyard.comm.devices import CPU
from steelyard.comm.gloo.thread_scheduling import take_turns
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
from steelyard.comm.shared_memory.transport import shared_memory_transport
from steelyard.hardware.host_os import cores_of
from steelyard.measure.links.exchange_sizes import SIZES, ExchangeSizes, sizes_of
from steelyard.measure.links.exchange_timing import (
    FEW_ROUNDS,
    LONG_SECONDS,
    MATRIX,
    ROUNDS,
    all_reduce_seconds,
    default_device,
    elapsed,
    is_on_gpu,
    max_over_ranks,
    on_device,
    ones,
    send,
    slowdown,
)
from steelyard.measure.links.rank_speeds import (
    cpu_product_seconds,
    gpu_product_seconds,
    host_product_seconds,
)
from steelyard.measure.links.slot_timing import (
    MakesSlots,
    slot_all_reduce_figures,
    slot_message_figures,
)

# On a shared machine, several ranks per core have taken more than two minutes.
SECONDS = 600
_WINDOWS = 3
# For arrival skew: the seconds of computing between two exchanges, and the number of exchanges.
_SKEW_ROUNDS = {"short": (0.004, 60), "long": (0.04, 24)}
# Waits that are longer than this quantile are caused by other load on the machine.
_USUAL_WAITS = 0.9


def main(folder: str, num_ranks: int, rank: int, device: str) -> None:
    cores = cores_of(rank, num_ranks)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    torch_device = CPU
    if device == "cuda":
        torch_device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(torch_device)
    dist.init_process_group(
        backend_for(torch_device, ranks=num_ranks),
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps(figures_of_this_rank(torch_device=torch_device))
    )
    dist.barrier()
    dist.destroy_process_group()


def figures_of_this_rank(*, hosts: int = 1, torch_device: torch.device = CPU) -> dict[str, float]:
    """Return the figures of this rank; all ranks of the group measure at the same time.

    With several hosts, NIXL writes the slots if it is available and each host has one rank; GPUs of
    different hosts have no slots. Cores of different hosts are never assumed to be equal.
    """
    take_turns()  # as in a step
    with torch.no_grad(), on_device(torch_device):
        each = dist.get_world_size() // hosts
        product_seconds = cpu_product_seconds
        if hosts > 1:
            # The load that neighbours cause varies from one second to the next, so this uses the
            # minimum.
            product_seconds = partial(host_product_seconds, each)
        slots: MakesSlots | None = (
            SharedMemoryTransport if hosts == 1 else shared_memory_transport if each == 1 else None
        )
        if is_on_gpu():
            product_seconds = gpu_product_seconds
            slots = partial(shared_memory_transport, device=torch_device) if hosts == 1 else None
        compute_times = [product_seconds()]
        # Messages are measured over the slowest link.
        receiver, sizes = (each if hosts > 1 else 1), sizes_of(torch_device, hosts)
        figures = _figures(sizes, slots=slots, receiver=receiver)
        if hosts > 1 and each > 1:
            figures |= _figures_within_host(each)
        compute_times += [product_seconds() for _ in range(_WINDOWS - 1)]
        figures["product"] = median(compute_times)
        if not is_on_gpu():
            figures |= _arrival_skew()
    return figures


def _figures(sizes: ExchangeSizes, *, slots: MakesSlots | None, receiver: int) -> dict[str, float]:
    """Measure the exchanges of all ranks; rank 0 sends messages to ``receiver``."""
    small, middle, large = (ones(nbytes // 4) for nbytes in sizes)
    begin, calls = time.thread_time(), 3 * ROUNDS
    seconds = {"small": all_reduce_seconds(small, calls)}
    seconds["call"] = (time.thread_time() - begin) / calls
    if is_on_gpu():  # waiting for a GPU occupies a core
        seconds["call"] = median(_issue_seconds(small) for _ in range(calls))
    seconds["middle"] = all_reduce_seconds(middle, calls)
    # All ranks must make the same choice, so the slowest one decides.
    is_long = {"middle": max_over_ranks(seconds["middle"]) > LONG_SECONDS}
    few = FEW_ROUNDS if is_long["middle"] else calls
    seconds["large"] = all_reduce_seconds(large, min(few, ROUNDS))
    is_long["large"] = max_over_ranks(seconds["large"]) > LONG_SECONDS
    seconds |= _message_figures("small", small, calls, receiver) | _message_figures(
        "middle", middle, few, receiver
    )
    in_slots = (
        slot_message_figures(slots, {"small": small, "large": middle}, calls) if slots else {}
    )
    seconds |= in_slots
    if in_slots:
        seconds |= slot_all_reduce_figures(small, large, calls)
    long = "middle" if is_long["large"] else "large"
    x, alone = {"middle": middle, "large": large}[long], seconds[long]
    seconds["disturbs"] = slowdown(lambda: [dist.all_reduce(x, async_op=True)], alone)
    if dist.get_rank() in (0, receiver):
        alone = seconds["hop middle"] * x.nbytes / middle.nbytes
    slowed = slowdown(lambda: send(x.cpu(), receiver), alone)
    return {**seconds, "hand disturbs": slowed if dist.get_rank() in (0, receiver) else 0.0}


def _figures_within_host(each: int) -> dict[str, float]:
    """Measure all-reduces within this host, while the other hosts do the same.

    Hosts do not synchronize for this, because a message to another host may take longer than the
    whole measurement.
    """
    host_group = None
    for first in range(0, dist.get_world_size(), each):
        group = dist.new_group(list(range(first, first + each)))
        host_group = group if first <= dist.get_rank() < first + each else host_group
    small, middle, large = (ones(nbytes // 4) for nbytes in SIZES[default_device().type])
    many_rounds = 3 * ROUNDS
    timed = (
        ("small", small, many_rounds),
        ("middle", middle, many_rounds),
        ("large", large, ROUNDS),
    )
    found = {
        f"near {name}": all_reduce_seconds(x, rounds, group=host_group) for name, x, rounds in timed
    }
    found["near disturbs"] = slowdown(
        lambda: [dist.all_reduce(large, group=host_group, async_op=True)],
        found["near large"],
        host_group,
    )
    dist.destroy_process_group(host_group)
    return found


def _arrival_skew() -> dict[str, float]:
    """Measure the wait at an exchange after short and after long computing, and the durations of
    both.

    All ranks compute the same. The fastest exchange is taken as one without any wait.
    """
    matrix, word = ones(MATRIX, MATRIX), ones(1)
    product_seconds = max_over_ranks(
        median(elapsed(lambda: torch.mm(matrix, matrix)) for _ in range(ROUNDS))
    )
    figures = {}
    for name, (seconds, rounds) in _SKEW_ROUNDS.items():
        products = max(1, round(seconds / product_seconds))
        computed, waited = [], []
        dist.barrier()
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(products):
                torch.mm(matrix, matrix)
            arrived = time.perf_counter()
            dist.all_reduce(word)
            computed.append(arrived - begin)
            waited.append(time.perf_counter() - arrived)
        usual_waits = sorted(waited)[: round(_USUAL_WAITS * rounds)]
        figures[f"skew {name}"] = fmean(usual_waits) - usual_waits[0]
        figures[f"skew {name} after"] = median(computed)
    return figures


def _message_figures(name: str, x: torch.Tensor, rounds: int, other: int) -> dict[str, float]:
    """Measure messages from rank 0 to another rank, as between pipeline stages: half a round trip.

    For small messages, the result includes the CPU seconds of a rank.
    """
    seconds, begin = [], 0.0
    for turn in range(rounds + 1):
        before = time.perf_counter()
        for is_back in (False, True):
            host_copy = x.cpu()  # GPU messages go through host memory
            for work in send(host_copy, other, is_back=is_back):
                work.wait()
            if is_on_gpu():
                x.copy_(host_copy)
                torch.cuda.synchronize()
        if turn:  # the first trip opens the connection
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    found = {f"hop {name}": median(seconds) / 2}
    if name == "small":
        found["hand"] = (time.thread_time() - begin) / rounds / 2
    return found if dist.get_rank() in (0, other) else dict.fromkeys(found, 0.0)


def _issue_seconds(x: torch.Tensor) -> float:
    """Return the seconds that issuing an all-reduce takes before this rank can continue."""
    begin = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    seconds = time.perf_counter() - begin
    assert work is not None
    work.wait()
    torch.cuda.synchronize()
    return seconds


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
