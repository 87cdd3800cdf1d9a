"""What the captured code read of Python's state, and whether that still is as it was read.

A number that the loss or the model takes from a global, a closure, a dict or an object is part of
the graph for good: changed later, it would be ignored. Dynamo knows of each, since torch.compile
would compile anew. Not for what a step may not change whether it was read or not (modes, hooks,
parameters): see run/model_guards.py.
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

_AGAIN = "plan again after changing it, or give it as a tensor in the batch"


class StateGuards:
    """``check`` refuses a step of which something that was read has changed since.

    ``unread`` are the keys of the batch, where it is a dict, that the code never looked at.
    """

    def __init__(self, found: _torch.Guarded, *, model: nn.Module, batch: Any) -> None:
        self._broken = found.broken
        # Tensors that the code makes of numbers take it.
        self._default_dtype = torch.get_default_dtype()
        # run/model_guards.py sees to these.
        of_model = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._tensors = [
            _Tensor.at(name, found.find(name))
            for name, tensor in found.tensors.items()
            if id(tensor) not in of_model
        ]
        self.unread = _unread(batch, found.of_batch)

    def check(self) -> None:
        if torch.get_default_dtype() != self._default_dtype:
            raise Mismatch(
                f"torch's default dtype is {torch.get_default_dtype()}",
                expected=f"{self._default_dtype}, as the step was captured",
                remedy="set it back for the step (torch.set_default_dtype), or plan again",
            )
        broken = self._broken()
        if broken:
            raise _changed(broken)
        for read in self._tensors:
            read.check()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor was found. Its values may change; another object would not be seen.

    Numbers of numpy are read like tensors, and have no values that could change in place.
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
                f"the tensor {_readable(self.name)}, which the step reads, is another object",
                expected="the tensor that the step was captured with",
                remedy="write into it in place (copy_), or plan again",
            )
        if type(now) is not type(self.value) or now.tobytes() != self.value.tobytes():
            raise Mismatch(
                f"{_readable(self.name)}, which the step reads, is no longer {self.value}",
                expected="what the step was captured with, which it would go on using",
                remedy=_AGAIN,
            )


def _unread(batch: Any, of_batch: Collection[str]) -> frozenset[str]:
    """Without guards of Dynamo's on a value or on anything in it, nothing looked at it."""
    if type(batch) is not dict:
        return frozenset()
    plain = {
        key
        for key, value in batch.items()
        if isinstance(key, str)
        and not any(isinstance(x, torch.Tensor) for x in _torch.tree_leaves(value))
    }
    return frozenset(k for k in plain if not any(n.startswith(f"batch[{k!r}]") for n in of_batch))


def _changed(guard: str) -> Mismatch:
    """In the user's words: ``G['__import_train'].RATE == 1.0  # x * RATE  # train.py:7 in loss``"""
    said, _, where = guard.partition("  # ")
    line = re.search(r"([^/\s]+:\d+) in \w+$", where.strip())
    which = f"which the step reads{f' ({line[1]})' if line else ''}"
    said = _readable(said.strip())
    if equal := re.fullmatch(r"(.+?) == (.+)", said):
        text = f"{equal[1]}, {which}, is no longer {equal[2]}"
    elif same := re.match(r"___check_\w+_id\((.+?), \d+\)", said):
        text = f"{same[1]}, {which}, was replaced"
    else:
        text = f"something {which}, has changed: it was planned with {said}"
    return Mismatch(
        text[:240],
        expected="what the step was captured with, which it would go on using",
        remedy=_AGAIN,
    )


def _readable(name: str) -> str:
    name = re.sub(r"\bG\['__import_(\w+)'\]\.?", _module, name)
    name = re.sub(r"\bG\['(\w+)'\]", r"\1", name)
    name = re.sub(r"(?:L\['self'\]|\bself)(?=\.)", "self", name)
    name = re.sub(r"___from_numpy\((.*)\)$", r"\1", name)
    name = re.sub(r"dict\(type\((.+?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2", name)
    name = re.sub(r"self\.[\w.]*(?:\[[^\]]*\][\w.]*)*", lambda m: _of_step(m[0]), name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(.+?)'\]", r".\1", name)


def _module(found: re.Match[str]) -> str:
    name = found[1].replace("_dot_", ".")
    return "" if name == "__main__" else f"{name}."


def _of_step(name: str) -> str:
    """``self`` is the step: its model and its loss are the user's."""
    modules = re.match(r"self((?:\._modules\['[^']*'\])*)", name)
    assert modules is not None
    path = clean_path(modules[1])
    rest = name[modules.end() :].lstrip(".") if not path else name[modules.end() :]
    return f"{path}{rest}".replace(".__self__", "")


__all__ = ["StateGuards"]
