"""Messages of a process that takes the place of rank 1, and rank 0's errors.

See test_impostor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from steelyard.errors import RankFailed
from steelyard.comm.json_gather import MOST_BYTES, gathered


class Payload:
    """Runs a command in the process that unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def told(rank: int) -> dict[str, str]:
    """Return rank 0's error for each kind of message, and whether it ran the sender's code."""
    mark = Path(tempfile.gettempdir()) / f"ran-{os.getppid()}"
    attacks: dict[str, Callable[[], object]] = {
        "pickle": lambda: _send_pickle(Payload(mark)),
        "garbage": lambda: _send(bytes(range(256))),
        "deep": lambda: _send(b"[" * 100_000),
        "no number": lambda: _send(b'["host", NaN]'),
        "another type": lambda: _send(b'{"rank": 1}'),
        "too long": lambda: _announce(2**62),
        "a little too long": lambda: _announce(MOST_BYTES + 1),
        "negative": lambda: _announce(-1),
        "empty": lambda: _announce(0),
    }
    said = {}
    for name, attack in attacks.items():
        if rank:
            attack()
            continue
        try:
            said[name] = f"took {gathered(('host', 1), tuple[str, int])}"
        except RankFailed as error:
            said[name] = str(error)
    dist.barrier()
    if rank == 0:
        said["ran"] = str(mark.exists())
        mark.unlink(missing_ok=True)
    return said


def honest(rank: int) -> list[Any]:
    """Send valid messages of several lengths, one of them of the maximum length."""
    longest = "x" * (MOST_BYTES - 2)
    texts = gathered(longest if rank else "é", str)
    kept = gathered({rank: (0.1 * rank, None)}, dict[int, tuple[float, str | None]])
    return [texts == ["é", longest], kept == [{0: (0.0, None)}, {1: (0.1, None)}]]


def _send_pickle(what: object) -> None:
    with contextlib.suppress(Exception):  # rank 0 sends JSON, which cannot be unpickled
        dist.all_gather_object([None, None], what)


def _announce(length: int) -> None:
    """Announce a message of this length, and send nothing after an invalid length."""
    own = torch.tensor([length])
    dist.all_gather([torch.zeros_like(own), torch.zeros_like(own)], own)


def _send(message: bytes) -> None:
    """Send a message as all_gather_object does, but without a pickle."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(lengths, torch.tensor([len(message)]))
    room = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
    room[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.all_gather([torch.zeros_like(room), torch.zeros_like(room)], room)


def take_the_place_of_rank_1(port: str, mark: str) -> None:
    """Connect to rank 0, which waits for a rank of another host.

    Send the same digests as rank 0, and then a pickle where rank 0 expects a message.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", int(port), 2, is_master=False, timeout=timeout,
                     wait_for_workers=False)  # fmt: skip
    met = PrefixStore("attempt-0", store)
    challenge = met.get("challenge/0").decode()
    met.set("challenge/1", challenge)
    if challenge != "no token":
        met.set("proof/1", "ab" * 32)
        met.get("answer/1")
        return
    met.set("second host", "127.0.0.1")
    held = met.get("held/0/")
    for item in json.loads(held):
        met.set(f"held/1/{item}", met.get(f"held/0/{item}").decode())
    met.set("held/1/", held.decode())
    dist.init_process_group("gloo", store=PrefixStore("group", met), rank=1, world_size=2,
                            timeout=timeout)  # fmt: skip
    _send_pickle(Payload(Path(mark)))


if __name__ == "__main__":
    take_the_place_of_rank_1(*sys.argv[1:])
