"""Gathers small values from all ranks, as JSON text in tensors.

This replaces torch's ``all_gather_object``, which unpickles its input and therefore runs any code
that another process sends. Input is bounded in length, parsed as JSON and validated against a type
before it is used. Not for tensors of a step: those are nodes of its graph.
"""

import json
from typing import Any, Never, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from steelyard.comm.devices import CPU
from steelyard.errors import RankFailed
from steelyard.safe_text import printable

# The largest message of a rank. A plan with thousands of pipeline messages needs a tenth of this.
MOST_BYTES = 1 << 20

T = TypeVar("T")


def gathered(value: T, kind: Any, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of the group, in rank order. A collective: every rank must
    call it.

    ``kind`` is the type of the values, which pydantic validates strictly. All ranks see the same
    bytes, so all of them refuse a message in the same way, with ``RankFailed``.
    """
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    own = adapter.dump_json(value)
    assert len(own) <= MOST_BYTES, f"a message of {len(own)} bytes"
    lengths = _lengths(len(own), group)
    return [
        _read(message, adapter, _global(rank, group))
        for rank, message in enumerate(_messages(own, lengths, group))
    ]


def _lengths(own: int, group: dist.ProcessGroup | None) -> list[int]:
    """Return the length of each rank's message. An invalid length is refused before allocating."""
    length = torch.tensor([own], dtype=torch.int64, device=CPU)
    gathered_tensors = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered_tensors, length, group=group)
    lengths = [int(length_of_rank) for length_of_rank in gathered_tensors]
    for rank, length_of_rank in enumerate(lengths):
        if not 0 < length_of_rank <= MOST_BYTES:
            global_rank = _global(rank, group)
            raise _refusal(
                global_rank, f"rank {global_rank} announced a message of {length_of_rank} bytes"
            )
    return lengths


def _messages(own: bytes, lengths: list[int], group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of each rank. Every rank sends as many as the longest message has, as gloo
    requires.
    """
    buffer = torch.zeros(max(lengths), dtype=torch.uint8, device=CPU)
    buffer[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    gathered_tensors = [torch.zeros_like(buffer) for _ in lengths]
    dist.all_gather(gathered_tensors, buffer, group=group)
    pairs = zip(gathered_tensors, lengths, strict=True)
    return [padded[:length].numpy().tobytes() for padded, length in pairs]


def _read(message: bytes, adapter: TypeAdapter[T], rank: int) -> T:
    try:
        json.loads(message, parse_constant=_refuse_constant)  # pydantic accepts NaN as a number
        return adapter.validate_json(message, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = printable(first["msg"], most=48)
    except (ValueError, RecursionError):
        why = "it is not JSON"
    raise _refusal(rank, f"rank {rank} sent an invalid message: {why}")


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a number")


def _refusal(rank: int, happened: str) -> RankFailed:
    return RankFailed(
        happened,
        expected=f"a message in JSON of at most {MOST_BYTES} bytes",
        remedy="install the same version on all hosts; docs/security.md says who may connect",
        rank=rank,
        cause="other exchange",
    )


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
