"""Coordinates ranks that train together: equal initial models, a common last step, a single save.

Not for joining them (see rendezvous.py) or for the collectives of a step, which are nodes of its
graph.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from steelyard.comm.devices import CPU, generator_of
from steelyard.errors import RanksDiffer
from steelyard.ir.collective import GLOO_GETS, GLOO_SENDS
from steelyard.run.launch.environment import rank_info
from steelyard.run.launch.run_files import write_whole
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.run.step import LiveStep


# Larger than any flag.
_STOP = 1 << 20


class Coordinator(Protocol):
    """``saves`` is True on the rank that saves shared data. ``asked_bytes`` counts the bytes sent
    to agree on stopping, which are not part of a step."""

    @property
    def saves(self) -> bool: ...

    @property
    def asked_bytes(self) -> int: ...

    def stopping(self, signal: str) -> str:
        """Return the signal that any rank has received, or an empty text; all ranks call this
        before each step.
        """
        ...

    def flag(self, number: int) -> None:
        """Send a small number to all ranks with the next call of ``stopping``."""
        ...

    @property
    def flagged(self) -> int:
        """The largest number that was flagged before the last call of ``stopping``; 0 if there was
        none.
        """
        ...

    def same(self, number: int, *, of: int = 0) -> int:
        """Return, on all ranks, the value that rank ``of`` has."""
        ...

    def most(self, number: int) -> int: ...

    def each(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in rank order."""
        ...

    def words(self, text: str, *, of: int = 0) -> str:
        """Return, on all ranks, the value that rank ``of`` has."""
        ...

    def broadcast_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return the first rank's loss, for a step in which not all ranks take part."""
        ...

    def draw_equally(self, device: torch.device) -> None:
        """Copy the first rank's random states, on the host and on ``device``, to all ranks."""
        ...

    def check_equal(self, item: str, words: str) -> None:
        """Check that all ranks call this with the same text.

        If only some ranks call this, the others are in another collective; the mismatch is
        diagnosed when their wait times out.
        """
        ...


class Alone:
    saves = True
    asked_bytes = 0
    flagged = 0

    def stopping(self, signal: str) -> str:
        return signal

    def flag(self, number: int) -> None:
        pass

    def same(self, number: int, *, of: int = 0) -> int:
        assert of == 0
        return number

    def most(self, number: int) -> int:
        return number

    def each(self, number: int) -> list[int]:
        return [number]

    def words(self, text: str, *, of: int = 0) -> str:
        assert of == 0
        return text

    def broadcast_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        assert loss is not None, "a rank alone takes every step"
        return loss

    def draw_equally(self, device: torch.device) -> None:
        pass

    def check_equal(self, item: str, words: str) -> None:
        pass


class InGroup:
    """Coordinates the ranks of the default process group."""

    def __init__(self) -> None:
        self.saves = dist.get_rank() == 0
        self.asked_bytes = 0
        self.flagged = self._flag = 0

    def stopping(self, signal: str) -> str:
        request = self._flag + (_STOP if signal else 0)
        value = torch.tensor(request, dtype=torch.int32, device=CPU)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        self.asked_bytes += _small_all_reduce_bytes(dist.get_rank(), dist.get_world_size())
        self._flag, self.flagged = 0, int(value) % _STOP
        return (signal or "SIGTERM") if value >= _STOP else ""

    def flag(self, number: int) -> None:
        assert 0 <= number < _STOP, number
        self._flag = max(self._flag, number)

    def same(self, number: int, *, of: int = 0) -> int:
        value = torch.tensor(number, device=CPU)
        dist.broadcast(value, src=of)
        return int(value)

    def most(self, number: int) -> int:
        value = torch.tensor(int(number), device=CPU)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def each(self, number: int) -> list[int]:
        own = torch.tensor(number, dtype=torch.int64, device=CPU)
        values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(values, own)
        return [int(one) for one in values]

    def words(self, text: str, *, of: int = 0) -> str:
        data = text.encode() if dist.get_rank() == of else b""
        buffer = torch.zeros(self.same(len(data), of=of), dtype=torch.uint8, device=CPU)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, src=of)
        return bytes(buffer.tolist()).decode()

    def broadcast_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        value = torch.zeros((), dtype=torch.float64, device=CPU)
        if loss is not None:
            value.copy_(loss)
        dist.broadcast(value, src=0)
        return value if loss is None else loss

    def draw_equally(self, device: torch.device) -> None:
        for generator in [generator_of(device) for device in dict.fromkeys((CPU, device))]:
            state = generator.get_state()
            dist.broadcast(state, src=0)
            generator.set_state(state)

    def check_equal(self, item: str, words: str) -> None:
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(words.encode()).digest()), dtype=torch.int64
        )
        digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
        with _check_announced(item, words):
            dist.all_gather(digests, digest)
        odd = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
        if odd:
            raise RanksDiffer(
                f"rank {odd[0]} differs from rank 0 in the {item}, which is "
                f"{printable(words, most=200)} on this rank",
                expected=f"the same {item} on all ranks",
                remedy="give every rank the same batches, in the same order",
                rank=odd[0],
                item=item,
            )


