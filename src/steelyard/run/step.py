"""A program on a live model: the training step that a user calls in place of forward and backward.

Computes what eager PyTorch would, or refuses before anything runs. Not for planning, nor for the
loop around it: see train_loop.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import nn

from steelyard import _torch
from steelyard.comm.channel import Channel
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, Mismatch
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.program import Program
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.run.binding import (
    BatchLayout,
    BoundProgram,
    Shapes,
    check_trained,
    live_tensors,
    shapes_of,
)
from steelyard.run.codegen import Emitted, emit
from steelyard.run.compression_fallback import CompressionFallback
from steelyard.run.error_feedback import ErrorFeedback
from steelyard.run.finite_check import FiniteWatch
from steelyard.run.model_guards import ModelWatch, OptimizerWatch
from steelyard.run.rng_state import drawing_apart
from steelyard.run.target_counts import shares

Constants = Mapping[str, torch.Tensor]
Reduction = Literal["mean", "sum", "counted"]


class CodeReads(Protocol):
    """What the captured code read besides tensors; ``unread`` are keys of a batch that it did not.

    ``check`` raises where something that was read is no longer so.
    """

    @property
    def unread(self) -> frozenset[str]: ...

    def check(self) -> None: ...


# Given the step, what has another shape there, and the planned one, in words.
OnChange = Callable[[str], None]
TellLoss = Callable[[torch.Tensor | None], torch.Tensor]
OtherShape = Callable[[Any], tuple[Program, Constants, CodeReads]]


class Held(Protocol):
    """What of the model this rank holds between steps, where it is not all of it."""

    def whole(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> contextlib.AbstractContextManager[None]: ...


class InStages(Protocol):
    """Forward and backward over all micro-batches, by ranks that each carry out some stages.
    ``held_bytes`` is what they keep here between steps, besides the model; ``moved_bytes`` what
    they have sent to others in all, by ways of their own. ``finite`` sees what they send."""

    finite: FiniteWatch | None

    @property
    def held_bytes(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    def run(self, given: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> torch.Tensor:
        """The loss of all of them, each of which weighs its share; every rank is told."""
        ...


class LiveStep:
    """``step(batch)`` is zero_grad, forward, backward and optimizer step; it returns the loss.

    ``batch`` is one like those to come; of it only shapes and kinds are kept. ``reduction`` says
    what the loss does over the batch, so that micro-batches add up to it. ``other_shape`` plans a
    batch of another shape, or raises; without it such a batch is a Mismatch. ``on_change`` is told
    of every batch whose shapes are others than those of the last. ``reads`` is asked before every
    step. ``states`` are the weights, gradients and what the optimizer keeps that lie in offload
    memory, ``parts`` the tensors of which this rank holds a part, or none. ``rank`` is which of the
    ranks that share the batch this one is: every rank is given the whole batch. ``in_stages`` makes
    what carries a program out whose layers lie on several ranks. Over ``channels`` ranks put
    together what each has lost of its gradients, where they go in codes. ``guard`` says in which
    codes: ``program`` is of the first, and ``other_shape`` is asked for the others too. ``finite``
    is told the loss of every step, and sees what ``runner`` and stages exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        constants: Constants,
        batch: Any,
        optimizer: torch.optim.Optimizer | None = None,
        states: OffloadedStates | None = None,
        parts: Held | None = None,
        reduction: Reduction = "mean",
        other_shape: OtherShape | None = None,
        on_change: OnChange = lambda _: None,
        runner: Callable[[Program], Emitted] = emit,
        reads: CodeReads | None = None,
        rank: int = 0,
        in_stages: Callable[[Program, Mapping[str, Any]], InStages] | None = None,
        channels: Mapping[str, Channel] = MappingProxyType({}),
        guard: CompressionFallback | None = None,
        finite: FiniteWatch | None = None,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise BadInput(
                "LBFGS evaluates the loss several times a step",
                expected="an optimizer whose step() takes no closure",
                remedy="use another optimizer, or your own loop with step.backward",
            )
        check_trained(program, model)
        self.model = model
        self.optimizer = optimizer
        self.states = states
        self.parts = parts
        self.program = program
        self.other: dict[Shapes, Program] = {}
        self._rank = rank
        self._tell_loss: TellLoss | None = None
        self._stands_by = False
        self._in_stages = in_stages
        self._stages: dict[Program, InStages] = {}
        self._reduction = reduction
        self._other_shape = other_shape
        self._on_change = on_change
        self._runner = runner
        self._watch = ModelWatch(model, constants)
        self._optimizer_watch = OptimizerWatch(optimizer, model) if optimizer else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.home = next((p.device for p in self._parameters), CPU)
        self._accumulators: list[Any] | None = None
        self._layout = BatchLayout(batch, unread=frozenset() if reads is None else reads.unread)
        self._planned = self._last = shapes_of(self._layout.leaves(batch))
        self.finite = finite
        self.residuals = ErrorFeedback(channels, self.home)
        self._guard_by(guard)
        # In which codes the last step was.
        self.rung = 0
        # Steps, or backward passes, that were taken; a run that is resumed counts on.
        self.taken = 0
        self._bound = {(0, self._planned): self._bind(program, constants, self._planned)}
        self._reads = {(0, self._planned): reads}
        self._devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
        self._tangents: dict[tuple[int, float, float], torch.Tensor] = {}

    def __call__(self, batch: Any) -> torch.Tensor:
        """One whole step; the loss as it was before it, detached."""
        bound, leaves = self._ready(batch)
        if self._stands_by:
            assert self._tell_loss is not None
            return self._tell_loss(None)
        self.zero_grad()
        loss = self._watched_passes(bound, leaves, 1.0)
        self._look_at_codes(loss)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss if self._tell_loss is None else self._tell_loss(loss)

    def backward(self, batch: Any, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Add the gradients of ``scale`` times the loss, as ``(loss * scale).backward()`` would.

        Returns the loss, not scaled.
        """
        if not (isinstance(scale, int | float) or getattr(scale, "numel", int)() == 1):
            raise Mismatch(
                f"the scale of the loss is {str(scale)[:40]!r}",
                expected="a number, or a tensor of one element",
                remedy="step.backward(batch, 0.5), for example",
            )
        bound, leaves = self._ready(batch)
        loss = self._watched_passes(bound, leaves, scale)
        self._look_at_codes(loss)
        return loss

    def zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def is_planned(self, batch: Any) -> bool:
        """Whether the next step, with this batch, is the one that was planned: of the same shapes,
        and with gradients in the plan's codes."""
        if self.guard is not None and self.guard.rung != 0:
            return False
        return shapes_of(self._layout.leaves(batch)) == self._planned

    def gradients(self) -> list[torch.Tensor]:
        """Those that are held now."""
        return [p.grad for p in self._parameters if p.grad is not None]

    @property
    def shared_bytes(self) -> int:
        """Memory that this rank keeps for what others send."""
        exchanged = (one for bound in self._bound.values() for one in bound.emitted.carriers)
        stages = sum(stages.held_bytes for stages in self._stages.values())
        return stages + sum(one.held_bytes for one in exchanged)

    @property
    def moved_bytes(self) -> int:
        """What went to others so far, but over no connection."""
        return sum(stages.moved_bytes for stages in self._stages.values())

    @property
    def needs_all_ranks(self) -> bool:
        """Whether what is to be saved is put together from what each rank holds."""
        return self.parts is not None or bool(self.residuals.tensors)

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within it all ranks hold all of the model and of what the optimizer keeps."""
        return self.parts.whole(self.optimizer) if self.parts else contextlib.nullcontext()

    def states_near(self) -> contextlib.AbstractContextManager[None]:
        """Within it all that the optimizer keeps can be read."""
        return self.states.visiting() if self.states else contextlib.nullcontext()

    @contextlib.contextmanager
    def states_loading(self) -> Iterator[Callable[[str], Callable[..., torch.Tensor]]]:
        """Within it the optimizer may be given other state, in tensors that this makes for each
        parameter; what the plan moves goes to offload memory at the end."""
        if self.states is None:
            yield lambda _: torch.empty_strided
        else:
            yield self.states.empty_for
            self.states.put_away()

    def _ready(self, batch: Any) -> tuple[BoundProgram, list[Any]]:
        """All that can be refused, before anything is touched."""
        self._refuse_modes()
        self._watch.check()
        if self.states is not None:
            self.states.tensors.begin()
        if self._optimizer_watch is not None:
            self._optimizer_watch.check()
        leaves = self._layout.leaves(batch)
        for name, leaf in zip(self._layout.names, leaves):
            if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
                raise _not_dense(name, leaf)
        shapes = shapes_of(leaves)
        if shapes != self._last:
            self._on_change(self._changed(shapes))
            self._last = shapes
        self.rung = self.guard.rung if self.guard else 0
        bound = self._bound.get((self.rung, shapes))
        if bound is None:
            bound = self._bound[self.rung, shapes] = self._bind_other(batch, shapes)
        if (reads := self._reads[self.rung, shapes]) is not None:
            reads.check()
        bound.check_strides(leaves)
        if bound.repeats > 1 and self._any_hooks():
            raise self._hook_of_parts(bound.repeats)
        if bound.made_in_slices and self._any_hooks():
            self._refuse_hooks_of(bound.made_in_slices)
        self.taken += 1
        return bound, leaves

    def _changed(self, shapes: Shapes) -> str:
        """Alike on all ranks that have these shapes."""
        said = [
            f"{name.removeprefix('batch:')} has shape {list(now or ())}, not {list(planned or ())}"
            for name, now, planned in zip(self._layout.names, shapes, self._planned, strict=True)
            if now != planned
        ]
        return f"at step {self.taken + 1} {', '.join(said) or 'it has the planned shapes again'}"

    def _any_hooks(self) -> bool:
        if self._accumulators is None:
            self._accumulators = _torch.accumulators(self._parameters)
        return _torch.any_hooks(self._parameters, self._accumulators)

    def _hook_of_parts(self, repeats: int) -> Mismatch:
        named = self.model.named_parameters()
        name = next(name for name, p in named if p.requires_grad and _torch.any_hooks([p]))
        return Mismatch(
            f"parameter {name} has a hook, which would run for each of {repeats} micro-batches",
            expected="no hooks of parameters in a step that was planned in micro-batches",
            remedy="remove the hook, or plan again with it: the batch is then left whole",
        )

    def _refuse_hooks_of(self, names: Sequence[str]) -> None:
        for name in names:
            if _torch.any_hooks([self.model.get_parameter(name)]):
                raise Mismatch(
                    f"parameter {name} has a hook, and its gradient is never here whole",
                    expected="no hooks of parameters whose gradients the plan makes in slices",
                    remedy="remove the hook, or plan again with it: that gradient is made whole",
                )

    def _refuse_modes(self) -> None:
        if torch.is_inference_mode_enabled():
            raise _mode("torch.inference_mode()", "call the step outside of it")
        if any(map(torch.is_autocast_enabled, self._devices)):
            raise _mode("torch.autocast", "put autocast inside of the loss function and plan again")
        if torch.compiler.is_compiling():
            raise _mode("torch.compile", "leave the step out of what is compiled")

    def _bind_other(self, batch: Any, shapes: Shapes) -> BoundProgram:
        if self._other_shape is None:
            name, now, planned = next(
                (n, s, p)
                for n, s, p in zip(self._layout.names, shapes, self._planned, strict=True)
                if s != p
            )
            raise Mismatch(
                f"{name} has shape {list(now or ())}",
                expected=f"{list(planned or ())}, as the step was captured",
                remedy="drop the last partial batch (drop_last=True), or plan for this shape",
            )
        program, constants, reads = self._other_shape(batch)
        if missed := self._layout.unread - reads.unread:
            raise Mismatch(
                f"batch:{sorted(missed)} is read in a batch of this shape alone",
                expected="values that the step reads at every shape, or at none",
                remedy="leave it out of the batch, or give it as a tensor",
            )
        check_trained(program, self.model)
        self._reads[self.rung, shapes] = reads
        bound = self._bind(program, constants, shapes)
        if shapes != self._planned:
            self.other[shapes] = program
        elif self.rung == 0:
            self.program = program
        return bound

    def _look_at_codes(self, loss: torch.Tensor) -> None:
        """Behind a step: what an earlier plan's codes held back is paid, and what these do, where
        they are given up."""
        if self.residuals.is_owing:
            self.residuals.pay(self._whole_gradients())
        if self.guard is None:
            return
        gradients = self._whole_gradients
        if self.guard.is_to_give_up(float(loss), lambda: self.residuals.held_back(gradients())):
            self.residuals.pay_all(gradients())
            for key in [key for key in self._bound if key[0] <= self.rung]:
                del self._bound[key], self._reads[key]
            self._tangents.clear()  # by what is no longer there

    def _whole_gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {f"{WEIGHT}{name}": p.grad for name, p in named if p.grad is not None}

    def turn_among(
        self,
        *,
        rank: int,
        channels: Mapping[str, Channel],
        tell_loss: TellLoss | None,
        stands_by: bool,
    ) -> None:
        """From the next step on, which other ranks take together. All are told the loss of the
        first, and one that stands by does nothing else."""
        self._rank, self.residuals.channels = rank, channels
        self._tell_loss, self._stands_by = tell_loss, stands_by

    def begin_anew(self, guard: CompressionFallback | None) -> None:
        """From the next step on, in which what codes hold back is paid, with the programs that
        ``other_shape`` then gives, at each shape."""
        self.residuals.owe_all()
        self._guard_by(guard)
        self.rung = 0
        for held in (self._bound, self._reads, self._tangents, self.other):
            held.clear()

    def _guard_by(self, guard: CompressionFallback | None) -> None:
        self.guard = guard
        if guard is not None:
            guard.agreed = self.residuals.agreed

    def lost(self) -> dict[str, torch.Tensor]:
        """What codes have lost on all ranks, and in which they are: for a checkpoint."""
        found = self.residuals.whole()
        if self.guard is not None:
            found[_GUARD] = torch.tensor(self.guard.state, device="cpu")
        return found

    def put_back_lost(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """The parameters of which something stays lost: what went in other codes is paid in the
        next step, where this rank has all of the gradient."""
        saved = dict(saved)
        state = saved.pop(_GUARD, None)
        if self.guard is not None and state is not None:
            self.guard.go_on(*map(int, state))
            if self.guard.rung != 0 and not self.guard.warm_up:
                self.residuals.forget()
        stays = {*self.residuals.put_back(saved)}
        named = self.model.named_parameters()
        # What lies in parts or far has no gradient here that anything could be added to.
        has_all = self.parts is None and self.states is None and not self._stages
        return self.residuals.owe(
            {name: x for name, x in saved.items() if name.partition("/")[2] in stays},
            {f"{WEIGHT}{name}": p for name, p in named if has_all and p.requires_grad},
        )

    def _bind(self, program: Program, constants: Constants, shapes: Shapes) -> BoundProgram:
        live = live_tensors(self.model, constants)
        if program.pipeline is not None:
            assert self._in_stages is not None
            self._stages[program] = stages = self._in_stages(program, live)
            stages.finite = self.finite
            live = dict.fromkeys(live)  # stages have their own
        return BoundProgram(
            program,
            self._runner(program),
            live=live,
            names=self._layout.names,
            shapes=shapes,
            far_sink=self.states.tensors.sink if self.states else lambda _: None,
            residuals=self.residuals,
        )

    def _watched_passes(
        self, bound: BoundProgram, leaves: Sequence[Any], scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward, and whether the loss is finite."""
        if self.finite is None:
            return self._accumulate(bound, leaves, scale)
        self.finite.begin()
        loss = self._accumulate(bound, leaves, scale)
        nothing = torch.zeros((), device="cpu")
        own = (bound.given(leaves, index, nothing).values() for index in self._own_parts(bound))
        self.finite.end(loss, lambda: (leaf for part in own for leaf in part))
        return loss

    def _accumulate(
        self, bound: BoundProgram, leaves: Sequence[Any], scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward over this rank's micro-batches; the loss over all of them."""
        shares = self._shares(bound, leaves)
        if bound.program.pipeline is not None:
            return self._accumulate_in_stages(bound, leaves, shares, scale)
        for carrier in bound.emitted.carriers:
            carrier.begin()
        hooked = self._any_hooks()
        total: torch.Tensor | None = None
        own = self._own_parts(bound)
        with self._at_home(), torch.no_grad(), self._own_numbers(bound), _added_to_later(bound):
            for index in own:
                part = bound if index == own[-1] else bound.earlier
                share = shares[index]
                if share == 0.0:  # nothing counted: no loss, no gradient, and 0 / 0 in its mean
                    continue
                tangent, weight = self._tangent(bound, share, scale), self._weight(bound, share)
                inputs = part.inputs(leaves, index, tangent, weight, total)
                late: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if hooked else None
                sinks = part.sinks_for(inputs, late)
                with _torch.below_autograd():
                    loss = part.run(inputs, sinks)
                if late:
                    _through_hooks(late)
                loss = loss.detach()
                if weight is None:
                    loss = _times(loss, share)
                total = loss if total is None or part.tells_all else total + loss
                del loss  # or it stands beside the total while the next part runs
        assert total is not None
        return total

    def _accumulate_in_stages(
        self,
        bound: BoundProgram,
        leaves: Sequence[Any],
        shares: Sequence[float],
        scale: float | torch.Tensor,
    ) -> torch.Tensor:
        if self._any_hooks():
            raise self._hook_of_parts(bound.repeats)
        if 0.0 in shares:
            raise _nothing_counted(f"micro-batch {shares.index(0.0) + 1}")
        own = self._own_parts(bound)
        given = [
            bound.given(leaves, index, self._tangent(bound, shares[index], scale)) for index in own
        ]
        with self._at_home(), self._own_numbers(bound):
            return self._stages[bound.program].run(given, [shares[index] for index in own])

    def _at_home(self) -> contextlib.AbstractContextManager[Any]:
        """What a program says of a GPU without its number is this one."""
        return (
            torch.cuda.device(self.home) if self.home.type == "cuda" else contextlib.nullcontext()
        )

    def _own_parts(self, bound: BoundProgram) -> range:
        first = self._rank * bound.repeats
        return range(first, first + bound.repeats)

    def _own_numbers(self, bound: BoundProgram) -> contextlib.AbstractContextManager[None]:
        return drawing_apart(self._rank) if bound.draws_apart else contextlib.nullcontext()

    def _shares(self, bound: BoundProgram, leaves: Sequence[Any]) -> list[float]:
        """What the loss of each part weighs in the loss of the batch; all ranks find the same."""
        summed = [1.0] * bound.parts
        if not bound.counters:
            total = sum(bound.sizes)
            return summed if self._reduction == "sum" else [n / total for n in bound.sizes]
        weighed = shares(
            bound.counts(leaves), bound.sizes, are_weighed=self._reduction == "counted"
        )
        if bound.share is not None and 0.0 in weighed:
            rank = weighed.index(0.0) // bound.repeats
            raise _nothing_counted(f"rank {rank}'s share of the batch")
        return summed if self._reduction == "sum" else weighed

    def _weight(self, bound: BoundProgram, share: float) -> torch.Tensor | None:
        """What a rank's loss weighs, where the program adds the losses of ranks up."""
        planned = bound.share
        if planned is None:
            return None
        dtype = getattr(torch, planned.dtype)
        return torch.full(planned.shape, share, dtype=dtype, device=self.home)

    def _tangent(
        self, bound: BoundProgram, share: float, scale: float | torch.Tensor
    ) -> torch.Tensor:
        """The gradient of what ``backward`` is called on with respect to one micro-batch's loss."""
        planned = bound.tangent
        assert planned is not None, "a step that trains has a tangent"
        dtype = getattr(torch, planned.dtype)
        if isinstance(scale, torch.Tensor):
            given = scale.detach().to(dtype).reshape(planned.shape)
            return _times(given, share)
        key = (id(bound), scale, share)
        tangent = self._tangents.get(key)
        if tangent is None:
            # A scaler's factor changes often; only the last is worth keeping.
            self._tangents.clear()
            tangent = torch.full(planned.shape, scale, dtype=dtype, device=self.home)
            tangent = self._tangents[key] = _times(tangent, share)
        return tangent


# In a checkpoint, among what codes have lost.
_GUARD = "guard"


@contextlib.contextmanager
def _added_to_later(bound: BoundProgram) -> Iterator[None]:
    """Gradients that were summed before stay out of what is summed within; where that fails, they
    are all there is."""
    before = bound.put_by()
    try:
        yield
    except BaseException:
        bound.put_back(before)
        raise
    for parameter, gradient in before:
        assert parameter.grad is not None
        parameter.grad = gradient.add_(parameter.grad)


def _times(value: torch.Tensor, share: float) -> torch.Tensor:
    """Divided where the share is one of so many, as people write it: ``loss / 3``."""
    if share == 1.0:
        return value
    whole = round(1 / share)
    return value / whole if share == 1 / whole else value * share


def _nothing_counted(whose: str) -> Mismatch:
    return Mismatch(
        f"no target of {whose} counts in the loss",
        expected="at least one target that is not ignored in each part of the batch",
        remedy="shuffle or pad the batch so that every part holds some, or skip this batch",
    )


def _through_hooks(late: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Hand each gradient to autograd's own accumulation, which runs the parameter's hooks."""
    late.reverse()
    while late:
        parameter, gradient = late.pop()
        torch.autograd.backward((parameter,), (gradient,))


def _not_dense(name: str, leaf: torch.Tensor) -> Mismatch:
    return Mismatch(
        f"{name} is {'a nested tensor' if leaf.is_nested else f'of layout {leaf.layout}'}",
        expected="a dense tensor, as the step was captured with",
        remedy="pad it (to_padded_tensor)" if leaf.is_nested else "give it as .to_dense()",
    )


def _mode(name: str, remedy: str) -> BadInput:
    return BadInput(
        f"the step was called under {name}, which its captured graph knows nothing of",
        expected="to be called as the step was captured",
        remedy=remedy,
    )


__all__ = ["CodeReads", "Constants", "LiveStep", "OtherShape", "Reduction"]
