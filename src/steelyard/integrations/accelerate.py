"""accelerate's loop with a planned forward and backward pass.

    planned = PlannedBackward(accelerator, model, loss, batch, optimizer=optimizer, budget="2 GiB")
    ...
    value = planned.backward(batch)  # in place of loss(model, batch) and accelerator.backward

``accelerator.prepare`` is for the optimizer, the scheduler and the data loader: the model stays as
it is. Not for Trainer: see transformers.py.
"""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from steelyard.api import Planned
from steelyard.api.receipt import ShownReceipt
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.integrations.loop_plan import LoopPlan, budget_of, refuse_option
from steelyard.plans.budget import Budget


class PlannedBackward:
    """A planned forward and backward pass, scaled as ``accelerator.backward`` scales it."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        loss: Loss,
        batch: Any,
        *,
        optimizer: torch.optim.Optimizer,
        budget: Budget | str,
    ) -> None:
        _refuse_wrappers(accelerator)
        self._accelerator = accelerator

        def autocast_loss(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast(accelerator.device.type, dtype=torch.bfloat16):
                return loss(model, batch).float()

        is_mixed = accelerator.mixed_precision == "bf16"
        self._loop_plan = LoopPlan(
            model,
            autocast_loss if is_mixed else loss,
            batch,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            budget=budget_of(budget),
            keeps_gradients=accelerator.gradient_accumulation_steps > 1,
        )

    @property
    def planned(self) -> Planned:
        """The plan."""
        return self._loop_plan.planned

    def backward(self, batch: Any) -> torch.Tensor:
        """Add the gradients of the loss over the accumulation steps; return the loss itself."""
        return self._loop_plan.backward(batch, 1 / self._accelerator.gradient_accumulation_steps)

    def receipt(self) -> ShownReceipt:
        """Return the measured cost of the steps so far, with the predicted cost."""
        return self._loop_plan.receipt()


def _refuse_wrappers(accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1 or accelerator.distributed_type != DistributedType.NO:
        raise refuse_option(
            f"accelerate with {accelerator.num_processes} processes "
            f"({accelerator.distributed_type.value})",
            "wraps the model to share the batch",
            "launch one process, or write a loop with cluster=sy.Cluster.here(ranks="
            f"{max(2, accelerator.num_processes)})",
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise refuse_option(
            f"mixed_precision={accelerator.mixed_precision!r}",
            "scales the loss or replaces layers",
            "use mixed_precision='bf16', which is captured",
        )
    if accelerator.state.dynamo_plugin.backend.value.lower() not in ("no",):
        raise refuse_option(
            "dynamo_backend", "compiles the model", "leave it out: the plan runs its own program"
        )
