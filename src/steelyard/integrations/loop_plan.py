"""A planned forward and backward pass for a loop that another library runs.

The plan counts the optimizer that the loop already has, and the gradients that the loop keeps while
it accumulates. Not for the library's own options: see the module of that library.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from steelyard.api import Planned, plan
from steelyard.api.receipt import ShownReceipt
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.errors import BadInput, Infeasible
from steelyard.plans.budget import Budget
from steelyard.predict import kept_gradients_bytes
from steelyard.units import format_bytes

LOG = logging.getLogger("steelyard")


class LoopPlan:
    """A plan for the passes of a loop; ``backward`` adds gradients, the loop does the rest.

    ``optimizer`` is the loop's own. ``keeps_gradients`` means that the loop adds up the gradients
    of several calls before it updates: they are then in memory while a pass runs, and count.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Any,
        *,
        optimizer: torch.optim.Optimizer | None,
        budget: Budget,
        keeps_gradients: bool,
        title: str = "",
    ) -> None:
        name = title or type(model).__name__
        bound = "" if budget.memory_bytes is None else f" for {format_bytes(budget.memory_bytes)}"
        LOG.warning("steelyard: planning %s%s, which takes up to a minute", name, bound)
        self.model, self.optimizer, self._budget = model, optimizer, budget
        self.keeps_gradients = keeps_gradients
        made = plan(
            model,
            loss,
            batch,
            optimizer=None if optimizer is None else optimizer_like(optimizer, model),
            budget=budget,
            title=name,
            on_progress=lambda words: LOG.info("steelyard: %s", words),
        )
        self.planned = _with_kept_gradients(made, budget) if keeps_gradients else made
        LOG.info("%s", self.planned)
        self.step = self.planned.apply(model)

    def backward(self, batch: Any, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Add the gradients of ``scale`` times the loss; return the loss, not scaled."""
        return self.step.backward(batch, scale)

    def receipt(self) -> ShownReceipt:
        """Return predicted and measured costs, against the budget that the user gave."""
        found = self.step.receipt().receipt
        decisions = replace(found.plan.decisions, budget=self._budget)
        return ShownReceipt(replace(found, plan=replace(found.plan, decisions=decisions)))


def _with_kept_gradients(made: Planned, budget: Budget) -> Planned:
    """Return a plan that fits the budget with kept gradients in addition.

    The predictions of a plan assume that no gradients exist when a step begins.
    """
    limit = budget.memory_bytes
    while limit is not None and budget.memory_bytes is not None:
        session = made.session
        program = session.as_executed(session.apply_rules(made.plan.decisions.rules))
        kept = kept_gradients_bytes(program, session.costs)
        excess = made.plan.predicted.peak.nbytes + kept - budget.memory_bytes
        if excess <= 0:
            break
        limit -= excess
        LOG.info("steelyard: gradients that the loop keeps take %s more", format_bytes(kept))
        try:
            made = made.what_if(**{**_bounds(budget), "memory_bytes": limit})
        except Infeasible as error:
            raise Infeasible(
                f"no plan fits memory <= {format_bytes(budget.memory_bytes)} together with the "
                f"gradients that the loop keeps between batches, {format_bytes(kept)}",
                expected=f"a plan of {format_bytes(limit)} for each batch, but {error.happened}",
                remedy="allow more memory, or accumulate over one larger batch: the plan itself "
                "may cut it into micro-batches",
            ) from error
    return made


def _bounds(budget: Budget) -> dict[str, Any]:
    return {name: getattr(budget, name) for name in Budget.__slots__}


def refuse_option(what: str, effect: str, remedy: str) -> BadInput:
    """Return the error for an option of a library that a planned step cannot honour."""
    return BadInput(
        f"{what} {effect}, which a planned step cannot honour",
        expected="options that leave forward and backward pass to the plan",
        remedy=remedy,
    )


def budget_of(budget: Budget | str) -> Budget:
    """Return the budget; a text is a bound on memory."""
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return Budget(memory=budget)
    raise BadInput(
        f"budget= is a {type(budget).__name__}",
        expected='an amount of memory such as "2 GiB", or a sy.Budget',
        remedy='write, for example, budget="2 GiB"',
    )


def optimizer_like(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """Return a function of parameters that makes an optimizer like this one.

    Given the model's own parameters, it returns this optimizer itself. Parameters in the order of
    ``model.parameters()`` get the groups of their counterparts.
    """
    own = list(model.parameters())
    position = {id(p): index for index, p in enumerate(own)}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        if [id(p) for p in given] == [id(p) for p in own]:
            return optimizer
        kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
        return kind(_groups_like(optimizer, given, position), **_accepted(kind, optimizer.defaults))

    return make


def _groups_like(
    optimizer: torch.optim.Optimizer, given: Sequence[nn.Parameter], position: dict[int, int]
) -> list[dict[str, Any]]:
    groups = []
    for group in optimizer.param_groups:
        at = [position[id(p)] for p in group["params"] if id(p) in position]
        parameters = [given[index] for index in at if index < len(given)]
        groups.append({**group, "params": parameters})
    if len(given) != len(position):
        # Stand-ins for single parameters, on which the optimizer's own time is measured.
        return [{**optimizer.param_groups[0], "params": list(given)}]
    return [group for group in groups if group["params"]]


def _accepted(kind: Callable[..., Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that the constructor takes; AdamW adds one that it does not."""
    taken = inspect.signature(kind).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return defaults
    return {name: value for name, value in defaults.items() if name in taken}
