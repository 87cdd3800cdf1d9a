"""The workload of a training script, and how it is loaded from the script.

Not for planning it: see planning.py.
"""

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.errors import BadInput
from steelyard.safe_text import printable


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with its loss, batches and optimizer.

    ``loss(model, batch)`` returns a scalar; ``optimizer`` makes an optimizer from parameters.
    ``batches`` is an iterable of global batches, or a function that returns one. Without an
    optimizer only gradients are computed.
    """

    model: nn.Module
    loss: Loss
    batches: Iterable[Any] | Callable[[], Iterator[Any]]
    optimizer: OptimizerFactory | None = None
    metric: Callable[[nn.Module], float] | None = None

    def first_batch(self) -> Any:
        batches = self.batches() if callable(self.batches) else self.batches
        if not isinstance(batches, Iterable):
            raise BadInput(
                f"Workload.batches is {printable(repr(batches)[:60])}",
                expected="an iterable of batches, or a function that returns one",
                remedy="return the data loader, or a function that makes it",
            )
        if isinstance(batches, torch.Tensor):
            raise BadInput(
                f"Workload.batches is one tensor of shape {list(batches.shape)}",
                expected="an iterable of batches: the rows of a tensor would be one batch each",
                remedy="write [batch] for one batch, or batches.split(32) for several",
            )
        for batch in batches:
            return batch
        raise BadInput(
            "the workload has no batch",
            expected="at least one batch in Workload.batches",
            remedy="return the data loader, or a function that makes it",
        )


def load_workload(script: str) -> Workload:
    """Return the workload of ``train.py``, or of ``train.py:name`` if the script has several."""
    path, _, name = script.partition(":")
    function = name or "workload"
    with _argv_of(path):
        module = _imported(Path(path))
        make = getattr(module, function, None)
        if not callable(make):
            raise _no_function(path, function, module)
        _refuse_arguments(make, path, function)
        workload = make()
    if not isinstance(workload, Workload):
        raise BadInput(
            f"{function}() in {printable(path)} returned a {type(workload).__name__}",
            expected="a steelyard.Workload(model, loss, batches, optimizer)",
            remedy="return sy.Workload(...) from it",
        )
    return workload


@contextlib.contextmanager
def _argv_of(script: str) -> Iterator[None]:
    """Hide Steelyard's command-line arguments from the script, which may parse ``sys.argv``."""
    before = sys.argv
    sys.argv = [script]
    try:
        yield
    finally:
        sys.argv = before


def _no_function(path: str, function: str, module: Any) -> BadInput:
    others = sorted(
        key
        for key, value in vars(module).items()
        if callable(value)
        and not inspect.isclass(value)
        and getattr(value, "__module__", "") == module.__name__
        and not key.startswith("_")
        and _takes_no_arguments(value)
    )
    return BadInput(
        f"{printable(path)} has no function {printable(function)}()",
        expected="a function workload() that returns a steelyard.Workload",
        remedy=f"write it, or name one of its functions as {printable(path)}:name "
        f"({', '.join(others)})"
        if others
        else "write it",
    )


def _refuse_arguments(make: Callable[..., Any], path: str, function: str) -> None:
    if not _takes_no_arguments(make):
        raise BadInput(
            f"{printable(function)}{inspect.signature(make)} in {printable(path)} needs arguments",
            expected="a function without required arguments: it is called as workload()",
            remedy="give each argument a default",
        )


def _takes_no_arguments(make: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some callables that are not written in Python
        return True
    try:
        signature.bind()
    except TypeError:
        return False
    return True


def _imported(path: Path) -> Any:
    if not path.is_file():
        raise BadInput(
            f"the file {printable(str(path))} does not exist",
            expected="a Python script with a function workload()",
            remedy="check the name; if a script has several workloads, name one as train.py:name",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The script may import files of its folder, and data loader workers may look the module up by
    # name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
