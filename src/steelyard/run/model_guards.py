"""Checks before every step, in microseconds, that the model is still the one that was captured.

The checks cover what the graph has fixed: the set of tensors, train or eval mode, module hooks, the
code of the classes. Values of tensors may change freely. Not for other state that the code read
(attributes, globals): see capture/checks/python_state_guards.py. Not for the batch: see binding.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from steelyard import _torch
from steelyard.errors import Mismatch

_REGISTERS = {
    "_parameters": "parameter",
    "_buffers": "buffer",
    "_modules": "module",
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_PLAN_AGAIN = "plan again after changing the model"
# Constructors compute nothing in a step; torch.compile wraps both of those that nn.Module has.
_CONSTRUCTORS = frozenset({"__init__", "__setstate__"})
# The attribute that module.compile() sets; the module then runs the same step, compiled.
_COMPILED = "_compiled_call_impl"


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot of objects. Their ids are compared; the references keep these ids from being
    reused."""

    objects: list[Any]
    ids: list[int]

    @classmethod
    def of(cls, objects: Iterable[Any]) -> "_Snapshot":
        listed = list(objects)
        return cls(listed, list(map(id, listed)))


class ModelWatch:
    """Records the model as it is now; ``check`` raises if it has changed.

    Each check is one pass over ids in C, which takes about a tenth of a millisecond for a hundred
    modules. Python code looks for the reason only if there is a difference.
    """

    def __init__(self, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        modules = dict(model.named_modules())
        registers = [
            (path, kind, getattr(module, register))
            for path, module in modules.items()
            for register, kind in _REGISTERS.items()
        ]
        registers += [("every module", k, d) for k, d in _torch.hooks_of_all_modules().items()]
        self._filled = [r for r in registers if r[2]]
        self._filled_dicts = [d for _, _, d in self._filled]
        self._empty = [r for r in registers if not r[2]]
        self._empty_dicts = [d for _, _, d in self._empty]
        self._registered_dicts = [dict(d) for d in self._filled_dicts]
        self._registered = _Snapshot.of(chain.from_iterable(map(dict.values, self._filled_dicts)))

        self._modules = modules
        self._vars = [vars(module) for module in modules.values()]
        self._num_vars = list(map(len, self._vars))
        self._attributes = [set(found) for found in self._vars]
        self._training = list(map(_TRAINING, self._vars))
        kinds = dict.fromkeys(type(module) for module in modules.values())
        self._classes = list(dict.fromkeys(chain.from_iterable(k.__mro__ for k in kinds)))
        self._members = [dict(vars(c)) for c in self._classes]
        self._code = _Snapshot.of(chain.from_iterable(map(dict.values, self._members)))

        self._parameters = dict(model.named_parameters())
        self._parameter_list = list(self._parameters.values())
        self._trains = [p.requires_grad for p in self._parameter_list]
        self._tensors = _tensors(model, constants)
        self._tensor_list = list(self._tensors.values())
        self._forms = [_form(t) for t in self._tensor_list]
        self._addresses = [t.data_ptr() for t in self._tensor_list]

    def check(self) -> None:
        registered = list(map(id, chain.from_iterable(map(dict.values, self._filled_dicts))))
        if any(self._empty_dicts) or registered != self._registered.ids:
            self._check_registered()
        self._check_attributes()
        if list(map(_REQUIRES_GRAD, self._parameter_list)) != self._trains:
            self._refuse_requires_grad()
        if list(map(torch.Tensor.data_ptr, self._tensor_list)) != self._addresses:
            self._check_forms()

    def _check_attributes(self) -> None:
        if list(map(len, self._vars)) != self._num_vars:
            self._check_new_attributes()
        if list(map(_TRAINING, self._vars)) != self._training:
            self._refuse_mode()
        members = map(_VALUES, map(vars, self._classes))
        if list(map(id, chain.from_iterable(members))) != self._code.ids:
            self._check_members()

    def _refuse_mode(self) -> None:
        for (path, module), before in zip(self._modules.items(), self._training, strict=True):
            if module.training is not before:
                raise _changed_mode(path, before)

    def _check_registered(self) -> None:
        for path, kind, now in self._empty:
            for key, found in now.items():
                if not _is_inert(found):
                    raise _changed(kind, _joined(path, str(key)), "appeared after planning", path)
        for (path, kind, now), before in zip(self._filled, self._registered_dicts, strict=True):
            for key in before.keys() | now.keys():
                if now.get(key) is before.get(key) and (key in now) == (key in before):
                    continue
                if key not in before and _is_inert(now[key]):
                    continue
                change = _change(key in before, key in now, is_none=now.get(key) is None)
                raise _changed(kind, _joined(path, str(key)), f"{change} after planning", path)
        found = chain.from_iterable(map(dict.values, self._filled_dicts))
        known = set(self._registered.ids)
        if [id(x) for x in found if id(x) in known] == self._registered.ids:
            return
        raise Mismatch(
            "parameters or modules were registered in another order after planning",
            expected="the model as it was captured",
            remedy=_PLAN_AGAIN,
        )

    def _check_new_attributes(self) -> None:
        """Refuse a new attribute only if it hides an attribute of the class; others do not affect
        the graph.
        """
        for (path, module), known in zip(self._modules.items(), self._attributes, strict=True):
            for key in vars(module).keys() - known:
                if key != _COMPILED and hasattr(type(module), key):
                    raise Mismatch(
                        f"attribute {_joined(path, key)} was overridden after planning",
                        expected="the model as it was captured",
                        remedy=_PLAN_AGAIN,
                    )
        self._num_vars = list(map(len, self._vars))

    def _check_members(self) -> None:
        """Refuse changed code of a class. Its data may change; Dynamo's guards check the data that
        the step has read.
        """
        known = {key for members in self._members for key in members}
        for kind, before in zip(self._classes, self._members, strict=True):
            now = vars(kind)
            for key in (before.keys() | now.keys()) - _CONSTRUCTORS:
                old, new = before.get(key), now.get(key)
                if new is not old and (_is_code(old) or (_is_code(new) and key in known)):
                    raise Mismatch(
                        f"{key} of class {kind.__name__} was replaced after planning",
                        expected="the code that the step was captured with",
                        remedy=_PLAN_AGAIN,
                    )
        self._members = [dict(vars(c)) for c in self._classes]
        self._code = _Snapshot.of(chain.from_iterable(map(dict.values, self._members)))

    def _refuse_requires_grad(self) -> None:
        for (name, parameter), before in zip(self._parameters.items(), self._trains, strict=True):
            if parameter.requires_grad != before:
                raise Mismatch(
                    f"requires_grad of parameter {name} is now {parameter.requires_grad}",
                    expected=f"{before}, as the step was captured",
                    remedy="freeze or unfreeze first, then plan again",
                )

    def _check_forms(self) -> None:
        """Allow new memory (``.data`` was set, a model was loaded), but no other form of a
        tensor.
        """
        for (name, tensor), form in zip(self._tensors.items(), self._forms, strict=True):
            if _form(tensor) != form:
                raise Mismatch(
                    f"{name} is now {_form_text(_form(tensor))}",
                    expected=f"{_form_text(form)}, as the step was captured",
                    remedy="move or cast the model first, then plan again",
                )
        self._addresses = [t.data_ptr() for t in self._tensor_list]


class OptimizerWatch:
    """Records the parameters that an optimizer updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._ids: list[int] = []
        self.check()

    def check(self) -> None:
        ids = list(map(id, chain.from_iterable(map(_PARAMS, self._optimizer.param_groups))))
        if ids == self._ids:
            return
        foreign = sum(i not in self._names for i in ids)
        missing = sorted(self._trained - {self._names[i] for i in ids if i in self._names})
        if foreign or missing:
            raise _other_optimizer(foreign, missing)
        self._ids = ids


_REQUIRES_GRAD = attrgetter("requires_grad")
_TRAINING = itemgetter("training")
_VALUES = methodcaller("values")
_PARAMS = itemgetter("params")
_Form = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]


def _is_inert(hook: Any) -> bool:
    """True for hooks that may be added or removed because they do not change a step.

    A module tracker, as in FlopCounterMode, only adds labels. The hooks that transformers leaves on
    the model after ``output_hidden_states=True`` do nothing until that is requested again.
    """
    is_tracker = isinstance(getattr(hook, "__self__", None), ModuleTracker)
    return is_tracker or getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _is_code(member: Any) -> bool:
    return callable(member) or isinstance(member, (property, classmethod, staticmethod))


def _tensors(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {
        **{f"parameter {name}": p for name, p in model.named_parameters()},
        **{f"buffer {name}": b for name, b in model.named_buffers()},
        **{name.replace(":", " ", 1): t for name, t in constants.items()},
    }
    return {name: t for name, t in named.items() if t.layout is torch.strided}


def _form(tensor: torch.Tensor) -> _Form:
    # Strides are included, because kernels, and so the bits, may depend on them. A dimension of
    # size one has no meaningful stride.
    stride = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return tensor.shape, tensor.dtype, tensor.device, stride


def _form_text(form: _Form) -> str:
    shape, dtype, device, stride = form
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}, strides {list(stride)}"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _other_optimizer(foreign: int, missing: list[str]) -> Mismatch:
    problems = [f"steps {foreign} parameters that the model does not have"] if foreign else []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problems.append(f"does not update {missing[0]}{more}")
    return Mismatch(
        f"the optimizer {' and '.join(problems)}",
        expected="all trainable parameters of the model, and no others",
        remedy="create the optimizer from model.parameters() after the last change of the model",
    )


def _change(was: bool, is_now: bool, *, is_none: bool) -> str:
    if not is_now:
        return "was removed"
    if not was:
        return "appeared"
    return "was set to None" if is_none else "was replaced"


def _changed(kind: str, name: str, change: str, path: str) -> Mismatch:
    if "hook" in kind:
        return Mismatch(
            f"a {kind} of {path or 'the model'} {change}, but would never run",
            expected="the hooks that the step was captured with",
            remedy="register it before planning; hooks of parameters may be added and removed",
        )
    if change.startswith("was replaced") and kind in ("parameter", "buffer"):
        return Mismatch(
            f"{kind} {name} {change}, as load_state_dict(assign=True) does, for example",
            expected="the tensor that the step was captured with; its values may change",
            remedy="call load_state_dict without assign=True, or copy_ values in; or plan again",
        )
    return Mismatch(
        f"{kind} {name} {change}",
        expected="the same object that the step was captured with",
        remedy="restore it, or plan again with the present model",
    )


def _changed_mode(path: str, before: bool) -> Mismatch:
    was, now = ("train", "eval") if before else ("eval", "train")
    return Mismatch(
        f"{path or 'the model'} is in {now}() mode",
        expected=f"{was}() mode, as the step was captured",
        remedy=f"call {was}() on it before the step, or plan again",
    )
