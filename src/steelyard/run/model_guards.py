"""Is this still the model that was captured? Asked before every step, in microseconds.

What the graph has fixed for good: which tensors there are, train or eval, hooks of modules, the
code of their classes. Not for values of tensors: those may change freely. Not for what that code
read besides (attributes, globals): see capture/checks/python_state_guards.py. Not for the batch:
see binding.py.
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
_AGAIN = "plan again after changing the model"
# What makes a module computes nothing of a step; torch.compile wraps both of nn.Module's own.
_ONLY_TO_MAKE = frozenset({"__init__", "__setstate__"})
# Where module.compile() leaves the same step, compiled.
_COMPILED = "_compiled_call_impl"


@dataclass(frozen=True, slots=True)
class _Look:
    """What the step was captured with; ids are compared, and the objects kept so that they hold."""

    objects: list[Any]
    ids: list[int]

    @classmethod
    def at(cls, objects: Iterable[Any]) -> "_Look":
        kept = list(objects)
        return cls(kept, list(map(id, kept)))


class ModelWatch:
    """Remembers a model as it is now; ``check`` refuses it once it is another.

    Every check is one pass in C over ids, so that a hundred modules cost about a tenth of a
    millisecond; Python looks for the reason only where something differs.
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
        self._kept = [dict(d) for d in self._filled_dicts]
        self._registered = _Look.at(chain.from_iterable(map(dict.values, self._filled_dicts)))

        self._modules = modules
        self._vars = [vars(module) for module in modules.values()]
        self._num_vars = list(map(len, self._vars))
        self._attributes = [set(found) for found in self._vars]
        self._training = list(map(_TRAINING, self._vars))
        kinds = dict.fromkeys(type(module) for module in modules.values())
        self._classes = list(dict.fromkeys(chain.from_iterable(k.__mro__ for k in kinds)))
        self._members = [dict(vars(c)) for c in self._classes]
        self._code = _Look.at(chain.from_iterable(map(dict.values, self._members)))

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
                if not _only_looks(found):
                    raise _changed(kind, _joined(path, str(key)), "appeared after planning", path)
        for (path, kind, now), before in zip(self._filled, self._kept, strict=True):
            for key in before.keys() | now.keys():
                if now.get(key) is before.get(key) and (key in now) == (key in before):
                    continue
                if key not in before and _only_looks(now[key]):
                    continue
                how = _how(key in before, key in now, is_none=now.get(key) is None)
                raise _changed(kind, _joined(path, str(key)), f"{how} after planning", path)
        found = chain.from_iterable(map(dict.values, self._filled_dicts))
        known = set(self._registered.ids)
        if [id(x) for x in found if id(x) in known] == self._registered.ids:
            return
        raise Mismatch(
            "parameters or modules were registered in another order after planning",
            expected="the model as it was captured",
            remedy=_AGAIN,
        )

    def _check_new_attributes(self) -> None:
        """An attribute that is new is no concern of the graph's, unless it hides something."""
        for (path, module), known in zip(self._modules.items(), self._attributes, strict=True):
            for key in vars(module).keys() - known:
                if key != _COMPILED and hasattr(type(module), key):
                    raise Mismatch(
                        f"attribute {_joined(path, key)} was overridden after planning",
                        expected="the model as it was captured",
                        remedy=_AGAIN,
                    )
        self._num_vars = list(map(len, self._vars))

    def _check_members(self) -> None:
        """Data of a class may change; Dynamo's guards know whether the step has read it."""
        known = {key for members in self._members for key in members}
        for kind, before in zip(self._classes, self._members, strict=True):
            now = vars(kind)
            for key in (before.keys() | now.keys()) - _ONLY_TO_MAKE:
                old, new = before.get(key), now.get(key)
                if new is not old and (_is_code(old) or (_is_code(new) and key in known)):
                    raise Mismatch(
                        f"{key} of class {kind.__name__} was replaced after planning",
                        expected="the code that the step was captured with",
                        remedy=_AGAIN,
                    )
        self._members = [dict(vars(c)) for c in self._classes]
        self._code = _Look.at(chain.from_iterable(map(dict.values, self._members)))

    def _refuse_requires_grad(self) -> None:
        for (name, parameter), before in zip(self._parameters.items(), self._trains, strict=True):
            if parameter.requires_grad != before:
                raise Mismatch(
                    f"requires_grad of parameter {name} is now {parameter.requires_grad}",
                    expected=f"{before}, as the step was captured",
                    remedy="freeze or unfreeze first, then plan again",
                )

    def _check_forms(self) -> None:
        """Other memory is fine (``.data`` was set, a model loaded), another kind of tensor not."""
        for (name, tensor), form in zip(self._tensors.items(), self._forms, strict=True):
            if _form(tensor) != form:
                raise Mismatch(
                    f"{name} is now {_form_text(_form(tensor))}",
                    expected=f"{_form_text(form)}, as the step was captured",
                    remedy="move or cast the model first, then plan again",
                )
        self._addresses = [t.data_ptr() for t in self._tensor_list]


class OptimizerWatch:
    """Remembers which parameters an optimizer steps."""

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


def _only_looks(hook: Any) -> bool:
    """Hooks that come and go and leave a step as it is without them.

    A module tracker, as of a FlopCounterMode, labels; those that transformers leaves behind after
    ``output_hidden_states=True`` do nothing until that is asked for again.
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
    # Strides too: kernels, and so bits, may differ by them. A dimension of one has no real stride.
    stride = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return tensor.shape, tensor.dtype, tensor.device, stride


def _form_text(form: _Form) -> str:
    shape, dtype, device, stride = form
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}, strides {list(stride)}"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _other_optimizer(foreign: int, missing: list[str]) -> Mismatch:
    said = [f"steps {foreign} parameters that the model does not have"] if foreign else []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        said.append(f"lacks {missing[0]}{more}")
    return Mismatch(
        f"the optimizer {' and '.join(said)}",
        expected="every trainable parameter of the model, and none of another",
        remedy="make the optimizer from model.parameters(), after the model is final",
    )


def _how(was: bool, is_now: bool, *, is_none: bool) -> str:
    if not is_now:
        return "is gone"
    if not was:
        return "appeared"
    return "was set to None" if is_none else "was replaced"


def _changed(kind: str, name: str, how: str, path: str) -> Mismatch:
    if "hook" in kind:
        return Mismatch(
            f"a {kind} of {path or 'the model'} {how}, and would never run",
            expected="the hooks that the step was captured with",
            remedy="register it before planning; hooks of parameters may come and go",
        )
    if how.startswith("was replaced") and kind in ("parameter", "buffer"):
        return Mismatch(
            f"{kind} {name} {how}, as load_state_dict(assign=True) does, for example",
            expected="the tensor that the step was captured with; its values may change",
            remedy="call load_state_dict without assign=True, or copy_ values in; or plan again",
        )
    return Mismatch(
        f"{kind} {name} {how}",
        expected="the same object that the step was captured with",
        remedy="put it back, or plan again with the model as it is now",
    )


def _changed_mode(path: str, before: bool) -> Mismatch:
    was, now = ("train", "eval") if before else ("eval", "train")
    return Mismatch(
        f"{path or 'the model'} is in {now}() mode",
        expected=f"{was}() mode, as the step was captured",
        remedy=f"call {was}() on it before the step, or plan again",
    )
