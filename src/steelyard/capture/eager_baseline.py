"""The eager baseline of a step: peak memory, and the parameters that get a gradient in PyTorch.

Every plan is compared with this baseline. Kernel workspaces are added once kernels are priced. Not
for the peak of the captured graph: see predict/liveness.py.
"""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.checks.errors import check_scalar, check_trains, reading_errors
from steelyard.capture.checks.loss_inputs import name_of_tensor
from steelyard.capture.tracing.fake_execution import (
    FakeMode,
    StorageWatch,
    fake_like,
    removing_fakes,
    with_fake_tensors,
)
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.to_ir import layout, signature_of_call
from steelyard.errors import CaptureRefused

# An operator with its arguments: values, and for tensors their layout and the call that made them.
Call = tuple[Any, tuple[Hashable, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerBaseline:
    """The eager run of one step, observed on fake tensors.

    ``held_bytes`` maps an operator's signature to the most bytes that are live, in addition to the
    resident ones, while such an operator runs. ``without_gradient`` names the trainable parameters
    that get no gradient. ``calls`` counts the operator calls of the forward pass, see
    ``forward_calls``.
    """

    held_bytes: Mapping[str, int] = field(repr=False)
    without_gradient: frozenset[str]
    calls: Mapping[Call, int] = field(compare=False, repr=False)

    def peak_bytes(self, workspaces: Mapping[str, int] = MappingProxyType({})) -> int:
        """Return the peak bytes beyond the resident ones; ``workspaces`` are by operator signature.

        Operators that eager PyTorch runs in another form than the graph (dropout, in-place sums)
        are not listed, and count as needing no workspace; ``has_unknown`` finds those for which
        this is wrong.
        """
        return max((n + workspaces.get(s, 0) for s, n in self.held_bytes.items()), default=0)

    @property
    def has_unknown(self) -> bool:
        """True if a kernel saves an unknown number of bytes for its backward pass.

        oneDNN's recurrent layers do: torch 2.13 describes their saved workspace as empty.
        """
        return any(s.startswith("aten.mkldnn_rnn_layer.") for s in self.held_bytes)


def run_eager_baseline(model: nn.Module, loss: Loss, batch: Any) -> EagerBaseline:
    """Run one eager step on fake tensors and return its baseline.

    The run also triggers one-time initialization (transformers completes its configuration), which
    capture would otherwise mistake for a side effect of every step.
    """
    with fake_step(model, batch) as (mode, parameters, fake_batch):
        watch, count = _LevelWatch(model, parameters, fake_batch), _CallCount()
        with mode, watch, _torch.quiet_logs():
            with count:
                value = loss(model, fake_batch)
            check_scalar(value)
            check_trains(model, value)
            _refuse_foreign_tensors(loss, value, parameters)
            value.backward()
            del value
        missing = {n for n, p in parameters.items() if p.requires_grad and p.grad is None}
    return EagerBaseline(
        held_bytes=watch.held_bytes, without_gradient=frozenset(missing), calls=count.calls
    )


def _refuse_foreign_tensors(
    loss: Loss, value: torch.Tensor, parameters: dict[str, nn.Parameter]
) -> None:
    """Refuse a loss that trains tensors other than the model's parameters, such as its own weights.

    Leaves created within the step, which are fake, are ignored here; tracing refuses them and names
    their line.
    """
    ours = {id(p) for p in parameters.values()}
    seen: set[Any] = set()
    pending = [value.grad_fn]
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        leaf: torch.Tensor | None = getattr(function, "variable", None)
        if leaf is not None and not isinstance(leaf, _torch.FakeTensor) and id(leaf) not in ours:
            name = name_of_tensor(loss, leaf)
            what = f"{name}, which is" if name else f"a tensor of shape {list(leaf.shape)} that is"
            raise CaptureRefused(
                f"the loss trains {what} not a parameter of the model",
                expected="a loss without trainable tensors of its own: only the model is trained",
                remedy="call a teacher under torch.no_grad(), or freeze it "
                "(teacher.requires_grad_(False)); make what is to be trained part of the model",
            )
        pending += [f for f, _ in function.next_functions]


class _LevelWatch(StorageWatch):
    """Records the most live bytes during any call of each operator signature."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], batch: Any) -> None:
        leaves = [x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        resident = [*parameters.values(), *model.buffers(), *leaves]
        super().__init__(resident, on_call=self._note)
        self.held_bytes: dict[str, int] = {}

    def _note(self, func: Any, args: Any, kwargs: Any, _: Any) -> None:
        # The signature is the same as in the captured graph, including the marks of repeated
        # tensors, so that the same cost is found.
        signature = signature_of_call(
            func, args, kwargs, layout_of=layout, name_of=lambda tensor: str(id(tensor))
        )
        self.held_bytes[signature] = max(self.held_bytes.get(signature, 0), self.alive_bytes)


def forward_calls(model: nn.Module, loss: Loss, batch: Any) -> Counter[Call]:
    """Count the operator calls of the forward pass, each with its arguments and their producers."""
    with fake_step(model, batch) as (mode, _, fake_batch):
        count = _CallCount(cache_mode=mode)
        with mode, count, _torch.quiet_logs():
            loss(model, fake_batch)
    return count.calls


@contextlib.contextmanager
def fake_step(
    model: nn.Module, batch: Any
) -> Iterator[tuple[FakeMode, dict[str, nn.Parameter], Any]]:
    """Yield the fake mode, the fake parameters by name, and the fake batch for calling the loss."""
    check_trains(model)
    mode = FakeMode()
    fake_batch = _torch.tree_map(
        lambda leaf: fake_like(leaf, mode) if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    with (
        reading_errors(model),
        torch.enable_grad(),
        removing_fakes(model, mode, keep=fake_batch),
        _torch.functional_calls(),
        with_fake_tensors(model, mode) as parameters,
    ):
        before = {name: _ids(m._parameters) for name, m in model.named_modules()}
        yield mode, parameters, fake_batch
        for name, module in model.named_modules():
            if _ids(module._parameters) != before.get(name):
                raise CaptureRefused(
                    f"the forward pass replaces parameters of {name or 'the model'}",
                    expected="a forward pass that keeps the model's parameters, or restores them",
                    remedy="assign the tensor to another name, and keep the parameter",
                )


def _ids(table: Mapping[str, Any]) -> dict[str, int]:
    """Return ids rather than tensors: references to fake tensors would be found and removed."""
    return {name: id(tensor) for name, tensor in table.items()}


class _CallCount(_torch.TorchDispatchMode):
    """Counts calls; with ``cache_mode``, takes the result of a repeated call from a cache.

    Torch takes a third of a millisecond to infer a result, and a deep model repeats the same calls.
    A cached view gets a storage of its own, but no call depends on that.
    """

    def __init__(self, *, cache_mode: FakeMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch 2.13
        self.calls: Counter[Call] = Counter()
        self._mode = cache_mode
        self._seen: dict[Call, tuple[torch.Tensor, torch.device]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device(args[0])  # a frequent query that computes nothing
        kwargs = kwargs or {}
        call = func, (*map(_signature, args), *map(_signature, kwargs.items()))
        self.calls[call] += 1
        cached = self._seen.get(call)
        result: Any
        if cached is not None and self._mode is not None:
            result = _torch.FakeTensor(self._mode, *cached)
            self._mode.note(result)
        else:
            result = func(*args, **kwargs)
            if self._mode is not None and not _torch.mutates(func) and _is_plain(result):
                self._seen[call] = _torch.on_meta(result), result.fake_device
        for tensor in (result,) if isinstance(result, torch.Tensor) else _torch.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                tensor.__dict__[_MAKER] = func, tuple(tensor.shape)
        return result


def _signature(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        maker = value.__dict__.get(_MAKER)
        return value.dtype, _device(value), tuple(value.shape), value.stride(), maker
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return str(value)  # 0, False and 0.0 compare equal, but are different arguments


def _device(tensor: torch.Tensor) -> Any:
    """Return ``tensor.device`` without the extra operator call that a fake tensor makes for it."""
    return getattr(tensor, "fake_device", None) or tensor.device


def _is_plain(result: Any) -> bool:
    return (
        type(result) is _torch.FakeTensor
        and result.layout is torch.strided
        and not result.is_conj()
        and not result.is_neg()
    )


_MAKER = "_steelyard_made_by"
