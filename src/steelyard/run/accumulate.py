"""Gradient accumulation: forward and backward of a bound program over weighted micro-batches.

Not for the optimizer's step, nor for choosing the program: see step.py.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from steelyard import _torch
from steelyard.errors import Mismatch
from steelyard.run.binding import BoundProgram
from steelyard.run.finite_check import FiniteWatch
from steelyard.run.parameter_hooks import ParameterHooks
from steelyard.run.rng_state import per_rank_rng
from steelyard.run.target_counts import shares

Reduction = Literal["mean", "sum", "counted"]


class PipelineRunner(Protocol):
    """Runs forward and backward over all micro-batches, on ranks that each own some pipeline
    stages.

    ``held_bytes`` is the memory that this rank reserves for this between steps, in addition to the
    model; ``moved_bytes`` counts the bytes sent to other ranks so far without a network connection.
    ``finite`` checks the values before they are sent.
    """

    finite: FiniteWatch | None

    @property
    def held_bytes(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    def run(
        self, micro_batches: Sequence[Mapping[str, Any]], shares: Sequence[float]
    ) -> torch.Tensor:
        """Return the weighted sum of the micro-batch losses, on every rank."""
        ...


class GradientAccumulation:
    """Runs the micro-batches of this rank, and adds their gradients to those of the model.

    ``rank`` is this rank's data-parallel rank; every rank is given the whole batch. ``reduction``
    is how the loss reduces over the batch. ``finite`` checks the loss.
    """

    def __init__(
        self,
        hooks: ParameterHooks,
        *,
        device: torch.device,
        rank: int,
        reduction: Reduction,
        finite: FiniteWatch | None,
    ) -> None:
        self.rank = rank
        self._hooks, self._device = hooks, device
        self._reduction, self._finite = reduction, finite
        self._tangents: dict[tuple[int, float, float], torch.Tensor] = {}

    def forget_tangents(self) -> None:
        """Delete the cached tangents; they are keyed by programs that were just deleted."""
        self._tangents.clear()

    def run(
        self,
        bound: BoundProgram,
        leaves: Sequence[Any],
        scale: float | torch.Tensor,
        *,
        stages: PipelineRunner | None,
    ) -> torch.Tensor:
        """Run forward and backward, and check that the loss is finite.

        ``stages`` runs a pipeline-parallel program.
        """
        if self._finite is None:
            return self._accumulate(bound, leaves, scale, stages)
        self._finite.begin()
        loss = self._accumulate(bound, leaves, scale, stages)
        no_tangent = torch.zeros((), device="cpu")
        own = (
            bound.batch_inputs(leaves, index, no_tangent).values()
            for index in self._own_micro_batches(bound)
        )
        self._finite.end(loss, lambda: (leaf for part in own for leaf in part))
        return loss

    def _accumulate(
        self,
        bound: BoundProgram,
        leaves: Sequence[Any],
        scale: float | torch.Tensor,
        stages: PipelineRunner | None,
    ) -> torch.Tensor:
        """Run this rank's micro-batches forward and backward; return the sum of their weighted
        losses."""
        shares = self._shares(bound, leaves)
        if stages is not None:
            return self._accumulate_in_stages(stages, bound, leaves, shares, scale)
        for carrier in bound.emitted.carriers:
            carrier.begin()
        hooked = self._hooks.are_registered()
        total: torch.Tensor | None = None
        own = self._own_micro_batches(bound)
        with (
            self._on_device(),
            torch.no_grad(),
            self._own_rng(bound),
            _reduced_gradients_detached(bound),
        ):
            for index in own:
                part = bound if index == own[-1] else bound.earlier
                share = shares[index]
                # without a counted target, the mean would be 0 / 0, and there is no gradient
                if share == 0.0:
                    continue
                tangent, weight = self._tangent(bound, share, scale), self._weight(bound, share)
                inputs = part.inputs(leaves, index, tangent, weight, total)
                deferred: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if hooked else None
                sinks = part.sinks_for(inputs, deferred)
                with _torch.below_autograd():
                    loss = part.run(inputs, sinks)
                if deferred:
                    _accumulate_through_hooks(deferred)
                loss = loss.detach()
                if weight is None:
                    loss = _scaled(loss, share)
                total = loss if total is None or part.returns_total_loss else total + loss
                del loss  # otherwise it occupies memory while the next micro-batch runs
        assert total is not None
        return total

    def _accumulate_in_stages(
        self,
        stages: PipelineRunner,
        bound: BoundProgram,
        leaves: Sequence[Any],
        shares: Sequence[float],
        scale: float | torch.Tensor,
    ) -> torch.Tensor:
        if self._hooks.are_registered():
            raise self._hooks.mismatch(bound.repeats)
        if 0.0 in shares:
            raise _no_targets(f"micro-batch {shares.index(0.0) + 1}")
        own = self._own_micro_batches(bound)
        micro_batches = [
            bound.batch_inputs(leaves, index, self._tangent(bound, shares[index], scale))
            for index in own
        ]
        with self._on_device(), self._own_rng(bound):
            return stages.run(micro_batches, [shares[index] for index in own])

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the model's GPU current, because programs name a GPU without its index."""
        return (
            torch.cuda.device(self._device)
            if self._device.type == "cuda"
            else contextlib.nullcontext()
        )

    def _own_micro_batches(self, bound: BoundProgram) -> range:
        first = self.rank * bound.repeats
        return range(first, first + bound.repeats)

    def _own_rng(self, bound: BoundProgram) -> contextlib.AbstractContextManager[None]:
        return per_rank_rng(self.rank) if bound.draws_per_rank else contextlib.nullcontext()

    def _shares(self, bound: BoundProgram, leaves: Sequence[Any]) -> list[float]:
        """Return the weight of each micro-batch's loss in the loss of the batch; it is equal on all
        ranks.
        """
        summed = [1.0] * bound.parts
        if not bound.counters:
            total = sum(bound.sizes)
            return summed if self._reduction == "sum" else [n / total for n in bound.sizes]
        weights = shares(
            bound.counts(leaves), bound.sizes, are_weighted=self._reduction == "counted"
        )
        if bound.share is not None and 0.0 in weights:
            rank = weights.index(0.0) // bound.repeats
            raise _no_targets(f"rank {rank}'s share of the batch")
        return summed if self._reduction == "sum" else weights

    def _weight(self, bound: BoundProgram, share: float) -> torch.Tensor | None:
        """Return the weight tensor of this rank's loss, if the program sums the losses of the
        ranks."""
        planned = bound.share
        if planned is None:
            return None
        dtype = getattr(torch, planned.dtype)
        return torch.full(planned.shape, share, dtype=dtype, device=self._device)

    def _tangent(
        self, bound: BoundProgram, share: float, scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the scaled batch loss with respect to one micro-batch's loss."""
        planned = bound.tangent
        assert planned is not None, "a training step has a tangent"
        dtype = getattr(torch, planned.dtype)
        if isinstance(scale, torch.Tensor):
            tensor = scale.detach().to(dtype).reshape(planned.shape)
            return _scaled(tensor, share)
        key = (id(bound), scale, share)
        tangent = self._tangents.get(key)
        if tangent is None:
            # The factor of a gradient scaler changes often, so only the last one is cached.
            self._tangents.clear()
            tangent = torch.full(planned.shape, scale, dtype=dtype, device=self._device)
            tangent = self._tangents[key] = _scaled(tangent, share)
        return tangent


@contextlib.contextmanager
def _reduced_gradients_detached(bound: BoundProgram) -> Iterator[None]:
    """Exclude already reduced gradients from this step's reduction, and add them afterwards.

    If the step fails, they are restored unchanged.
    """
    before = bound.detach_reduced_gradients()
    try:
        yield
    except BaseException:
        bound.restore_gradients(before)
        raise
    for parameter, gradient in before:
        assert parameter.grad is not None
        parameter.grad = gradient.add_(parameter.grad)


def _scaled(value: torch.Tensor, share: float) -> torch.Tensor:
    """Scale a value. For a share of the form 1/n, divide, which is bitwise equal to the usual
    ``loss / 3``.
    """
    if share == 1.0:
        return value
    whole = round(1 / share)
    return value / whole if share == 1 / whole else value * share


def _no_targets(whose: str) -> Mismatch:
    return Mismatch(
        f"{whose} has no target that counts in the loss",
        expected="at least one target that is not ignored in each part of the batch",
        remedy="shuffle or pad the batch so that every part has some, or skip this batch",
    )


def _accumulate_through_hooks(deferred: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Accumulate each gradient through autograd, which runs the parameter's hooks."""
    deferred.reverse()
    while deferred:
        parameter, gradient = deferred.pop()
        torch.autograd.backward((parameter,), (gradient,))
