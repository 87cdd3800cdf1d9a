"""Finds the first non-finite value of a rank, before ranks exchange it.

After an exchange, every rank has the NaN, and its origin is lost. The values of a step are ordered
as they are made: the batch, activations stage by stage, the loss, gradients from the last stage to
the first. Not for exchanging the findings of ranks: see train_loop.py and api/step.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.comm.devices import CPU
from steelyard.ir.gradient_codec import FIRST_CALLS
from steelyard.ir.graph import Graph, OutputKind, Phase
from steelyard.ir.parallel_layout import DATA

# Positions in a step. For activations, the stage index is added. For gradients it is subtracted,
# because the last stage makes its gradients first.
BATCH, ACTIVATIONS, LOSS, GRADIENTS = 0, 1_000, 200_000, 900_000
_STEP = 1_000_000
# The results of a GPU are read this many steps later. By then they have long been computed, so no
# synchronization is needed.
_PENDING = 32


@dataclass(frozen=True, slots=True, order=True)
class NonFiniteValue:
    """A non-finite value of this rank; ``step`` counts from the first step of this process."""

    step: int
    place: int

    @property
    def code(self) -> int:
        return self.step * _STEP + self.place

    @classmethod
    def of(cls, code: int) -> "NonFiniteValue":
        return cls(*divmod(code, _STEP))

    @property
    def what(self) -> str:
        if self.place < ACTIVATIONS:
            return "part of the batch"
        if self.place < LOSS:
            return "activations"
        return "local loss" if self.place == LOSS else "local gradients"


# The code of a rank that found nothing.
NOTHING = 2**62


class FiniteWatch:
    """Records non-finite values. ``saw`` takes values before they are exchanged, and ``end`` the
    loss over all ranks.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._is_synchronous = device.type == "cpu"
        self.step = 0
        # True if the next call accumulates into the same gradients and so belongs to the same step.
        self.adds_up = False
        self.first: NonFiniteValue | None = None
        self.failed_at: int | None = None
        self._found: list[NonFiniteValue] = []
        self._pending: list[tuple[int, dict[int, torch.Tensor], torch.Tensor | None]] = []
        self._seen: dict[int, torch.Tensor] = {}

    @property
    def code(self) -> int:
        self.settle()
        return NOTHING if self.first is None else self.first.code

    def begin(self) -> None:
        self.step += not self.adds_up
        self._seen = {}

    def saw(self, place: int, value: Any) -> None:
        if self.failed_at is not None:
            return
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.is_floating_point():
                self._add(place, _finite_indicator(tensor))

    def _add(self, place: int, number: torch.Tensor) -> None:
        if not self._is_synchronous:
            before = self._seen.get(place)
            self._seen[place] = number if before is None else before + number
        elif not math.isfinite(number):
            self._found.append(NonFiniteValue(self.step, place))

    def end(self, loss: torch.Tensor, batch: Callable[[], Iterable[Any]]) -> None:
        """Check the loss at the end of a step.

        ``batch`` returns this rank's part of the batch. If the loss is not finite, the batch is
        checked at once on a CPU. On a GPU it is never checked, because it is freed before the
        result is known.
        """
        if self.failed_at is not None:
            return
        if not self._is_synchronous:
            self._pending.append((self.step, self._seen, loss.detach().sum()))
            if len(self._pending) > _PENDING:
                self._settle_one()
        elif self._judge(self.step, float(loss.detach().sum())):
            self.look_at(batch())

    def look_at(self, batch: Iterable[Any]) -> None:
        """Check the batch of the failed step."""
        tensors = [x for x in batch if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not all(
            math.isfinite(_finite_indicator(tensor)) for tensor in tensors if tensor.numel()
        ):
            self._found.append(NonFiniteValue(self.failed_at or self.step, BATCH))
        self.first = min(self._found, default=None)

    def settle(self) -> None:
        """Read the pending results of a GPU."""
        while self._pending:
            self._settle_one()

    def _settle_one(self) -> None:
        step, seen, loss = self._pending.pop(0)
        if self.failed_at is not None or loss is None:
            return
        self._found += [
            NonFiniteValue(step, place) for place, n in seen.items() if not math.isfinite(n)
        ]
        self._judge(step, float(loss))

    def _judge(self, step: int, loss: float) -> bool:
        """True if the loss of this step is the first value that is not finite.

        A finite loss clears the findings of earlier steps, because they have not reached the
        weights, for example if a gradient scaler skipped the step.
        """
        if math.isfinite(loss):
            self._found = [found for found in self._found if found.step >= step]
            return False
        self.failed_at = step
        self.first = min(self._found, default=None)
        return True


def _finite_indicator(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite if and only if the whole tensor is, in one pass and without
    extra memory.
    """
    tensor = tensor.detach()
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.sum()
    low, high = torch.aminmax(tensor)  # this cannot overflow, but a sum in half precision can
    return low.float() + high.float()


def finite_check_places(graph: Graph) -> Mapping[str, int]:
    """Return the nodes whose first argument is about to be exchanged over the data-parallel ranks,
    with its position in a step.
    """
    places: dict[str, int] = {}
    for node in graph.nodes:
        sent = node.collective
        if node.op in FIRST_CALLS or (sent is not None and sent.axis == DATA and sent.is_sum):
            is_gradient = node.phase is Phase.BACKWARD or node.op in FIRST_CALLS
            places[node.name] = GRADIENTS if is_gradient else ACTIVATIONS
    for output in graph.outputs:
        if output.kind is OutputKind.LOSS:
            node = graph.by_name[output.node]
            if node.waits_for in places:
                places[node.waits_for] = LOSS
    return places


def checked_call(call: Callable[..., Any], watch: FiniteWatch, place: int) -> Callable[..., Any]:
    """Wrap a call so that its first argument is checked beforehand."""

    def checked(first: Any, *rest: Any, **named: Any) -> Any:
        watch.saw(place, first)
        return call(first, *rest, **named)

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """The origin of the first non-finite value, in words; ``rank`` is -1 if it is unknown or not a
    single rank.
    """

    words: str = ""
    rank: int = -1
    is_batch: bool = False


def blamed(codes: Sequence[int], *, offset: int = 0) -> Blamed:
    """Return the origin of the first non-finite value.

    ``codes`` contains each rank's code; ``offset`` is the number of steps before the first one of
    this process. If no rank found such a value, the result has no words.
    """
    first = min(codes)
    if first >= NOTHING:
        return Blamed()
    found, ranks = (
        NonFiniteValue.of(first),
        [rank for rank, code in enumerate(codes) if code == first],
    )
    is_batch, when = found.place == BATCH, f"in step {found.step + offset}"
    if len(ranks) == len(codes) and is_batch:
        return Blamed(words=f"the batch, {when}", is_batch=True)
    if len(codes) == 1:
        return Blamed()
    if len(ranks) == len(codes):
        return Blamed(words=f"the {found.what} of every rank, {when}")
    if len(ranks) == 1:
        words = f"the {found.what} of rank {ranks[0]}, {when}"
        return Blamed(words=words, rank=ranks[0], is_batch=is_batch)
    names = ", ".join(map(str, ranks))
    return Blamed(words=f"the {found.what} of ranks {names}, {when}", is_batch=is_batch)


__all__ = [
    "ACTIVATIONS", "BATCH", "GRADIENTS", "LOSS", "NOTHING", "Blamed", "FiniteWatch",
    "NonFiniteValue", "blamed", "checked_call", "finite_check_places",
]  # fmt: skip
