"""The first of a rank's own values that was not finite, looked at before ranks exchange them.

Behind an exchange all ranks have NaN alike, and nothing tells whose it was. A step's values stand
in the order in which they are made: the batch, activations stage by stage, the loss, gradients from
the last stage to the first. Not for exchanging what ranks found: see train_loop.py and api/step.py.
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

# Places in a step; a stage's number is added to that of activations, and taken from that of
# gradients, which the last stage makes first.
BATCH, ACTIVATIONS, LOSS, GRADIENTS = 0, 1_000, 200_000, 900_000
_STEP = 1_000_000
# A GPU is asked so many steps later, when it has long computed what it is asked for.
_PENDING = 32


@dataclass(frozen=True, slots=True, order=True)
class NonFiniteValue:
    """A value of this rank that was not finite, in a step counted from this process's first."""

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
            return "values on the way to the loss"
        return "own loss" if self.place == LOSS else "own gradients"


# What ranks say that found nothing.
NOTHING = 2**62


class FiniteWatch:
    """``saw`` is given values before they are exchanged, ``end`` the loss of all ranks."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._is_at_once = device.type == "cpu"
        self.step = 0
        # Whether the next call adds to the gradients of the last one, and is of the same step.
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
                self._add(place, _told_by(tensor))

    def _add(self, place: int, number: torch.Tensor) -> None:
        if not self._is_at_once:
            before = self._seen.get(place)
            self._seen[place] = number if before is None else before + number
        elif not math.isfinite(number):
            self._found.append(NonFiniteValue(self.step, place))

    def end(self, loss: torch.Tensor, batch: Callable[[], Iterable[Any]]) -> None:
        """``batch`` gives this rank's part of it, which is looked at where the loss is not finite:
        on a CPU at once, and on a GPU not at all, for then it is gone."""
        if self.failed_at is not None:
            return
        if not self._is_at_once:
            self._pending.append((self.step, self._seen, loss.detach().sum()))
            if len(self._pending) > _PENDING:
                self._settle_one()
        elif self._judge(self.step, float(loss.detach().sum())):
            self.look_at(batch())

    def look_at(self, batch: Iterable[Any]) -> None:
        """The part of the batch of the step that failed."""
        tensors = [x for x in batch if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not all(math.isfinite(_told_by(tensor)) for tensor in tensors if tensor.numel()):
            self._found.append(NonFiniteValue(self.failed_at or self.step, BATCH))
        self.first = min(self._found, default=None)

    def settle(self) -> None:
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
        """Whether the loss of this step was the first that was not finite. A finite one says that
        nothing of earlier steps has reached the weights: a scaler skips steps on purpose."""
        if math.isfinite(loss):
            self._found = [found for found in self._found if found.step >= step]
            return False
        self.failed_at = step
        self.first = min(self._found, default=None)
        return True


def _told_by(tensor: torch.Tensor) -> torch.Tensor:
    """A number that is finite where all of the tensor is, in one reading and without room."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.sum()
    low, high = torch.aminmax(tensor)  # which cannot overflow, as the sum of half floats does
    return low.float() + high.float()


def places_in(graph: Graph) -> Mapping[str, int]:
    """Nodes whose first argument is this rank's own, before it is exchanged with ranks that share
    the batch, and where it stands in a step."""
    places: dict[str, int] = {}
    for node in graph.nodes:
        sent = node.collective
        if node.op in FIRST_CALLS or (sent is not None and sent.axis == DATA and sent.is_sum):
            is_back = node.phase is Phase.BACKWARD or node.op in FIRST_CALLS
            places[node.name] = GRADIENTS if is_back else ACTIVATIONS
    for output in graph.outputs:
        if output.kind is OutputKind.LOSS:
            waited = graph.by_name[output.node]
            if waited.waits_for in places:
                places[waited.waits_for] = LOSS
    return places


def watched(call: Callable[..., Any], watch: FiniteWatch, place: int) -> Callable[..., Any]:
    def calling(first: Any, *rest: Any, **named: Any) -> Any:
        watch.saw(place, first)
        return call(first, *rest, **named)

    return calling


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """Whose values were not finite first, in words; ``rank`` is -1 where it is not one of several,
    or not known."""

    words: str = ""
    rank: int = -1
    is_batch: bool = False


def blamed(codes: Sequence[int], *, offset: int = 0) -> Blamed:
    """``codes`` is what each rank says, ``offset`` the number of steps before the first of this
    process. No words where nobody knows."""
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
        return Blamed(words=f"the {found.what} of every rank alike, {when}")
    if len(ranks) == 1:
        words = f"the {found.what} of rank {ranks[0]}, {when}"
        return Blamed(words=words, rank=ranks[0], is_batch=is_batch)
    names = ", ".join(map(str, ranks))
    return Blamed(words=f"the {found.what} of ranks {names}, {when}", is_batch=is_batch)


__all__ = [
    "ACTIVATIONS", "BATCH", "GRADIENTS", "LOSS", "NOTHING", "Blamed", "FiniteWatch",
    "NonFiniteValue", "blamed", "places_in", "watched",
]  # fmt: skip
