"""What plain PyTorch would do with the same step: its peak, and which parameters get a gradient.

The "before" of every plan. What kernels need besides is known once they are priced, and is added
then. Not for the captured graph's own peak.
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
    faked,
    like,
    without_fakes_left,
)
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.to_ir import layout, signature_of_call
from steelyard.errors import CaptureRefused

# The operator and what it was given: values, and of tensors their layout and what made them.
Call = tuple[Any, tuple[Hashable, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerBaseline:
    """``without_gradient`` names trainable parameters.

    ``held_bytes`` is the most that lies above the resident bytes while an operator of a signature
    runs. ``calls`` counts those of the forward pass, see ``forward_calls``.
    """

    held_bytes: Mapping[str, int] = field(repr=False)
    without_gradient: frozenset[str]
    calls: Mapping[Call, int] = field(compare=False, repr=False)

    def peak_bytes(self, workspaces: Mapping[str, int] = MappingProxyType({})) -> int:
        """Above the resident bytes, with the workspace of each kernel by its signature.

        What eager runs as another operator than the graph (dropout, sums in place) is not on the
        list, and is taken to need none; see ``has_unknown`` for where that is far off.
        """
        return max((n + workspaces.get(s, 0) for s, n in self.held_bytes.items()), default=0)

    @property
    def has_unknown(self) -> bool:
        """Whether a kernel keeps more for its backward pass than can be known without running it:
        oneDNN's recurrent layers do, and torch 2.13 describes what they keep as empty.
        """
        return any(s.startswith("aten.mkldnn_rnn_layer.") for s in self.held_bytes)


def eager_twin(model: nn.Module, loss: Loss, batch: Any) -> EagerBaseline:
    """Also lets the model do what it does only once, such as transformers' filling in of its
    configuration, so that capture does not take it for a side effect of every step.
    """
    with on_fakes(model, batch) as (mode, parameters, fake_batch):
        watch, count = _LevelWatch(model, parameters, fake_batch), _CallCount()
        with mode, watch, _torch.quiet_logs():
            with count:
                value = loss(model, fake_batch)
            check_scalar(value)
            check_trains(model, value)
            _refuse_others(loss, value, parameters)
            value.backward()
            del value
        missing = {n for n, p in parameters.items() if p.requires_grad and p.grad is None}
    return EagerBaseline(
        held_bytes=watch.held_bytes, without_gradient=frozenset(missing), calls=count.calls
    )


def _refuse_others(loss: Loss, value: torch.Tensor, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse a loss that trains tensors besides the model's parameters, such as weights of its own.

    A leaf made within the step, a fake one, is none of them; tracing names the line that makes it.
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
                f"the loss trains {what} no parameter of the model",
                expected="a loss without trainable tensors of its own: only the model is trained",
                remedy="call a teacher under torch.no_grad(), or freeze it "
                "(teacher.requires_grad_(False)); make what is to be trained part of the model",
            )
        pending += [f for f, _ in function.next_functions]


class _LevelWatch(StorageWatch):
    """Also remembers the highest level at which each operator ran."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], batch: Any) -> None:
        leaves = [x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        resident = [*parameters.values(), *model.buffers(), *leaves]
        super().__init__(resident, on_call=self._note)
        self.held_bytes: dict[str, int] = {}

    def _note(self, func: Any, args: Any, kwargs: Any, _: Any) -> None:
        # As in the captured graph, for the same price: a tensor given twice is marked there too.
        signature = signature_of_call(
            func, args, kwargs, layout_of=layout, name_of=lambda tensor: str(id(tensor))
        )
        self.held_bytes[signature] = max(self.held_bytes.get(signature, 0), self.alive_bytes)


def forward_calls(model: nn.Module, loss: Loss, batch: Any) -> Counter[Call]:
    """Every operator call of the forward pass with what it is given and who made that, counted."""
    with on_fakes(model, batch) as (mode, _, fake_batch):
        count = _CallCount(remembers=mode)
        with mode, count, _torch.quiet_logs():
            loss(model, fake_batch)
    return count.calls


@contextlib.contextmanager
def on_fakes(
    model: nn.Module, batch: Any
) -> Iterator[tuple[FakeMode, dict[str, nn.Parameter], Any]]:
    """The mode, the fake parameters by name, and the batch to call the loss with."""
    check_trains(model)
    mode = FakeMode()
    fake_batch = _torch.tree_map(
        lambda leaf: like(leaf, mode) if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    with (
        reading_errors(model),
        torch.enable_grad(),
        without_fakes_left(model, mode, apart_from=fake_batch),
        _torch.functional_calls(),
        faked(model, mode) as parameters,
    ):
        before = {name: _ids(m._parameters) for name, m in model.named_modules()}
        yield mode, parameters, fake_batch
        for name, module in model.named_modules():
            if _ids(module._parameters) != before.get(name):
                raise CaptureRefused(
                    f"the forward pass leaves other parameters in {name or 'the model'}",
                    expected="a forward pass that keeps the model's parameters, or puts them back",
                    remedy="compute with a tensor of another name, and keep the parameter",
                )


def _ids(table: Mapping[str, Any]) -> dict[str, int]:
    """Not the tensors themselves: whoever holds a fake is searched for it."""
    return {name: id(tensor) for name, tensor in table.items()}


class _CallCount(_torch.TorchDispatchMode):
    """Counts calls; one that ``remembers`` makes up the result of a call it has seen before.

    Describing a result anew takes torch a third of a millisecond, and a deep model makes the same
    calls again and again. A view made up so has a storage of its own, which no call depends on.
    """

    def __init__(self, *, remembers: FakeMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch 2.13
        self.calls: Counter[Call] = Counter()
        self._mode = remembers
        self._seen: dict[Call, tuple[torch.Tensor, torch.device]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device(args[0])  # asked for at every turn, and no work
        kwargs = kwargs or {}
        call = func, (*map(_described, args), *map(_described, kwargs.items()))
        self.calls[call] += 1
        known = self._seen.get(call)
        result: Any
        if known is not None and self._mode is not None:
            result = _torch.FakeTensor(self._mode, *known)
            self._mode.note(result)
        else:
            result = func(*args, **kwargs)
            if self._mode is not None and not _torch.mutates(func) and _is_plain(result):
                self._seen[call] = _torch.on_meta(result), result.fake_device
        for made in (result,) if isinstance(result, torch.Tensor) else _torch.tree_leaves(result):
            if isinstance(made, torch.Tensor):
                made.__dict__[_MAKER] = func, tuple(made.shape)
        return result


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        maker = value.__dict__.get(_MAKER)
        return value.dtype, _device(value), tuple(value.shape), value.stride(), maker
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return str(value)  # 0, False and 0.0 are equal, and not the same argument


def _device(tensor: torch.Tensor) -> Any:
    """As ``tensor.device``, which of a fake tensor is one more operator call."""
    return getattr(tensor, "fake_device", None) or tensor.device


def _is_plain(result: Any) -> bool:
    return (
        type(result) is _torch.FakeTensor
        and result.layout is torch.strided
        and not result.is_conj()
        and not result.is_neg()
    )


_MAKER = "_steelyard_made_by"
