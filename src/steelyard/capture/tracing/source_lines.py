"""The module path and the user's source line of each traced operator.

Not for shapes and bytes: see to_ir.py.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from steelyard.ir.graph import Node, Phase

# The folders of torch and of Steelyard, as tracebacks name them.
_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^L\['\w+'\]\.?")
_GLOBAL = re.compile(r"\bG\['(?!__import_)(\w+)'\]")
_PYTHON_PARTS = ("_modules", "__dict__", "__self__", "__func__")
_INDEXED = re.compile(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]")


def path_of(node: Any) -> str:
    """Return the path of the node's module in the user's model; empty for the loss itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = clean_path(str(list(stack.values())[-1][0]))
    return path.removeprefix("model.") if path != "model" else ""


def clean_path(path: str) -> str:
    """Convert Dynamo's name of a module to a module path, without Python tables, closures, globals.

    Dynamo reads a model that defines ``__getattr__``, such as PEFT's, through ``__dict__``.
    """
    path = re.sub(r"@\d+", "", _ROOT.sub("", path))
    path = re.sub(r"\bG\['(?:__import_\w+)?'\]\.?", "", _GLOBAL.sub(r"\1", path))
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)
    path = _INDEXED.sub(r".\1", path)
    return ".".join(part for part in path.split(".") if part and part not in _PYTHON_PARTS)


def line_of(node: Any) -> str:
    """Return the innermost line of user code, such as ``train.py:31``."""
    return line_in_trace(node.meta.get("stack_trace") or "")


def line_in_trace(trace: str) -> str:
    frames = _FRAME.findall(trace)
    for filename, line in reversed(frames):
        if is_user_file(filename):
            return f"{short_file(filename)}:{line}"
    return ""


def is_user_file(filename: str) -> bool:
    """Return True for code outside torch and Steelyard, whatever the folders are called."""
    return not filename.startswith(_PACKAGES)


def short_file(filename: str) -> str:
    """Return the file relative to the working directory, or its last two parts if it is outside."""
    relative = os.path.relpath(filename)
    if not relative.startswith("..") and "site-packages" not in relative:
        return relative
    return "/".join(filename.rsplit("/", 2)[-2:])


# The operators through which autograd propagates a gradient past an in-place overwrite.
_OVERWRITING = ("aten.new_empty_strided.", "aten.copy.")


def with_paths(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Assign each sum of gradients that has no path to the module of its last computed term.

    At a residual connection, that is the block whose input gradient is summed. The same is done for
    operators that autograd adds for the gradient of an overwritten view.
    """
    index_of: dict[str, int] = {}
    assigned: list[Node] = []
    copied: set[str] = set()
    for index, node in enumerate(nodes):
        if node.phase is Phase.BACKWARD and not node.path:
            is_copy = node.op.startswith(_OVERWRITING) or not copied.isdisjoint(node.inputs)
            terms = [
                index_of[i] for i in node.inputs if i in index_of and assigned[index_of[i]].path
            ]
            if terms and (is_copy or node.op.startswith("aten.add")):
                node = replace(node, path=assigned[max(terms)].path)
            if is_copy:
                copied.add(node.name)
        if node.phase is Phase.BACKWARD:
            index_of[node.name] = index
        assigned.append(node)
    return tuple(assigned)
