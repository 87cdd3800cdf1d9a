"""What a training script hands over, and how it is found in the script.

Not for planning it.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from steelyard.capture.optimizer import OptimizerFactory
from steelyard.capture.trace import Loss
from steelyard.core.errors import BadInput
from steelyard.core.printable import printable


@dataclass(frozen=True, slots=True)
class Workload:
    """``loss(model, batch)`` returns a scalar; ``optimizer`` makes an optimizer from parameters.

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
        for batch in batches:
            return batch
        raise BadInput(
            "the workload has no batch",
            expected="at least one batch in Workload.batches",
            remedy="return the data loader, or a function that makes it",
        )


def load_workload(script: str) -> Workload:
    """The workload of ``train.py``, or of ``train.py:name`` where it has several."""
    path, _, name = script.partition(":")
    module = _imported(Path(path))
    found = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }
    wanted = name or "workload"
    if wanted not in found:
        others = ", ".join(sorted(k for k in found if not k.startswith("_"))) or "none"
        raise BadInput(
            f"{printable(path)} has no function {printable(wanted)}()",
            expected="a function workload() that returns a steelyard.Workload",
            remedy=f"write it, or name one of its functions as {printable(path)}:name ({others})",
        )
    workload = found[wanted]()
    if not isinstance(workload, Workload):
        raise BadInput(
            f"{wanted}() in {printable(path)} returned a {type(workload).__name__}",
            expected="a steelyard.Workload(model, loss, batches, optimizer)",
            remedy="return sy.Workload(...) from it",
        )
    return workload


def _imported(path: Path) -> Any:
    if not path.is_file():
        raise BadInput(
            f"there is no file {printable(str(path))}",
            expected="a Python script with a function workload()",
            remedy="check the name; of several workloads name one as train.py:name",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The script may import its neighbours and pickle-free data loaders may look it up by name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