@contextlib.contextmanager
def _check_announced(item: str, words: str) -> Iterator[None]:
    """Announce a check to the launcher.

    If only this rank makes the check, the others are in another collective, and this one fails or
    never ends. The launcher then knows the reason.
    """
    files = rank_info(os.environ).files
    if files is None:
        yield
        return
    write_whole(files.pending_check, {"item": item, "words": words})
    yield
    files.pending_check.unlink(missing_ok=True)


def _small_all_reduce_bytes(rank: int, num_ranks: int) -> int:
    """Return how many bytes this rank sends in gloo's all-reduce of a number of four bytes.

    The number goes around the ring once from the last rank to the first, and then a second time
    to all others.
    """
    sends = (rank != 0) + (rank != 1)
    gets = (rank != num_ranks - 1) + (rank != 0)
    return sends * (4 + GLOO_SENDS) + gets * GLOO_GETS


def broadcast_model(tensors: Iterable[torch.Tensor], device: torch.device = CPU) -> None:
    """Copy the first rank's tensors and random states to all ranks, so that models that were
    initialized differently become equal.
    """
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)
    InGroup().draw_equally(device)


def bring_up_to_date(step: "LiveStep", coordinator: Coordinator) -> None:
    """Copy the state that standby ranks have missed from the first rank: weights, buffers,
    optimizer state, compression residuals and random states.
    """
    broadcast_model([*step.model.parameters(), *step.model.buffers()], step.device)
    layout = coordinator.words(json.dumps(_state_layout(step)) if coordinator.saves else "")
    states, owed = TypeAdapter(_StateLayout).validate_json(layout, strict=True)
    parameters = [] if step.optimizer is None else _parameters_of(step.optimizer)
    for place, name, value in states:
        assert step.optimizer is not None
        state = step.optimizer.state[parameters[place]]
        if isinstance(value, float | int):
            state[name] = value
            continue
        shape, dtype = value
        if name not in state:
            kind = getattr(torch, dtype)
            assert isinstance(kind, torch.dtype), dtype
            device = CPU if name == "step" else parameters[place].device
            state[name] = torch.zeros(shape, dtype=kind, device=device)
        dist.broadcast(state[name], src=0)
    step.residuals.take_over(owed, lambda tensor: dist.broadcast(tensor, src=0))


# For each optimizer state: the index of its parameter, its name, and its shape and dtype, or its
# value if it is a number. After these, the number of scheduled residual elements by parameter.
_StateLayout = tuple[list[tuple[int, str, tuple[list[int], str] | int | float]], dict[str, int]]


def _state_layout(step: "LiveStep") -> tuple[list[tuple[int, str, Any]], dict[str, int]]:
    found: list[tuple[int, str, Any]] = []
    if step.optimizer is not None:
        for place, parameter in enumerate(_parameters_of(step.optimizer)):
            for name, value in step.optimizer.state.get(parameter, {}).items():
                described: Any = value
                if isinstance(value, torch.Tensor):
                    described = [*value.shape], str(value.dtype).removeprefix("torch.")
                if value is not None:
                    found.append((place, name, described))
    return found, step.residuals.owed_numels


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
