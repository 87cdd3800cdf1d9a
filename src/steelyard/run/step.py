"""The live training step: a program bound to a model, called in place of forward and backward.

It computes what eager PyTorch would, or raises an error before anything runs. Not for planning, or
for the training loop: see train_loop.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from steelyard.comm.channel import Channel
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, Mismatch
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.program import Program
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.run.accumulate import GradientAccumulation, PipelineRunner, Reduction
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
from steelyard.run.parameter_hooks import ParameterHooks

Constants = Mapping[str, torch.Tensor]


class CodeReads(Protocol):
    """The Python state that the captured code read; ``unread`` has the batch keys that it did not
    read.

    ``check`` raises if any of that state has changed since.
    """

    @property
    def unread(self) -> frozenset[str]: ...

    def check(self) -> None: ...


# Called with a description of a shape change: the step, the new shape and the planned one.
OnChange = Callable[[str], None]
BroadcastLoss = Callable[[torch.Tensor | None], torch.Tensor]
OtherShape = Callable[[Any], tuple[Program, Constants, CodeReads]]


class ShardedModelState(Protocol):
    """A model of which this rank holds only a shard between steps."""

    def whole(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> contextlib.AbstractContextManager[None]: ...


class LiveStep:
    """``step(batch)`` runs zero_grad, forward, backward and optimizer step, and returns the loss.

    ``batch`` is an example batch; only its shapes and kinds are recorded. ``reduction`` says how
    the loss reduces over the batch, so that micro-batch losses are weighted correctly.
    ``other_shape`` plans a batch of another shape or raises; without it such a batch is a Mismatch.
    ``on_change`` is called whenever the batch shapes differ from those of the step before.
    ``reads`` is checked before every step. ``states`` holds the offloaded weights, gradients and
    optimizer state, ``parts`` the sharded tensors of this rank, if any. ``rank`` is this rank's
    data-parallel rank; every rank is given the whole batch. ``in_stages`` creates the runner of a
    pipeline-parallel program. ``channels`` carry the residuals of compressed gradients between
    ranks. ``guard`` selects the gradient codec: ``program`` uses the first one, and ``other_shape``
    provides the programs of the others. ``finite`` checks the loss of every step and the values
    that ``runner`` and pipeline stages exchange.
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
        parts: ShardedModelState | None = None,
        reduction: Reduction = "mean",
        other_shape: OtherShape | None = None,
        on_change: OnChange = lambda _: None,
        runner: Callable[[Program], Emitted] = emit,
        reads: CodeReads | None = None,
        rank: int = 0,
        in_stages: Callable[[Program, Mapping[str, Any]], PipelineRunner] | None = None,
        channels: Mapping[str, Channel] = MappingProxyType({}),
        guard: CompressionFallback | None = None,
        finite: FiniteWatch | None = None,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise BadInput(
                "LBFGS evaluates the loss several times a step",
                expected="an optimizer whose step() takes no closure",
                remedy="use another optimizer, or write your own loop with step.backward",
            )
        check_trained(program, model)
        self.model = model
        self.optimizer = optimizer
        self.states = states
        self.parts = parts
        self.program = program
        self.other: dict[Shapes, Program] = {}
        self._broadcast_loss: BroadcastLoss | None = None
        self._is_standby = False
        self._in_stages = in_stages
        self._stages: dict[Program, PipelineRunner] = {}
        self._other_shape = other_shape
        self._on_change = on_change
        self._runner = runner
        self._watch = ModelWatch(model, constants)
        self._optimizer_watch = OptimizerWatch(optimizer, model) if optimizer else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = next((p.device for p in self._parameters), CPU)
        self._hooks = ParameterHooks(model)
        self._layout = BatchLayout(batch, unread=frozenset() if reads is None else reads.unread)
        self._planned = self._last = shapes_of(self._layout.leaves(batch))
        self.finite = finite
        self._accumulation = GradientAccumulation(
            self._hooks, device=self.device, rank=rank, reduction=reduction, finite=finite
        )
        self.residuals = ErrorFeedback(channels, self.device)
        self._set_guard(guard)
        # The position of the last step's gradient codec in the fallback order.
        self.rung = 0
        # The number of steps or backward passes so far; a resumed run continues the count.
        self.taken = 0
        self._bound = {(0, self._planned): self._bind(program, constants, self._planned)}
        self._reads = {(0, self._planned): reads}
        self._devices = {t.device.type for t in (*model.parameters(), *model.buffers())}

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one training step; return the detached loss before the update."""
        bound, leaves = self._prepare(batch)
        if self._is_standby:
            assert self._broadcast_loss is not None
            return self._broadcast_loss(None)
        self.zero_grad()
        loss = self._run(bound, leaves, 1.0)
        self._check_compression(loss)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss if self._broadcast_loss is None else self._broadcast_loss(loss)

    def backward(self, batch: Any, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Add the gradients of ``scale`` times the loss, as ``(loss * scale).backward()`` would.

        Returns the loss, not scaled.
        """
        if not (isinstance(scale, int | float) or getattr(scale, "numel", int)() == 1):
            raise Mismatch(
                f"the scale of the loss is {str(scale)[:40]!r}",
                expected="a number, or a tensor of one element",
                remedy="write, for example, step.backward(batch, 0.5)",
            )
        bound, leaves = self._prepare(batch)
        loss = self._run(bound, leaves, scale)
        self._check_compression(loss)
        return loss

    def zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def is_planned(self, batch: Any) -> bool:
        """True if the next step, with this batch, is the planned one: same shapes, and the planned
        gradient codec.
        """
        if self.guard is not None and self.guard.rung != 0:
            return False
        return shapes_of(self._layout.leaves(batch)) == self._planned

    def gradients(self) -> list[torch.Tensor]:
        """Return the current gradients of the model."""
        return [p.grad for p in self._parameters if p.grad is not None]

    @property
    def shared_bytes(self) -> int:
        """Memory that this rank reserves to receive data from other ranks."""
        exchanged = (one for bound in self._bound.values() for one in bound.emitted.carriers)
        stages = sum(stages.held_bytes for stages in self._stages.values())
        return stages + sum(one.held_bytes for one in exchanged)

    @property
    def moved_bytes(self) -> int:
        """Bytes that pipeline stages have sent so far without a network connection."""
        return sum(stages.moved_bytes for stages in self._stages.values())

    @property
    def needs_all_ranks(self) -> bool:
        """True if a checkpoint has to be gathered from all ranks."""
        return self.parts is not None or bool(self.residuals.tensors)

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which every rank has the unsharded model and optimizer state."""
        return self.parts.whole(self.optimizer) if self.parts else contextlib.nullcontext()

    def states_readable(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all optimizer state can be read, offloaded or not."""
        return self.states.readable() if self.states else contextlib.nullcontext()

    @contextlib.contextmanager
    def states_loading(self) -> Iterator[Callable[[str], Callable[..., torch.Tensor]]]:
        """Within this context, the optimizer may be given new state.

        Yields a function that returns, for each parameter, the allocator for its state; on exit
        the offloaded part is written to offload memory.
        """
        if self.states is None:
            yield lambda _: torch.empty_strided
        else:
            yield self.states.allocator_for
            self.states.offload_all()

    def _prepare(self, batch: Any) -> tuple[BoundProgram, list[Any]]:
        """Refuse everything that can be refused before anything is changed; return the bound
        program.
        """
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
            self._on_change(self._shape_change(shapes))
            self._last = shapes
        self.rung = self.guard.rung if self.guard else 0
        bound = self._bound.get((self.rung, shapes))
        if bound is None:
            bound = self._bound[self.rung, shapes] = self._bind_new_shape(batch, shapes)
        if (reads := self._reads[self.rung, shapes]) is not None:
            reads.check()
        bound.check_strides(leaves)
        self._hooks.refuse_in_micro_batches(bound.repeats)
        self._hooks.refuse_on_sliced(bound.sliced_gradients)
        self.taken += 1
        return bound, leaves

    def _run(
        self, bound: BoundProgram, leaves: Sequence[Any], scale: float | torch.Tensor
    ) -> torch.Tensor:
        stages = self._stages[bound.program] if bound.program.pipeline is not None else None
        return self._accumulation.run(bound, leaves, scale, stages=stages)

    def _shape_change(self, shapes: Shapes) -> str:
        """Describe a shape change; the text is equal on all ranks that see the same shapes."""
        changes = [
            f"{name.removeprefix('batch:')} has shape {list(now or ())}, not {list(planned or ())}"
            for name, now, planned in zip(self._layout.names, shapes, self._planned, strict=True)
            if now != planned
        ]
        return f"at step {self.taken + 1} {', '.join(changes) or 'it has the planned shapes again'}"

    def _refuse_modes(self) -> None:
        if torch.is_inference_mode_enabled():
            raise _unsupported_mode("torch.inference_mode()", "call the step outside of this mode")
        if any(map(torch.is_autocast_enabled, self._devices)):
            raise _unsupported_mode(
                "torch.autocast", "put autocast inside of the loss function and plan again"
            )
        if torch.compiler.is_compiling():
            raise _unsupported_mode("torch.compile", "exclude the step from the compiled function")

    def _bind_new_shape(self, batch: Any, shapes: Shapes) -> BoundProgram:
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
        if unplanned := self._layout.unread - reads.unread:
            raise Mismatch(
                f"batch:{sorted(unplanned)} is read only in a batch of this shape",
                expected="values that the step reads at every shape or at none",
                remedy="remove it from the batch, or pass it as a tensor",
            )
        check_trained(program, self.model)
        self._reads[self.rung, shapes] = reads
        bound = self._bind(program, constants, shapes)
        if shapes != self._planned:
            self.other[shapes] = program
        elif self.rung == 0:
            self.program = program
        return bound

    def _check_compression(self, loss: torch.Tensor) -> None:
        """Finish a step: apply the residuals left over from an earlier plan, and fall back to a
        less lossy codec if the guard decides so.
        """
        if self.residuals.is_owing:
            self.residuals.pay(self._whole_gradients())
        if self.guard is None:
            return
        gradients = self._whole_gradients
        if self.guard.should_fall_back(
            float(loss), lambda: self.residuals.residual_ratio(gradients())
        ):
            self.residuals.pay_all(gradients())
            for key in [key for key in self._bound if key[0] <= self.rung]:
                del self._bound[key], self._reads[key]
            self._accumulation.forget_tangents()

    def _whole_gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {f"{WEIGHT}{name}": p.grad for name, p in named if p.grad is not None}

    def change_ranks(
        self,
        *,
        rank: int,
        channels: Mapping[str, Channel],
        broadcast_loss: BroadcastLoss | None,
        stands_by: bool,
    ) -> None:
        """Change the set of ranks that take part, from the next step on.

        With ``broadcast_loss``, all ranks receive the loss of the first rank; a rank that
        ``stands_by`` does nothing else.
        """
        self._accumulation.rank, self.residuals.channels = rank, channels
        self._broadcast_loss, self._is_standby = broadcast_loss, stands_by

    def switch_programs(self, guard: CompressionFallback | None) -> None:
        """Switch to new programs from the next step on; ``other_shape`` returns them for each
        shape.

        The next step also applies all residuals that compressed gradients have left.
        """
        self.residuals.owe_all()
        self._set_guard(guard)
        self.rung = 0
        for cache in (self._bound, self._reads, self.other):
            cache.clear()
        self._accumulation.forget_tangents()

    def _set_guard(self, guard: CompressionFallback | None) -> None:
        self.guard = guard
        if guard is not None:
            guard.max_over_ranks = self.residuals.max_over_ranks

    def residual_state(self) -> dict[str, torch.Tensor]:
        """Return the compression residuals of all ranks and the state of the guard, for a
        checkpoint."""
        found = self.residuals.gather()
        if self.guard is not None:
            found[_GUARD] = torch.tensor(self.guard.state, device="cpu")
        return found

    def restore_residuals(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Restore compression residuals; return the parameters whose residual is lost.

        Residuals of another codec are applied in the next step, if this rank has the whole
        gradient.
        """
        saved = dict(saved)
        state = saved.pop(_GUARD, None)
        if self.guard is not None and state is not None:
            self.guard.load_state(*map(int, state))
            if self.guard.rung != 0 and not self.guard.warm_up:
                self.residuals.forget()
        unrestored = {*self.residuals.restore(saved)}
        named = self.model.named_parameters()
        # For a sharded or offloaded parameter, this rank has no whole gradient to which a residual
        # could be added.
        has_all = self.parts is None and self.states is None and not self._stages
        return self.residuals.owe(
            {name: x for name, x in saved.items() if name.partition("/")[2] in unrestored},
            {f"{WEIGHT}{name}": p for name, p in named if has_all and p.requires_grad},
        )

    def _bind(self, program: Program, constants: Constants, shapes: Shapes) -> BoundProgram:
        live = live_tensors(self.model, constants)
        if program.pipeline is not None:
            assert self._in_stages is not None
            self._stages[program] = stages = self._in_stages(program, live)
            stages.finite = self.finite
            live = dict.fromkeys(live)  # stages have tensors of their own
        return BoundProgram(
            program,
            self._runner(program),
            live=live,
            names=self._layout.names,
            shapes=shapes,
            offload_sink=self.states.tensors.sink if self.states else lambda _: None,
            residuals=self.residuals,
        )


# The key of the guard's state among the residuals of a checkpoint.
_GUARD = "guard"


def _not_dense(name: str, leaf: torch.Tensor) -> Mismatch:
    return Mismatch(
        f"{name} is {'a nested tensor' if leaf.is_nested else f'of layout {leaf.layout}'}",
        expected="a dense tensor, as the step was captured with",
        remedy="pad it (to_padded_tensor)" if leaf.is_nested else "pass it as .to_dense()",
    )


def _unsupported_mode(name: str, remedy: str) -> BadInput:
    return BadInput(
        f"the step was called under {name}, which was not active when it was captured",
        expected="the same modes as when the step was captured",
        remedy=remedy,
    )


__all__ = ["CodeReads", "Constants", "LiveStep", "OtherShape"]
