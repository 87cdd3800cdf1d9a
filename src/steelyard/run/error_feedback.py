"""What codes of gradients have lost and not made up for yet, of each parameter: kept from step to
step, put together from all ranks for a checkpoint, shared out again, also to other ranks, and paid
back at once where codes change.

Not for how it comes about: see operators/gradient_codecs.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from steelyard.comm.channel import Channel
from steelyard.comm.devices import CPU
from steelyard.ir.gradient_codec import FIRST_CALLS, LEFT, START
from steelyard.ir.graph import Graph, Node, Ref
from steelyard.ir.parallel_layout import DATA
from steelyard.operators import all_gather, low_rank

# In a checkpoint: what each rank lost of its own gradients, a row each; what was lost of sums; and
# what the next step's factors start with, which all ranks have.
_OF_RANKS, _OF_SUMS, _STARTS = "of ranks/", "of sums/", "starts/"
_OWN = ":own"
# How much is looked at, of all parameters together.
_SAMPLE = 16 << 10
_Member = tuple[str, int, int]
Gradients = Mapping[str, torch.Tensor]
_LeftArguments = tuple[Any, Ref, Ref, tuple[tuple[int, int], ...], int]


class ErrorFeedback:
    """By the names of a program's inputs, the same for batches of every shape."""

    def __init__(self, channels: Mapping[str, Channel], device: torch.device = CPU) -> None:
        self.channels, self._device = channels, device
        self._tensors: dict[str, torch.Tensor] = {}
        self._members: dict[str, tuple[_Member, ...]] = {}
        self._starts: dict[str, tuple[_Member, ...]] = {}
        self._looks = 0
        # Of parameters whose gradients this program sends otherwise: what is to be paid back.
        self._owed: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self._tensors.values()]

    def of(self, graph: Graph, node: Node) -> torch.Tensor:
        """For this input of it; nothing is lost before the first step."""
        (planned,) = node.outputs
        if node.name not in self._tensors:
            dtype = getattr(torch, planned.dtype)
            device = self._device
            self._tensors[node.name] = (
                low_rank.first_start(planned.numel).to(device)
                if node.name.endswith(START)
                else torch.zeros(planned.shape, dtype=dtype, device=device)
            )
            self._members |= _members(graph)
            self._starts |= _starts(graph)
        return self._tensors[node.name]

    def whole(self) -> dict[str, torch.Tensor]:
        """Of all ranks, who come together for it; and what all of them know is owed."""
        found = {f"{_OF_RANKS}{target}": lost[None].clone() for target, lost in self._owed.items()}
        for name, members in self._members.items():
            rows = self._gathered(self._tensors[name])
            own = self._tensors.get(f"{name}{_OWN}")
            sums = None if own is None else self._gathered(own).flatten()
            for target, start, count in members:
                found[f"{_OF_RANKS}{target}"] = rows[:, start : start + count].clone()
                if sums is not None:
                    found[f"{_OF_SUMS}{target}"] = sums[start : start + count].clone()
        for name, members in self._starts.items():
            for target, start, count in members:
                found[f"{_STARTS}{target}"] = self._tensors[name][start : start + count].clone()
        return found

    def put_back(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """What this rank has of it; the parameters of which something stays over.

        As many ranks as lost it get the bits back; others have equal shares of the same sum.
        """
        left = {name.partition("/")[2] for name in saved}
        for name, members in self._members.items():
            own = self._tensors.get(f"{name}{_OWN}")
            sums = torch.zeros_like(self._tensors[name])
            for target, start, count in members:
                place = slice(start, start + count)
                if target not in left:
                    continue
                left.remove(target)
                channel = self.channels[DATA]
                rows = saved[f"{_OF_RANKS}{target}"]
                is_same = rows.shape[0] == channel.num_ranks
                mine = rows[channel.rank] if is_same else rows.sum(0) / channel.num_ranks
                self._tensors[name][place] = mine
                if (lost := saved.get(f"{_OF_SUMS}{target}")) is not None:
                    if own is None:
                        self._tensors[name][place] += (lost / channel.num_ranks).to(self._device)
                    else:
                        sums[place] = lost
            if own is not None:
                own.copy_(sums.chunk(self.channels[DATA].num_ranks)[self.channels[DATA].rank])
        for name, members in self._starts.items():
            for target, start, count in members:
                begun = saved.get(f"{_STARTS}{target}")
                if begun is not None and begun.numel() == count:  # of the same rank
                    self._tensors[name][start : start + count] = begun
        return sorted(left)

    def owe(self, saved: Mapping[str, torch.Tensor], gradients: Gradients) -> list[str]:
        """Of what was saved of parameters that have no codes here: to be paid back in the next
        step. Those of which this rank has no whole gradient."""
        cannot = []
        for name, lost in saved.items():
            kind, _, target = name.partition("/")
            if f"{kind}/" == _STARTS:
                continue
            parameter = gradients.get(target)
            if parameter is None or parameter.numel() != lost.shape[-1]:
                cannot.append(target)
                continue
            total = lost.sum(0) if f"{kind}/" == _OF_RANKS else lost
            self._owed[target] = self._owed.get(target, 0) + total.to(parameter.device)
        return sorted({*cannot})

    @property
    def is_owing(self) -> bool:
        return bool(self._owed)

    def pay(self, gradients: Gradients) -> None:
        """What is owed, to the sums of all ranks' gradients."""
        for target in [target for target in self._owed if target in gradients]:
            _flat(gradients[target]).add_(self._owed.pop(target))

    def pay_all(self, gradients: Gradients) -> None:
        """All that is held back, by all ranks at once; then nothing is."""
        self.owe_all()
        self.pay(gradients)

    def owe_all(self) -> None:
        """All that is held back is to be paid in the next step."""
        for name, members in self._members.items():
            total = self._gathered(self._tensors[name]).sum(0)
            if (own := self._tensors.get(f"{name}{_OWN}")) is not None:
                total += self._gathered(own).flatten()
            for target, start, count in members:
                self._owed[target] = total[start : start + count]
        self.forget()

    @property
    def owed_numels(self) -> dict[str, int]:
        """The number of elements of what is owed, by parameter."""
        return {target: owed.numel() for target, owed in self._owed.items()}

    def take_over(self, numels: Mapping[str, int], fill: Callable[[torch.Tensor], object]) -> None:
        """What another rank owes is owed here from now on; ``fill`` puts its values in."""
        here = self._owed
        self._owed = {}
        for target, numel in numels.items():
            held = here.get(target)
            if held is None:
                held = torch.zeros(numel, device=self._device)
            fill(held)
            self._owed[target] = held

    def forget(self) -> None:
        for held in (self._tensors, self._members, self._starts):
            held.clear()

    def held_back(self, gradients: Gradients) -> float:
        """What all ranks hold back of a sample, as a share of this step's sum; the same on every
        rank, for which all come together."""
        each = max(1, _SAMPLE // max(1, sum(map(len, self._members.values()))))
        held, summed = [], []
        for name, members in self._members.items():
            own = self._tensors.get(f"{name}{_OWN}")
            for target, start, count in members:
                size = min(each, count)
                first = self._looks * each % (count - size + 1)
                here = self._tensors[name][start + first : start + first + size].clone()
                if own is not None:
                    self._add_own(own, here, start + first)
                held.append(here)
                summed.append(_flat(gradients[target])[first : first + size])
        self._looks += 1
        if not held:
            return 0.0
        total = self._gathered(torch.cat(held)).sum(0)
        norm = torch.cat(summed).norm()
        # Where nothing is finite, and where there is no gradient, nothing is said.
        return float(total.norm() / norm) if norm.isfinite() and norm > 0 else 0.0

    def agreed(self, figures: Sequence[float]) -> list[float]:
        """The most that any rank says."""
        said = self._gathered(torch.tensor(figures, dtype=torch.float64, device=CPU))
        return [float(most) for most in said.amax(0)]

    def _add_own(self, own: torch.Tensor, here: torch.Tensor, start: int) -> None:
        """What this rank lost of the sums that it makes, where it makes those that begin there."""
        begin = self.channels[DATA].rank * own.numel()
        low, high = max(start, begin), min(start + here.numel(), begin + own.numel())
        if low < high:
            here[low - start : high - start] += own[low - begin : high - begin]

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        channel = self.channels[DATA]
        gather = channel.calls.get("steelyard.all_gather", all_gather)
        return channel.waiting(gather(tensor.unsqueeze(0), channel.num_ranks, channel.group))


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """As it lies in memory, which is how it went."""
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def _members(graph: Graph) -> Iterator[tuple[str, tuple[_Member, ...]]]:
    """Of each of a graph's residuals: the parameters, and where in it they begin and how long they
    are."""
    for node in graph.nodes:
        if node.op in FIRST_CALLS and isinstance(residual := node.args[1], Ref):
            yield residual.name, _decoded(graph, node)


def _starts(graph: Graph) -> Iterator[tuple[str, tuple[_Member, ...]]]:
    """The same of what right factors start with."""
    for node in graph.nodes:
        if node.op == LEFT:
            _, _, start, shapes, rank = cast("_LeftArguments", node.args)
            found, begin = list[_Member](), 0
            for (target, _, _), (_, columns) in zip(_decoded(graph, node), shapes, strict=True):
                found.append((target, begin, rank * columns))
                begin += rank * columns
            yield start.name, tuple(found)


def _decoded(graph: Graph, coded: Node) -> tuple[_Member, ...]:
    """In their order."""
    (whole,) = graph.by_name[f"{coded.name.removesuffix('.coded')}.decoded"].outputs
    found = []
    for output in graph.outputs:
        (tensor,) = graph.by_name[output.node].outputs
        if tensor.storage == whole.storage:
            found.append((output.target, tensor.offset, tensor.numel))
    return tuple(sorted(found, key=lambda member: member[1]))


__all__ = ["ErrorFeedback", "Gradients"]
