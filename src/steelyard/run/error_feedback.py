"""Error feedback: the residuals of compressed gradients, kept from step to step for each parameter.

For a checkpoint, residuals are gathered from all ranks; they can be restored on another number of
ranks. If the codec changes, they are applied at once. Not for computing them: see
operators/gradient_codecs.py.
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

# Checkpoint keys: each rank's residual of its own gradients (one row per rank), the residual of the
# sums, and the starting factors of the next step, which are equal on all ranks.
_OF_RANKS, _OF_SUMS, _STARTS = "of ranks/", "of sums/", "starts/"
_OWN = ":own"
# The number of sampled elements over all parameters.
_SAMPLE = 16 << 10
_Member = tuple[str, int, int]
Gradients = Mapping[str, torch.Tensor]
_LeftArguments = tuple[Any, Ref, Ref, tuple[tuple[int, int], ...], int]


class ErrorFeedback:
    """Residuals by the names of program inputs; these are the same for batches of every shape."""

    def __init__(self, channels: Mapping[str, Channel], device: torch.device = CPU) -> None:
        self.channels, self._device = channels, device
        self._tensors: dict[str, torch.Tensor] = {}
        self._members: dict[str, tuple[_Member, ...]] = {}
        self._starts: dict[str, tuple[_Member, ...]] = {}
        self._checks = 0
        # Residuals to be applied in the next step, for parameters that the program does not send
        # with that codec.
        self._owed: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self._tensors.values()]

    def of(self, graph: Graph, node: Node) -> torch.Tensor:
        """Return the tensor for a residual input of the program; a residual starts as zero."""
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

    def gather(self) -> dict[str, torch.Tensor]:
        """Gather the residuals of all ranks, including those still to be applied; all ranks must
        call this.
        """
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

    def restore(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Restore this rank's residuals; return the parameters that were not restored.

        If the number of ranks is the same as when they were saved, each rank gets its own residuals
        back; otherwise each gets an equal share of the sum.
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
                factors = saved.get(f"{_STARTS}{target}")
                if factors is not None and factors.numel() == count:  # the saved rank is the same
                    self._tensors[name][start : start + count] = factors
        return sorted(left)

    def owe(self, saved: Mapping[str, torch.Tensor], gradients: Gradients) -> list[str]:
        """Schedule saved residuals for the next step: those of parameters no longer compressed.

        Returns the parameters for which this rank has no whole gradient.
        """
        unmatched = []
        for name, lost in saved.items():
            kind, _, target = name.partition("/")
            if f"{kind}/" == _STARTS:
                continue
            parameter = gradients.get(target)
            if parameter is None or parameter.numel() != lost.shape[-1]:
                unmatched.append(target)
                continue
            total = lost.sum(0) if f"{kind}/" == _OF_RANKS else lost
            self._owed[target] = self._owed.get(target, 0) + total.to(parameter.device)
        return sorted({*unmatched})

    @property
    def is_owing(self) -> bool:
        return bool(self._owed)

    def pay(self, gradients: Gradients) -> None:
        """Add the residuals that are scheduled for this step to the summed gradients."""
        for target in [target for target in self._owed if target in gradients]:
            _flat(gradients[target]).add_(self._owed.pop(target))

    def pay_all(self, gradients: Gradients) -> None:
        """Add all residuals of all ranks to the summed gradients, and reset them; all ranks must
        call this.
        """
        self.owe_all()
        self.pay(gradients)

    def owe_all(self) -> None:
        """Schedule all residuals of all ranks for the next step, and reset them; all ranks must
        call this.
        """
        for name, members in self._members.items():
            total = self._gathered(self._tensors[name]).sum(0)
            if (own := self._tensors.get(f"{name}{_OWN}")) is not None:
                total += self._gathered(own).flatten()
            for target, start, count in members:
                self._owed[target] = total[start : start + count]
        self.forget()

    @property
    def owed_numels(self) -> dict[str, int]:
        """The number of elements of the scheduled residuals, by parameter."""
        return {target: owed.numel() for target, owed in self._owed.items()}

    def take_over(self, numels: Mapping[str, int], fill: Callable[[torch.Tensor], object]) -> None:
        """Replace the scheduled residuals with those of another rank; ``fill`` receives each into a
        tensor.
        """
        before = self._owed
        self._owed = {}
        for target, numel in numels.items():
            owed = before.get(target)
            if owed is None:
                owed = torch.zeros(numel, device=self._device)
            fill(owed)
            self._owed[target] = owed

    def forget(self) -> None:
        for mapping in (self._tensors, self._members, self._starts):
            mapping.clear()

    def residual_ratio(self, gradients: Gradients) -> float:
        """Return the norm of the summed residuals relative to this step's gradient, on a sample.

        The result is equal on all ranks, which must all call this.
        """
        per_parameter = max(1, _SAMPLE // max(1, sum(map(len, self._members.values()))))
        residuals, summed = [], []
        for name, members in self._members.items():
            own = self._tensors.get(f"{name}{_OWN}")
            for target, start, count in members:
                size = min(per_parameter, count)
                first = self._checks * per_parameter % (count - size + 1)
                here = self._tensors[name][start + first : start + first + size].clone()
                if own is not None:
                    self._add_own(own, here, start + first)
                residuals.append(here)
                summed.append(_flat(gradients[target])[first : first + size])
        self._checks += 1
        if not residuals:
            return 0.0
        total = self._gathered(torch.cat(residuals)).sum(0)
        norm = torch.cat(summed).norm()
        # The ratio means nothing unless the gradient is finite and not zero.
        return float(total.norm() / norm) if norm.isfinite() and norm > 0 else 0.0

    def max_over_ranks(self, figures: Sequence[float]) -> list[float]:
        """Return the maximum of each figure over all ranks."""
        figures_by_rank = self._gathered(torch.tensor(figures, dtype=torch.float64, device=CPU))
        return [float(largest) for largest in figures_by_rank.amax(0)]

    def _add_own(self, own: torch.Tensor, here: torch.Tensor, start: int) -> None:
        """Add this rank's residual of the sums, for the elements of ``here`` that it reduces."""
        begin = self.channels[DATA].rank * own.numel()
        low, high = max(start, begin), min(start + here.numel(), begin + own.numel())
        if low < high:
            here[low - start : high - start] += own[low - begin : high - begin]

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        channel = self.channels[DATA]
        gather = channel.calls.get("steelyard.all_gather", all_gather)
        return channel.waiting(gather(tensor.unsqueeze(0), channel.num_ranks, channel.group))


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """View a gradient as one dim in memory order, which is the order in which it is sent."""
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def _members(graph: Graph) -> Iterator[tuple[str, tuple[_Member, ...]]]:
    """Yield, for each residual of a graph, its parameters with their offsets and lengths."""
    for node in graph.nodes:
        if node.op in FIRST_CALLS and isinstance(residual := node.args[1], Ref):
            yield residual.name, _decoded(graph, node)


def _starts(graph: Graph) -> Iterator[tuple[str, tuple[_Member, ...]]]:
    """Yield, for each tensor of starting right factors, its parameters in the same way."""
    for node in graph.nodes:
        if node.op == LEFT:
            _, _, start, shapes, rank = cast("_LeftArguments", node.args)
            found, begin = list[_Member](), 0
            for (target, _, _), (_, columns) in zip(_decoded(graph, node), shapes, strict=True):
                found.append((target, begin, rank * columns))
                begin += rank * columns
            yield start.name, tuple(found)


def _decoded(graph: Graph, coded: Node) -> tuple[_Member, ...]:
    """Return the parameters of an encoded tensor, by offset."""
    (decoded,) = graph.by_name[f"{coded.name.removesuffix('.coded')}.decoded"].outputs
    found = []
    for output in graph.outputs:
        (tensor,) = graph.by_name[output.node].outputs
        if tensor.storage == decoded.storage:
            found.append((output.target, tensor.offset, tensor.numel))
    return tuple(sorted(found, key=lambda member: member[1]))


__all__ = ["ErrorFeedback", "Gradients"]
