"""What ranks that train together do alike: begin with one model, stop after one step, save once.

Not for joining them (rendezvous.py), nor for what a step exchanges: those are nodes of its graph.
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
from steelyard.run.launch.environment import who_am_i
from steelyard.run.launch.run_files import write_whole
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.run.step import LiveStep


# More than any flag.
_STOP = 1 << 20


class Coordinator(Protocol):
    """``saves``: whether this rank writes what is the same on all. ``asked_bytes`` went to others
    to ask whether to stop, before each step and not for it."""

    @property
    def saves(self) -> bool: ...

    @property
    def asked_bytes(self) -> int: ...

    def stopping(self, signal: str) -> str:
        """The signal that some rank was sent, if one was; asked by all before each step."""
        ...

    def flag(self, number: int) -> None:
        """Has all ranks hear a small number, with the next question whether to stop."""
        ...

    @property
    def flagged(self) -> int:
        """The largest number that was flagged before that question; 0 where none was."""
        ...

    def same(self, number: int, *, of: int = 0) -> int:
        """Return the value of rank ``of`` on all ranks."""
        ...

    def most(self, number: int) -> int: ...

    def each(self, number: int) -> list[int]:
        """What all ranks say, in their order."""
        ...

    def words(self, text: str, *, of: int = 0) -> str:
        """Return the value of rank ``of`` on all ranks."""
        ...

    def tell_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """That of the first rank, of a step which not all ranks take."""
        ...

    def draw_equally(self, home: torch.device) -> None:
        """From here on all draw what the first rank draws, on the host and at ``home``."""
        ...

    def check_equal(self, item: str, words: str) -> None:
        """That all came here, with the same words. Who comes alone makes an exchange that nobody
        else makes, and is found out by that when the others' wait ends."""
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

    def tell_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        assert loss is not None, "a rank alone takes every step"
        return loss

    def draw_equally(self, home: torch.device) -> None:
        pass

    def check_equal(self, item: str, words: str) -> None:
        pass


class InGroup:
    """Of the ranks of the default process group."""

    def __init__(self) -> None:
        self.saves = dist.get_rank() == 0
        self.asked_bytes = 0
        self.flagged = self._flag = 0

    def stopping(self, signal: str) -> str:
        said = self._flag + (_STOP if signal else 0)
        held = torch.tensor(said, dtype=torch.int32, device=CPU)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        self.asked_bytes += _around_twice_bytes(dist.get_rank(), dist.get_world_size())
        self._flag, self.flagged = 0, int(held) % _STOP
        return (signal or "SIGTERM") if held >= _STOP else ""

    def flag(self, number: int) -> None:
        assert 0 <= number < _STOP, number
        self._flag = max(self._flag, number)

    def same(self, number: int, *, of: int = 0) -> int:
        held = torch.tensor(number, device=CPU)
        dist.broadcast(held, src=of)
        return int(held)

    def most(self, number: int) -> int:
        held = torch.tensor(int(number), device=CPU)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)

    def each(self, number: int) -> list[int]:
        own = torch.tensor(number, dtype=torch.int64, device=CPU)
        held = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(held, own)
        return [int(one) for one in held]

    def words(self, text: str, *, of: int = 0) -> str:
        said = text.encode() if dist.get_rank() == of else b""
        held = torch.zeros(self.same(len(said), of=of), dtype=torch.uint8, device=CPU)
        if said:
            held.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        dist.broadcast(held, src=of)
        return bytes(held.tolist()).decode()

    def tell_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        held = torch.zeros((), dtype=torch.float64, device=CPU)
        if loss is not None:
            held.copy_(loss)
        dist.broadcast(held, src=0)
        return held if loss is None else loss

    def draw_equally(self, home: torch.device) -> None:
        for generator in [generator_of(device) for device in dict.fromkeys((CPU, home))]:
            state = generator.get_state()
            dist.broadcast(state, src=0)
            generator.set_state(state)

    def check_equal(self, item: str, words: str) -> None:
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(words.encode()).digest()), dtype=torch.int64
        )
        held = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
        with _announced(item, words):
            dist.all_gather(held, digest)
        odd = [rank for rank, other in enumerate(held) if not torch.equal(other, held[0])]
        if odd:
            raise RanksDiffer(
                f"rank {odd[0]} differs from rank 0 in the {item}; here it is "
                f"{printable(words, most=200)}",
                expected=f"the same {item} on all ranks",
                remedy="give every rank the same batches, in the same order",
                rank=odd[0],
                item=item,
            )


@contextlib.contextmanager
def _announced(item: str, words: str) -> Iterator[None]:
    """The launcher is told what is asked for, so that it knows why a rank came here alone: the
    others are in another exchange then, and this one fails or never ends."""
    place = who_am_i(os.environ).place
    if place is None:
        yield
        return
    write_whole(place.unlike, {"item": item, "words": words})
    yield
    place.unlike.unlink(missing_ok=True)


def _around_twice_bytes(rank: int, num_ranks: int) -> int:
    """What this rank hands to its connections where gloo sums up one number of four bytes: it goes
    around from the last rank to the first, and then once more, to all others."""
    sends = (rank != 0) + (rank != 1)
    gets = (rank != num_ranks - 1) + (rank != 0)
    return sends * (4 + GLOO_SENDS) + gets * GLOO_GETS


def broadcast_model(tensors: Iterable[torch.Tensor], home: torch.device = CPU) -> None:
    """Every rank takes the values of the first, and will draw the same: what was drawn differs."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)
    InGroup().draw_equally(home)


def bring_up_to_date(step: "LiveStep", coordinator: Coordinator) -> None:
    """Every rank takes from the first what those have missed that stood by: weights, buffers, what
    the optimizer keeps, what codes hold back, and what is drawn next."""
    broadcast_model([*step.model.parameters(), *step.model.buffers()], step.home)
    said = coordinator.words(json.dumps(_kept_by(step)) if coordinator.saves else "")
    states, owed = TypeAdapter(_Kept).validate_json(said, strict=True)
    parameters = [] if step.optimizer is None else _optimized(step.optimizer)
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
    step.residuals.take_over(owed, lambda held: dist.broadcast(held, src=0))


# Of each parameter, by its place in the optimizer's list: the name of a state, and its shape and
# dtype, or the number that it is. And how many elements are owed of which parameters.
_Kept = tuple[list[tuple[int, str, tuple[list[int], str] | int | float]], dict[str, int]]


def _kept_by(step: "LiveStep") -> tuple[list[tuple[int, str, Any]], dict[str, int]]:
    found: list[tuple[int, str, Any]] = []
    if step.optimizer is not None:
        for place, parameter in enumerate(_optimized(step.optimizer)):
            for name, value in step.optimizer.state.get(parameter, {}).items():
                said: Any = value
                if isinstance(value, torch.Tensor):
                    said = [*value.shape], str(value.dtype).removeprefix("torch.")
                if value is not None:
                    found.append((place, name, said))
    return found, step.residuals.owed_numels


def _optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
