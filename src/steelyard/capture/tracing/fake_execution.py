"""Executes the user's code on fake tensors: no arithmetic or memory, true shapes and aliases.

Used for the eager baseline and the optimizer's step. Not for tracing forward and backward: see
joint_graph.py.
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


def with_fake_tensors(
    model: nn.Module, mode: Any
) -> contextlib.AbstractContextManager[dict[str, nn.Parameter]]:
    """Give the model fake parameters and buffers within the context; see
    ``with_swapped_tensors``.
    """
    return with_swapped_tensors(model, lambda tensor: fake_like(tensor, mode))


@contextlib.contextmanager
def with_swapped_tensors(
    model: nn.Module, twin_of: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[str, nn.Parameter]]:
    """Replace each parameter and buffer by ``twin_of`` it within the context; ties are kept.

    Yields the replacement parameters by name. The user's tensors are always restored.
    """
    memo: dict[int, torch.Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        replaced = memo.get(id(tensor))
        if replaced is None:
            replaced = memo[id(tensor)] = twin_of(tensor)
        return replaced

    names = {id(p): name for name, p in reversed([*model.named_parameters()])}
    try:
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                table: dict[str, Any] = slots
                saved.append((table, dict(table)))
                for name, tensor in saved[-1][1].items():
                    if tensor is not None:
                        table[name] = twin(tensor)
        for key, replacement in memo.items():
            if key in names and isinstance(replacement, nn.Parameter):
                parameters[names[key]] = replacement
        yield parameters
    finally:
        # Leaked fake tensors are searched for later, so our own references must go.
        memo.clear()
        parameters.clear()
        for table, original in reversed(saved):
            table.clear()
            table.update(original)


class FakeMode(_torch.FakeTensorMode):
    """Tracks the live tensors created within the context, without scanning all Python objects."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.note(result)
        return result

    def note(self, made: Any) -> None:
        """Track the tensors in ``made``, an operator's result under this mode."""
        if type(made) is _torch.FakeTensor:
            self._made.append(weakref.ref(made))
        elif isinstance(made, (tuple, list)):
            for part in made:
                self.note(part)

    def alive(self, *, exclude: set[int]) -> list[weakref.ref[torch.Tensor]]:
        """Return the live fakes, without those whose ids are in ``exclude``."""
        self._made = [ref for ref in self._made if ref() is not None]
        return [ref for ref in self._made if id(ref()) not in exclude]


