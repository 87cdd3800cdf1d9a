"""Ranks of gloo for a test: a fresh process imports torch, forks all of them and waits for them.

It is not pytest's own process, which has threads. The results of a rank are returned as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_RANKS = 2
# An exchange that hangs fails after the first limit; a rank that hangs elsewhere is stopped after
# the second, or from outside after the third. The limits are long, because a shared machine may be
# ten times slower.
_EXCHANGE_SECONDS, _RANK_SECONDS, _OUTER_SECONDS = 80, 300, 320
_ROOT = Path(__file__).resolve().parents[3]


def on_two_ranks(scenario: str) -> list[Any]:
    return on_ranks(scenario, count=NUM_RANKS)


def on_ranks(scenario: str, *, count: int, device: str = "cpu") -> list[Any]:
    """Return the result of ``module:function(rank)`` on each rank.

    With "cuda" all ranks share one GPU, tensors are created there by default, and NCCL is the
    backend.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.dist.ranks", scenario, folder, str(count), device],
            cwd=_ROOT,
            # Gloo listens only on this interface; both ranks share two cores with other processes.
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=_OUTER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            raise AssertionError(f"{scenario} hung:\n{printed}") from None
        assert process.returncode == 0, f"{scenario} failed:\n{printed}"
        return [json.loads(_result(folder, rank).read_text()) for rank in range(count)]


def main(scenario: str, folder: str, count: str, device: str) -> int:
    module, _, function = scenario.partition(":")
    # Freeze before the fork: a collection in a rank would write into pages that the ranks share.
    gc.disable()
    run = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a fork keeps one thread, and perhaps the locks of the others"
    ranks = []
    for rank in range(int(count)):
        child = os.fork()
        if child == 0:
            os._exit(_rank(run, Path(folder), rank, int(count), device))
        ranks.append(child)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def _rank(run: Callable[[int], Any], folder: Path, rank: int, count: int, device: str) -> int:
    faulthandler.dump_traceback_later(_RANK_SECONDS, exit=True)
    try:
        torch.set_num_threads(1)
        if device != "cpu":
            # NCCL refuses two ranks of one host on the same GPU. With different host ids it cannot
            # tell.
            os.environ |= {"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo"}
            torch.set_default_device(device)
        dist.init_process_group(
            "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_EXCHANGE_SECONDS),
        )
        _result(folder, rank).write_text(json.dumps(run(rank)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - a fork ends here, whatever happened
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _result(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.json"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
