"""Small values that ranks tell each other, as JSON text in tensors.

In place of torch's ``all_gather_object``, which unpickles what arrives and so runs whatever code
another process sends. What arrives here is bounded in length, parsed as JSON and validated against
a type before anything reads it. Not for tensors of a step: those are nodes of its graph.
"""

import json
from typing import Any, Never, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from steelyard.comm.devices import CPU
from steelyard.errors import RankFailed
from steelyard.safe_text import printable

# The largest message of a rank: files and edges of a plan with thousands of messages take a tenth.
MOST_BYTES = 1 << 20

T = TypeVar("T")


def gathered(said: T, kind: Any, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank of the group says, in the order of ranks; all of them call this together.

    ``kind`` is the type of the values, which pydantic checks strictly. All ranks see the same
    bytes, so all of them refuse a message alike, with ``RankFailed``.
    """
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    own = adapter.dump_json(said)
    assert len(own) <= MOST_BYTES, f"a message of {len(own)} bytes"
    lengths = _lengths(len(own), group)
    return [
        _read(message, adapter, _global(rank, group))
        for rank, message in enumerate(_messages(own, lengths, group))
    ]


def _lengths(own: int, group: dist.ProcessGroup | None) -> list[int]:
    """The length of each rank's message; nothing is allocated by one that is out of bounds."""
    length = torch.tensor([own], dtype=torch.int64, device=CPU)
    everyones = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, length, group=group)
    lengths = [int(each) for each in everyones]
    for rank, each in enumerate(lengths):
        if not 0 < each <= MOST_BYTES:
            who = _global(rank, group)
            raise _refusal(who, f"rank {who} announces a message of {each} bytes")
    return lengths


def _messages(own: bytes, lengths: list[int], group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes of each rank; all send as many as the longest has, as gloo wants."""
    room = torch.zeros(max(lengths), dtype=torch.uint8, device=CPU)
    room[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everyones = [torch.zeros_like(room) for _ in lengths]
    dist.all_gather(everyones, room, group=group)
    pairs = zip(everyones, lengths, strict=True)
    return [each[:length].numpy().tobytes() for each, length in pairs]


def _read(message: bytes, adapter: TypeAdapter[T], rank: int) -> T:
    try:
        json.loads(message, parse_constant=_no_constant)  # pydantic takes NaN for a number
        return adapter.validate_json(message, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = printable(first["msg"], most=48)
    except (ValueError, RecursionError):
        why = "it is no JSON"
    raise _refusal(rank, f"rank {rank} sent a message that is refused: {why}")


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number")


def _refusal(rank: int, happened: str) -> RankFailed:
    return RankFailed(
        happened,
        expected=f"JSON as steelyard writes it, of at most {MOST_BYTES} bytes",
        remedy="install one version on all hosts; who may reach ranks: docs/security.md",
        rank=rank,
        cause="other exchange",
    )


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
