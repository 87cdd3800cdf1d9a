"""Makes a live step from a model, as the api would, but with the plain program.

Not a test: what the tests of this folder share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steelyard import _torch
from steelyard.capture.tracing.decompositions import table
from steelyard.capture.tracing.joint_graph import trace
from steelyard.capture.tracing.to_ir import to_graph
from steelyard.ir.program import Program
from steelyard.run.step import CodeReads, LiveStep
from tests.zoo import Sample, case

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def captured(
    model: nn.Module, loss: Any, batch: Any, *, micro_batches: int = 1
) -> tuple[Program, Mapping[str, Tensor], CodeReads]:
    """Return the plain program for ``batch`` in equal parts, its constants, and the state it
    reads."""
    traced = trace(model, loss, part(batch, 0, micro_batches), decompositions=table("python-2"))
    graph = to_graph(traced, decomposition="python-2")
    program = Program.plain(graph).repeated(micro_batches)
    assert program.problems() == []
    return program, traced.constants, traced.reads


def live(
    model: nn.Module,
    loss: Any,
    batch: Any,
    *,
    optimizer: MakeOptimizer | None = None,
    micro_batches: int = 1,
    **settings: Any,
) -> LiveStep:
    program, constants, reads = captured(model, loss, batch, micro_batches=micro_batches)
    trained = [p for p in model.parameters() if p.requires_grad]
    return LiveStep(
        model,
        program,
        constants=constants,
        batch=batch,
        optimizer=optimizer(trained) if optimizer else None,
        reads=reads,
        **settings,
    )


def part(batch: Any, index: int, parts: int) -> Any:
    """Return micro-batch ``index`` of ``parts``, cut along the first dimension."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or parts == 1:
            return leaf
        rows = leaf.shape[0] // parts
        return leaf[index * rows : (index + 1) * rows]

    return _torch.tree_map(cut, batch)


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the model and a copy of it, which plain PyTorch trains."""
    return model, copy.deepcopy(model)


def both(name: str, batches: int = 3) -> tuple[Sample, nn.Module, tuple[Any, ...]]:
    """Return a case of the zoo, its twin for plain PyTorch, and batches for both."""
    made = case(name)
    sample = made.make(0)
    return sample, twins(sample[0])[1], made.batches(batches)
