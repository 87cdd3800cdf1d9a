"""Reuse of a captured and priced step by later calls of ``plan`` in the same process.

Only weak references are kept, so that a model is freed as before: a step is reused as long as one
of its plans is alive. Everything that a capture or a measurement depends on must be the same: the
model and what its code read, the loss, the shapes, the optimizer, the cluster, the number of
threads. Not for the reuse of measurements between processes: see measure/cache.py.
"""

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Cluster
from steelyard.planner.cost_provider import Progress
from steelyard.planner.planner import Planner
from steelyard.planner.session import PlanRequest

_MOST_RECENT = 8


class ProgressRelay:
    """A progress callback that the next call of ``plan`` can replace."""

    def __init__(self, target: Progress) -> None:
        self.target = target

    def __call__(self, message: str) -> None:
        self.target(message)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Recent:
    """A planner, with what its request and the process were when it was made."""

    planner: weakref.ref[Planner]
    relay: ProgressRelay
    cluster: Cluster
    conditions: tuple[object, ...]


_recent: list[_Recent] = []


def planner_for(request: PlanRequest) -> Planner:
    """Return the planner of an equal request of which a plan is still alive, or a new one.

    Plans on several hosts are made by all of them together, and plans that lose accuracy depend on
    the values of the weights: their planners are always new.
    """
    is_reusable = request.cluster.hosts == 1 and not request.budget.accuracy_loss
    if not is_reusable:
        return Planner(request.capture_and_price(within=request.budget))
    _recent[:] = [each for each in _recent if each.planner() is not None][-_MOST_RECENT:]
    for each in _recent:
        planner = each.planner()
        if planner is not None and _answers(each, planner, request):
            each.relay.target = request.on_progress
            return planner
    relay = ProgressRelay(request.on_progress)
    conditions = _conditions(request.batch)
    session = replace(request, on_progress=relay).capture_and_price(within=request.budget)
    planner = Planner(session)
    _recent.append(
        _Recent(
            planner=weakref.ref(planner),
            relay=relay,
            cluster=request.cluster,
            conditions=conditions,
        )
    )
    return planner


def _answers(recent: _Recent, planner: Planner, request: PlanRequest) -> bool:
    """True if this planner would be made again for the request, from the same model."""
    known = planner.session.request
    is_same_request = (
        known.model is request.model
        and known.loss is request.loss
        and _is_same_optimizer(known.optimizer, request.optimizer)
        and (known.runner, known.title, known.trades, known.decomposition, known.effort)
        == (request.runner, request.title, request.trades, request.decomposition, request.effort)
        and recent.cluster == request.cluster
    )
    return (
        is_same_request
        and recent.conditions == _conditions(request.batch)
        and _is_unchanged(planner)
    )


def _is_same_optimizer(one: OptimizerFactory | None, other: OptimizerFactory | None) -> bool:
    """True for the same object, and for two partials of one class with equal plain settings."""
    if one is other:
        return True
    if not (isinstance(one, partial) and isinstance(other, partial)):
        return False
    values = (*one.args, *other.args, *one.keywords.values(), *other.keywords.values())
    return (
        all(map(_is_plain, values))
        and (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    )  # fmt: skip


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, type(None)))


def _conditions(batch: Any) -> tuple[object, ...]:
    """Return the form of the batch, and the settings of the process that measurements depend on."""
    leaves = [
        (_torch.keystr(path), *_form(leaf))
        for path, leaf in _torch.tree_flatten_with_path(batch)[0]
    ]
    return (
        *leaves,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST
        ),
    )


def _form(leaf: Any) -> tuple[object, ...]:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    if leaf.is_nested or leaf.layout != torch.strided:
        return (leaf.layout,)  # has no strides; the capture refuses it
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device


def _is_unchanged(planner: Planner) -> bool:
    """True if the model, and the state that the captured code read, are as they were."""
    session = planner.session
    try:
        if session.watch is not None:
            session.watch.check()
        session.source.captured().reads.check()
    except Mismatch:
        return False
    return True


_AUTOCAST = ("cpu", "cuda")
