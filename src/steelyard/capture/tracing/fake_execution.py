"""Run pieces of the user's step on fake tensors: no arithmetic, no memory, true shapes and aliases.

For what is planned but not traced into the graph: eager's own peak, the optimizer's step.
"""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from steelyard import _torch


def faked(
    model: nn.Module, mode: Any
) -> contextlib.AbstractContextManager[dict[str, nn.Parameter]]:
    """The model with fake parameters and buffers for a while; see ``exchanged``."""
    return exchanged(model, lambda tensor: like(tensor, mode))


@contextlib.contextmanager
def exchanged(
    model: nn.Module, twin_of: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[str, nn.Parameter]]:
    """The model with other parameters and buffers for a while; tied ones stay tied.

    Yields the other parameters by name. The user's tensors are put back whatever happens.
    """
    memo: dict[int, torch.Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    restored: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        known = memo.get(id(tensor))
        if known is None:
            known = memo[id(tensor)] = twin_of(tensor)
        return known

    names = {id(p): name for name, p in reversed([*model.named_parameters()])}
    try:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                table: dict[str, Any] = held
                restored.append((table, dict(table)))
                for name, tensor in restored[-1][1].items():
                    if tensor is not None:
                        table[name] = twin(tensor)
        for key, other in memo.items():
            if key in names and isinstance(other, nn.Parameter):
                parameters[names[key]] = other
        yield parameters
    finally:
        # Fakes that outlive this are looked for: ours are none of those.
        memo.clear()
        parameters.clear()
        for table, original in reversed(restored):
            table.clear()
            table.update(original)


class FakeMode(_torch.FakeTensorMode):
    """Knows which of the tensors made under it are still alive, without a look at all objects."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.note(result)
        return result

    def note(self, made: Any) -> None:
        """``made`` under this mode: a tensor, or whatever else an operator gives."""
        if type(made) is _torch.FakeTensor:
            self._made.append(weakref.ref(made))
        elif isinstance(made, (tuple, list)):
            for part in made:
                self.note(part)

    def alive(self, *, apart_from: set[int]) -> list[weakref.ref[torch.Tensor]]:
        """``apart_from``: the identities of those that may be."""
        self._made = [ref for ref in self._made if ref() is not None]
        return [ref for ref in self._made if id(ref()) not in apart_from]


@contextlib.contextmanager
def without_fakes_left(model: nn.Module, mode: FakeMode, *, apart_from: Any) -> Iterator[None]:
    """Take back each fake tensor that a forward pass has left where it outlives the pass.

    Caches, globals and lists of weights (nn.LSTM keeps one) are filled with what it saw.
    ``apart_from`` is the fake batch, which its maker still holds.
    """
    ours = {id(leaf) for leaf in _torch.tree_leaves(apart_from)}
    before = [(vars(m), _Kept.of(m)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            if any(map(_has_fakes, attributes.values())):
                kept.put_back(attributes)
        _take_back(mode, ours)


@contextlib.contextmanager
def put_back_on_failure(model: nn.Module) -> Iterator[None]:
    """What a forward pass has changed in the model's attributes is undone if it is refused."""
    before = [(vars(m), _Kept.of(m)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for attributes, kept in before:
            kept.put_back(attributes)
        raise


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """What forward passes change in attributes of the model is undone: nn.LSTM lists weights."""
    before = [(vars(m), _Kept.of(m)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            kept.put_back(attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A module's attributes, and what its plain dicts and lists held."""

    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "_Kept":
        held = dict(vars(module))
        containers = [(v, v.copy()) for v in held.values() if type(v) in (dict, list)]
        return cls(attributes=held, containers=containers)

    def put_back(self, attributes: dict[str, Any]) -> None:
        attributes.clear()
        attributes.update(self.attributes)
        for container, contents in self.containers:
            container.clear()
            if isinstance(container, dict):
                container.update(contents)
            else:
                container.extend(contents)


def _take_back(mode: FakeMode, ours: set[int]) -> None:
    """Out of caches, and out of dicts and lists: globals, closures, attributes of helpers."""
    for generation in range(3):  # most are held by nothing but one another, and young
        if not mode.alive(apart_from=ours):
            return
        gc.collect(generation)
    if mode.alive(apart_from=ours):
        _clear_caches_of_fakes()
    for ref in mode.alive(apart_from=ours):
        fake = ref()
        for holder in gc.get_referrers(fake) if fake is not None else ():
            if type(holder) is dict:
                for key in [k for k, v in holder.items() if v is fake]:
                    del holder[key]
            elif type(holder) is list:
                holder[:] = [x for x in holder if x is not fake]


def _clear_caches_of_fakes() -> None:
    """Every functools.lru_cache outside torch with a fake in it: models keep index tensors so."""
    caches = [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]
    for cache in caches:
        if (cache.__module__ or "").startswith(_WITHOUT_TENSORS):
            continue
        if _holds_fakes(cache):
            cache.cache_clear()


_WITHOUT_TENSORS = ("torch", "steelyard", "sympy")
# So far into what a cache holds: a value, a value in a tuple of an object, and so on.
_DEEPEST = 6


def _holds_fakes(cache: Any) -> bool:
    layer, seen = [cache], {id(cache)}
    for _ in range(_DEEPEST):
        parts = {id(x): x for x in gc.get_referents(*layer)}
        layer = [x for key, x in parts.items() if key not in seen and type(x) not in _CLOSED]
        seen |= parts.keys()
        if any(isinstance(x, _torch.FakeTensor) for x in layer):
            return True
    return False


_CLOSED = (type, FunctionType, ModuleType)


def _has_fakes(value: Any) -> bool:
    return any(isinstance(x, _torch.FakeTensor) for x in _torch.tree_leaves(value))


@contextlib.contextmanager
def on_cpu(model: nn.Module, batch: Any) -> Iterator[Any]:
    """A model or batch on the meta device as if it lay on the CPU; others as they are.

    Yields the batch.
    """
    leaves = (x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor))
    if not any(t.device.type == "meta" for t in (*model.parameters(), *leaves)):
        yield batch
        return
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    twin = _torch.tree_map(
        lambda leaf: like(leaf, mode) if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    with faked(model, mode), mode:
        yield twin


def filled(batch: Any) -> Any:
    """A batch that is only imagined (meta device) with zeros for values, to be traced and run."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "meta":
            return leaf
        if leaf.is_contiguous():
            # Takes no memory until it is written.
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
        size, stride = leaf.size(), leaf.stride()
        return torch.empty_strided(size, stride, dtype=leaf.dtype, device="cpu").zero_()

    return _torch.tree_map(real, batch)


def like(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake twin on the CPU: the meta device leaves gradients out of some models."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        twin = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin


def described(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operator gives on fake tensors.

    Torch 2.13 describes products of groups for bfloat16 alone, while its kernels take others too.
    """
    dtype = args[0].dtype if func is torch.ops.aten._grouped_mm.default else torch.bfloat16
    if dtype == torch.bfloat16:
        return func(*args, **kwargs)
    halves = _torch.tree_map(
        lambda x: x.to(torch.bfloat16) if getattr(x, "dtype", None) == dtype else x, (args, kwargs)
    )
    return func(*halves[0], **{**halves[1], "out_dtype": None}).to(dtype)


class StorageWatch(_torch.TorchDispatchMode):
    """Counts the bytes of storages that are alive, from the first operator it sees.

    ``on_call(operator, args, kwargs, result)`` and ``on_death(storage key)`` may follow along.
    """

    def __init__(
        self,
        resident: list[torch.Tensor],
        *,
        on_call: Callable[[Any, Any, Any, Any], None] | None = None,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch 2.13
        self._known = {_torch.storage_key(t) for t in resident}
        self._on_call = on_call
        self._on_death = on_death
        self.alive_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = described(func, args, kwargs or {})
        for leaf in _torch.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._born(leaf)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        if self._on_call is not None:
            self._on_call(func, args, kwargs or {}, result)
        return result

    def _born(self, tensor: torch.Tensor) -> None:
        key = _torch.storage_key(tensor)
        if key in self._known:
            return
        self._known.add(key)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        self.alive_bytes += nbytes
        weakref.finalize(storage, self._died, key, nbytes)

    def _died(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.alive_bytes -= nbytes
        if self._on_death is not None:
            self._on_death(key)
