"""Guards on the Python state that the captured code read.

A number that the loss or the model reads from a global, a closure, a dict or an object becomes a
constant of the graph, so a later change would be ignored. Dynamo records a guard for each of them;
torch.compile would recompile if one fails. Not for modes, hooks and parameters, which may not
change even if they were not read: see run/model_guards.py.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.tracing.source_lines import clean_path
from steelyard.errors import Mismatch

_REMEDY = "plan again after changing it, or pass it as a tensor in the batch"


class StateGuards:
    """The guards of one captured step; ``check`` raises Mismatch if something it read has changed.

    ``unread`` are the keys of a dict batch that the code did not read.
    """

    def __init__(self, found: _torch.Guarded, *, model: nn.Module, batch: Any) -> None:
        self._broken = found.broken
        # Tensors that the code creates from numbers have this dtype.
        self._default_dtype = torch.get_default_dtype()
        # run/model_guards.py guards the model's own tensors.
        model_tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._tensors = [
            _Tensor.at(name, found.find(name))
            for name, tensor in found.tensors.items()
            if id(tensor) not in model_tensors
        ]
        self.unread = _unread(batch, found.of_batch)

    def check(self) -> None:
        if torch.get_default_dtype() != self._default_dtype:
            raise Mismatch(
                f"torch's default dtype is {torch.get_default_dtype()}",
                expected=f"{self._default_dtype}, as the step was captured",
                remedy="restore it for the step (torch.set_default_dtype), or plan again",
            )
        broken = self._broken()
        if broken:
            raise _changed(broken)
        for read in self._tensors:
            read.check()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that the step reads: its values may change, but it must remain the same object.

    NumPy scalars are read like tensors, but cannot change in place, so their values are compared.
    """

    name: str
    value: Any
    find: Callable[[], Any]

    @classmethod
    def at(cls, name: str, find: Callable[[], Any]) -> "_Tensor":
        return cls(name, find(), find)

    def check(self) -> None:
        try:
            now = self.find()
        except (LookupError, AttributeError, TypeError):
            now = None
        if now is self.value:
            return
        if not isinstance(self.value, np.generic):
            raise Mismatch(
                f"the tensor {_readable(self.name)}, which the step reads, was replaced by "
                "another object",
                expected="the tensor that the step was captured with",
                remedy="write into it in place (copy_), or plan again",
            )
        if type(now) is not type(self.value) or now.tobytes() != self.value.tobytes():
            raise Mismatch(
                f"{_readable(self.name)}, which the step reads, is no longer {self.value}",
                expected="the value at capture, which the captured step still uses",
                remedy=_REMEDY,
            )


def _unread(batch: Any, of_batch: Collection[str]) -> frozenset[str]:
    """Return the keys of non-tensor entries without a Dynamo guard: the code did not read these."""
    if type(batch) is not dict:
        return frozenset()
    keys = {
        key
        for key, value in batch.items()
        if isinstance(key, str)
        and not any(isinstance(x, torch.Tensor) for x in _torch.tree_leaves(value))
    }
    return frozenset(k for k in keys if not any(n.startswith(f"batch[{k!r}]") for n in of_batch))


def _changed(guard: str) -> Mismatch:
    """Reword a guard: ``G['__import_train'].RATE == 1.0  # x * RATE  # train.py:7 in loss``."""
    condition, _, where = guard.partition("  # ")
    line = re.search(r"([^/\s]+:\d+) in \w+$", where.strip())
    described = f"which the step reads{f' ({line[1]})' if line else ''}"
    condition = _readable(condition.strip())
    if equality := re.fullmatch(r"(.+?) == (.+)", condition):
        text = f"{equality[1]}, {described}, is no longer {equality[2]}"
    elif identity := re.match(r"___check_\w+_id\((.+?), \d+\)", condition):
        text = f"{identity[1]}, {described}, was replaced"
    else:
        text = f"a value, {described}, has changed: it was captured with {condition}"
    return Mismatch(
        text[:240],
        expected="the value at capture, which the captured step still uses",
        remedy=_REMEDY,
    )


def _readable(name: str) -> str:
    name = re.sub(r"\bG\['__import_(\w+)'\]\.?", _module_prefix, name)
    name = re.sub(r"\bG\['(\w+)'\]", r"\1", name)
    name = re.sub(r"(?:L\['self'\]|\bself)(?=\.)", "self", name)
    name = re.sub(r"___from_numpy\((.*)\)$", r"\1", name)
    name = re.sub(r"dict\(type\((.+?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2", name)
    name = re.sub(r"self\.[\w.]*(?:\[[^\]]*\][\w.]*)*", lambda m: _within_step(m[0]), name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(.+?)'\]", r".\1", name)


def _module_prefix(found: re.Match[str]) -> str:
    name = found[1].replace("_dot_", ".")
    return "" if name == "__main__" else f"{name}."


def _within_step(name: str) -> str:
    """Strip ``self``, which is the step module, from the name of something in the user's model or
    loss.
    """
    modules = re.match(r"self((?:\._modules\['[^']*'\])*)", name)
    assert modules is not None
    path = clean_path(modules[1])
    rest = name[modules.end() :].lstrip(".") if not path else name[modules.end() :]
    rest = re.sub(r"^loss_(?:self|function)\b", "loss", rest)  # see joint_graph.py
    return f"{path}{rest}".replace(".__self__", "")


__all__ = ["StateGuards"]