@contextlib.contextmanager
def removing_fakes(model: nn.Module, mode: FakeMode, *, keep: Any) -> Iterator[None]:
    """Remove each fake tensor that a forward pass stored in a place that outlives the pass.

    Forward passes store tensors in caches, globals and lists of weights (nn.LSTM has one). ``keep``
    is the fake batch, which the caller still uses.
    """
    excluded = {id(leaf) for leaf in _torch.tree_leaves(keep)}
    before = [(vars(m), _Kept.of(m)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            if any(map(_tree_has_fakes, attributes.values())):
                saved.restore(attributes)
        _remove_fakes(mode, excluded)


@contextlib.contextmanager
def restoring_attributes_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of the model's modules if the body raises."""
    before = [(vars(m), _Kept.of(m)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for attributes, saved in before:
            saved.restore(attributes)
        raise


@contextlib.contextmanager
def restoring_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of the model's modules after the body: nn.LSTM lists its weights."""
    before = [(vars(m), _Kept.of(m)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            saved.restore(attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A snapshot of a module's attributes and of the contents of its plain dicts and lists."""

    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "_Kept":
        snapshot = dict(vars(module))
        containers = [(v, v.copy()) for v in snapshot.values() if type(v) in (dict, list)]
        return cls(attributes=snapshot, containers=containers)

    def restore(self, attributes: dict[str, Any]) -> None:
        attributes.clear()
        attributes.update(self.attributes)
        for container, contents in self.containers:
            container.clear()
            if isinstance(container, dict):
                container.update(contents)
            else:
                container.extend(contents)


def _remove_fakes(mode: FakeMode, excluded: set[int]) -> None:
    """Remove fake tensors from caches, dicts and lists: globals, closures, attributes of
    helpers.
    """
    for generation in range(3):  # most are young and only in reference cycles
        if not mode.alive(exclude=excluded):
            return
        gc.collect(generation)
    if mode.alive(exclude=excluded):
        _clear_caches_of_fakes()
    for ref in mode.alive(exclude=excluded):
        fake = ref()
        for holder in gc.get_referrers(fake) if fake is not None else ():
            if type(holder) is dict:
                for key in [k for k, v in holder.items() if v is fake]:
                    del holder[key]
            elif type(holder) is list:
                holder[:] = [x for x in holder if x is not fake]


def _clear_caches_of_fakes() -> None:
    """Clear any functools.lru_cache outside torch that holds a fake tensor: models cache index
    tensors.
    """
    caches = [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]
    for cache in caches:
        if (cache.__module__ or "").startswith(_WITHOUT_TENSORS):
            continue
        if _contains_fakes(cache):
            cache.cache_clear()


_WITHOUT_TENSORS = ("torch", "steelyard", "sympy")
# How many levels of references are followed into a cache.
_MAX_DEPTH = 6


def _contains_fakes(cache: Any) -> bool:
    layer, seen = [cache], {id(cache)}
    for _ in range(_MAX_DEPTH):
        parts = {id(x): x for x in gc.get_referents(*layer)}
        layer = [x for key, x in parts.items() if key not in seen and type(x) not in _NOT_FOLLOWED]
        seen |= parts.keys()
        if any(isinstance(x, _torch.FakeTensor) for x in layer):
            return True
    return False


_NOT_FOLLOWED = (type, FunctionType, ModuleType)


def _tree_has_fakes(value: Any) -> bool:
    return any(isinstance(x, _torch.FakeTensor) for x in _torch.tree_leaves(value))


@contextlib.contextmanager
def on_cpu(model: nn.Module, batch: Any) -> Iterator[Any]:
    """Replace a model or batch on the meta device by fake CPU tensors; leave others unchanged.

    Yields the batch.
    """
    leaves = (x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor))
    if not any(t.device.type == "meta" for t in (*model.parameters(), *leaves)):
        yield batch
        return
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    twin = _torch.tree_map(
        lambda leaf: fake_like(leaf, mode) if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    with with_fake_tensors(model, mode), mode:
        yield twin


def filled(batch: Any) -> Any:
    """Replace meta tensors in a batch by zeros on the CPU, so that it can be traced and run."""

    def zeros_like(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "meta":
            return leaf
        if leaf.is_contiguous():
            # Zeros take no memory until they are written.
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
        size, stride = leaf.size(), leaf.stride()
        return torch.empty_strided(size, stride, dtype=leaf.dtype, device="cpu").zero_()

    return _torch.tree_map(zeros_like, batch)


def fake_like(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return a fake copy of a tensor; on the CPU for a meta tensor, as some gradients fail on
    meta.
    """
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        twin = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin


def call_on_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator on fake tensors.

    Torch 2.13 has a fake kernel for grouped matmuls in bfloat16 only, although the real kernels
    accept other dtypes.
    """
    dtype = args[0].dtype if func is torch.ops.aten._grouped_mm.default else torch.bfloat16
    if dtype == torch.bfloat16:
        return func(*args, **kwargs)
    halves = _torch.tree_map(
        lambda x: x.to(torch.bfloat16) if getattr(x, "dtype", None) == dtype else x, (args, kwargs)
    )
    return func(*halves[0], **{**halves[1], "out_dtype": None}).to(dtype)


class StorageWatch(_torch.TorchDispatchMode):
    """Tracks the bytes of live storages that operators create, beyond ``resident`` ones.

    Calls ``on_call(operator, args, kwargs, result)`` after each operator, and ``on_death(storage
    key)`` when a storage is freed.
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
        result = call_on_fakes(func, args, kwargs or {})
        for leaf in _torch.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._on_new(leaf)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        if self._on_call is not None:
            self._on_call(func, args, kwargs or {}, result)
        return result

    def _on_new(self, tensor: torch.Tensor) -> None:
        key = _torch.storage_key(tensor)
        if key in self._known:
            return
        self._known.add(key)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        self.alive_bytes += nbytes
        weakref.finalize(storage, self._on_freed, key, nbytes)

    def _on_freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.alive_bytes -= nbytes
        if self._on_death is not None:
            self._on_death(key)
