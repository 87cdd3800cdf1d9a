"""Captures the stored steps anew: ``python -m tests.unit.graphs.record [NAME ...]``.

The files are those of torch 2.13, as in CI. tests/torch/capture/test_stored_graphs.py captures some
of them again, and fails if capture has changed since.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.published.captured import captured
from benchmarks.published.gpt import Shape
from steelyard.capture.deep.batch_template import TruncatedStep
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.comm.pipeline_schedules import SCHEDULES, order_under
from steelyard.errors import BadInput
from steelyard.ir.parallel_layout import TENSOR
from steelyard.ir.pipeline_schedule import Order, schedule_order
from steelyard.ir.program import Program
from steelyard.ir.sharding_choice import ShardingChoice
from tests import zoo
from tests.unit.graphs.stored import (
    Stored,
    StoredPart,
    StoredShard,
    StoredStep,
    StoredTemplate,
    StoredTemplates,
    StoredUpdate,
    encoded,
    schedule_key,
    write,
    write_orders,
)
from tests.zoo.case import class_loss, images, next_token_loss, tokens
from tests.zoo.own import GPT

# Paths and line numbers, without quotes: those of nodes, and those in reasons.
_LINE = re.compile(r'(?<="line": ")[^"]*| \([\w./]+\.py:\d+\)')
_ADAMW = partial(torch.optim.AdamW, lr=1e-3)
_PUBLISHED = Shape(hidden=256, heads=8, layers=3, sequence=128, vocabulary=512)
_ZOO = (
    "mlp", "gpt", "moe", "lstm", "resnet_bn", "hf_llama", "hf_bert", "hf_t5", "hf_vit", "hf_mamba",
)  # fmt: skip


def _step(
    make: Callable[[], zoo.Sample],
    *counts: int,
    shares: tuple[tuple[int, int], ...] = (),
    shards: int = 0,
    optimizer: OptimizerFactory | None = None,
) -> StoredStep:
    """Capture the whole batch, one of each of ``counts`` equal parts, and ``shares``: several of
    a number of equal parts. With ``shards``, also capture each rank's graph with all regions
    sharded over this number."""
    model, loss, batch = make()
    source = CapturedStep(model=model, loss=loss, batch=batch, optimizer=optimizer)
    parts = [
        StoredPart(
            micro_batches=count,
            share=share,
            graph=source.graph(micro_batches=count, share=share),
        )
        for count, share in (*((count, 1) for count in (1, *counts)), *shares)
    ]
    return StoredStep(
        parts=tuple(parts),
        update=_update(source.update()),
        counts=source.divisors(),
        equal_counts=source.sharers(),
        reason_not_split=source.why_not_split() or "",
        reason_not_shared=source.why_not_shared() or "",
        settings=source.leaner_settings(),
        shards=tuple(_shard(source, rank, shards) for rank in range(shards)),
    )


def _update(update: Program | None) -> StoredUpdate | None:
    if update is None:
        return None
    return StoredUpdate(
        graph=update.graph,
        instructions=update.instructions,
        undivided=update.undivided,
        unshardable=update.unshardable,
        unsliceable=tuple(sorted(update.unsliceable.items())),
    )


def _shard(source: CapturedStep, rank: int, num_ranks: int) -> StoredShard:
    graph = source.graph(micro_batches=1)
    regions = source.regions(graph, num_ranks=num_ranks)
    inputs = {name: placement for region in regions for name, placement in region.inputs}
    choice = ShardingChoice(axis=TENSOR, num_ranks=num_ranks, inputs=tuple(inputs.items()))
    graph = source.in_parts(graph, choice, rank=rank)
    return StoredShard(num_ranks=num_ranks, rank=rank, regions=regions, graph=graph)


def _templates(width: int, heads: int, length: int, samples: int) -> StoredTemplates:
    """Capture three of six blocks, for up to four tensor-parallel ranks."""
    model = GPT(layers=6, width=width, heads=heads, vocabulary=64, length=length)
    batch = tokens(samples, length, 64)
    step = TruncatedStep(model=model, loss=next_token_loss, batch=batch, optimizer=_ADAMW)
    templates = (
        StoredTemplate(
            tensor=tensor,
            template=step.in_parts(tensor),
            regions=step.regions(tensor) if tensor > 1 else (),
            is_sequence_parallel=step.is_sequence_parallel(tensor),
        )
        for tensor in (1, 2, 3, 4)
    )
    return StoredTemplates(
        num_samples=step.num_samples,
        why_indivisible=step.why_indivisible,
        blocks=step.blocks,
        formats=step.formats,
        templates=tuple(templates),
    )


def _gpt(samples: int, length: int, vocabulary: int = 64, **sizes: Any) -> zoo.Sample:
    model = GPT(vocabulary=vocabulary, length=length, **sizes)
    return model, next_token_loss, tokens(samples, length, vocabulary)


def _norms() -> zoo.Sample:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.Flatten(),
        nn.Linear(4 * 36, 10),
    )
    return model, class_loss, images(4, 8, 10)


def _published(tensor: int, *, along: bool = False) -> Stored:
    return captured(_PUBLISHED, micro_batch=2, tensor=tensor, sequence_parallel=along)


def _flash(length: int) -> Stored:
    shape = replace(_PUBLISHED, flash=True, sequence=length)
    return captured(shape, micro_batch=1, tensor=1)


RECORDED: Mapping[str, Callable[[], Stored]] = {
    **{f"zoo-{name}": partial(_step, zoo.case(name).make, optimizer=_ADAMW) for name in _ZOO},
    "gpt-2-blocks": partial(
        _step, partial(_gpt, 8, 16, layers=2, width=32, heads=2), 2, 4, 8, shards=2
    ),
    "gpt-4-blocks": partial(
        _step,
        partial(_gpt, 8, 16, layers=4, width=32, heads=2, dropout=0.1),
        2,
        4,
        8,
        optimizer=_ADAMW,
    ),
    "gpt-6-blocks": partial(_step, partial(_gpt, 4, 64, layers=6, width=32, heads=4)),
    "gpt-fused": partial(
        _step, partial(_gpt, 8, 32, 256, layers=3, width=64, heads=2, fused=True), 2, 4
    ),
    "norms": partial(_step, _norms, 2, shares=((4, 3), (4, 1))),
    "deep-gpt": partial(_templates, 32, 2, 16, 8),
    "deep-gpt-wide": partial(_templates, 64, 4, 8, 4),
    "deep-gpt-long": partial(_templates, 32, 4, 64, 4),
    "published-gpt": partial(_published, 1),
    **{f"published-gpt-on-{n}": partial(_published, n) for n in (2, 4)},
    **{f"published-gpt-on-{n}-along": partial(_published, n, along=True) for n in (2, 4)},
    **{f"published-gpt-flash-{length}": partial(_flash, length) for length in (64, 1024)},
}


def orders() -> dict[str, Order]:
    """Torch's tables for up to four ranks and sixteen micro-batches, where it has one."""
    found = {}
    for ranks in range(1, 5):
        for count in range(1, 17):
            key = partial(schedule_key, num_ranks=ranks, micro_batches=count)
            order = schedule_order(num_ranks=ranks, micro_batches=count)
            found[key("1F1B", num_stages=ranks)] = order
            for schedule in SCHEDULES.keys() - {"1F1B"}:
                for stages in {ranks if schedule == "GPipe" else 2 * ranks, 3 * ranks}:
                    try:
                        order = order_under(
                            schedule, num_ranks=ranks, num_stages=stages, micro_batches=count
                        )
                    except BadInput:
                        continue
                    found[key(schedule, num_stages=stages)] = order
    return dict(sorted(found.items()))


def record(name: str) -> str:
    """Return the stored text of a step captured now, without source lines, which any edit moves."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return _LINE.sub("", encoded(RECORDED[name]()))


def main(names: list[str]) -> None:
    for name in names or RECORDED:
        write(name, record(name))
        print(name)
    if not names:
        write_orders(orders())


if __name__ == "__main__":
    main(sys.argv[1:])
