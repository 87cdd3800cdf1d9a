"""Whose node is this: the module path and the user's source line of each traced operator.

Not for shapes and bytes: see to_ir.py.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from steelyard.ir.graph import Node, Phase

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^L\['\w+'\]\.?")
_GLOBAL = re.compile(r"\bG\['(?!__import_)(\w+)'\]")
_PYTHONS_OWN = ("_modules", "__dict__", "__self__", "__func__")
_INDEXED = re.compile(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]")


def path_of(node: Any) -> str:
    """The module a node belongs to, as the user names it; empty for the loss itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = clean_path(str(list(stack.values())[-1][0]))
    return path.removeprefix("model.") if path != "model" else ""


def clean_path(path: str) -> str:
    """Dynamo's name for a module without Python's own: the keys of tables, closures, globals.

    A model with a ``__getattr__`` of its own, such as PEFT's, is looked into by ``__dict__``.
    """
    path = re.sub(r"@\d+", "", _ROOT.sub("", path))
    path = re.sub(r"\bG\['(?:__import_\w+)?'\]\.?", "", _GLOBAL.sub(r"\1", path))
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)
    path = _INDEXED.sub(r".\1", path)
    return ".".join(part for part in path.split(".") if part and part not in _PYTHONS_OWN)


def line_of(node: Any) -> str:
    """The innermost line that is not torch's own: ``train.py:31``."""
    return line_in(node.meta.get("stack_trace") or "")


def line_in(trace: str) -> str:
    frames = _FRAME.findall(trace)
    for filename, line in reversed(frames):
        if is_users(filename):
            return f"{short_file(filename)}:{line}"
    return ""


def is_users(filename: str) -> bool:
    return "/torch/" not in filename and "/steelyard/" not in filename


def short_file(filename: str) -> str:
    """Relative to where the user works, else the package file it is in; never a machine's path."""
    relative = os.path.relpath(filename)
    if not relative.startswith("..") and "site-packages" not in relative:
        return relative
    return "/".join(filename.rsplit("/", 2)[-2:])


# How autograd begins to hand a gradient on through what was written over in place.
_OVERWRITING = ("aten.new_empty_strided.", "aten.copy.")


def with_paths(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Give each pathless sum of gradients to the module of the term that is computed last.

    Where a residual joins, that is the block whose input's gradient is being summed. So is what
    autograd makes of the gradient of a view that was written over in place.
    """
    places: dict[str, int] = {}
    placed: list[Node] = []
    copied: set[str] = set()
    for index, node in enumerate(nodes):
        if node.phase is Phase.BACKWARD and not node.path:
            is_copy = node.op.startswith(_OVERWRITING) or not copied.isdisjoint(node.inputs)
            terms = [places[i] for i in node.inputs if i in places and placed[places[i]].path]
            if terms and (is_copy or node.op.startswith("aten.add")):
                node = replace(node, path=placed[max(terms)].path)
            if is_copy:
                copied.add(node.name)
        if node.phase is Phase.BACKWARD:
            places[node.name] = index
        placed.append(node)
    return tuple(placed)
