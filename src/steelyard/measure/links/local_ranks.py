"""Ranks of this machine, started to measure the links between them.

Not for their measurements: see worker.py.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from steelyard.comm.devices import CPU
from steelyard.errors import RunFailed
from steelyard.measure.links.worker import SECONDS


def measure_local_ranks(num_ranks: int, torch_device: torch.device) -> list[dict[str, float]]:
    """Return the figures that each rank of this machine measured."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    *command_of(
                        rank, folder=folder, num_ranks=num_ranks, torch_device=torch_device
                    ),
                ],
                # Restrict the listening sockets to this machine.
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            failures = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"{num_ranks} ranks could not be measured within {SECONDS} s",
                expected="ranks on this machine that are each scheduled in that time",
                remedy="stop other processes on this machine, or plan for fewer ranks",
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [n for n, rank in enumerate(ranks) if rank.returncode]
        if failed:
            last_line = (failures[failed[0]].strip().splitlines() or ["no message"])[-1]
            raise RunFailed(
                f"{num_ranks} ranks could not be measured: rank {failed[0]} reported "
                f"{last_line[:120]}",
                expected="ranks on this machine that reach each other over its loopback interface",
                remedy="try: python -m torch.distributed.run --standalone --nproc-per-node 2",
            )
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)
        ]


def command_of(
    rank: int, *, folder: str, num_ranks: int, torch_device: torch.device = CPU
) -> Sequence[str]:
    """Return Python's arguments for a rank that writes its results, for ``fitted``, to the
    folder.
    """
    module = "steelyard.measure.links.worker"
    return ["-m", module, folder, str(num_ranks), str(rank), torch_device.type]
