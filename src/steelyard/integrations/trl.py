"""TRL's SFTTrainer with a planned forward and backward pass.

    trainer = PlannedSFTTrainer(model=model, args=args, train_dataset=data, budget="2 GiB")

SFTTrainer computes its loss in a fused kernel that cannot be captured. The planned step computes
the same negative log-likelihood from the logits, and the plan may cut these into slices. The two
differ by rounding. Not for TRL's other trainers, whose steps generate text.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

from steelyard.integrations.loop_plan import refuse_option
from steelyard.integrations.transformers import PlannedTrainer

_VARIES = "joins samples into one row, whose length differs between batches"


class PlannedSFTTrainer(PlannedTrainer, SFTTrainer):
    """An SFTTrainer whose forward and backward pass are planned within ``budget``.

    Training logs have no ``entropy`` and ``mean_token_accuracy``, which need the logits of the
    step; evaluation logs them.
    """

    refused_options: ClassVar[dict[str, tuple[str, str]]] = {
        **PlannedTrainer.refused_options,
        "activation_offloading": ("moves activations by itself", "leave it out"),
        "padding_free": (_VARIES, "leave it out, and set pad_to_multiple_of"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "padding_free", False):
            raise refuse_option(
                f"packing_strategy={getattr(self.args, 'packing_strategy', None)!r}",
                _VARIES,
                "set packing_strategy='wrapped', or packing=False",
            )
        if self.aux_loss_enabled and self.args.gradient_accumulation_steps > 1:
            raise refuse_option(
                "router_aux_loss_coef with gradient_accumulation_steps",
                "weighs the balance loss of the experts by the number of accumulated batches",
                "set router_aux_loss_coef=0.0, or gradient_accumulation_steps=1 with a larger "
                "batch: the plan itself may cut it",
            )

    def check_arguments(self, args: TrainingArguments) -> None:
        """Refuse options that a planned step cannot honour; switch gradient checkpointing off."""
        super().check_arguments(args)
        loss_type = getattr(args, "loss_type", "nll")
        if loss_type not in ("nll", "chunked_nll"):
            raise refuse_option(
                f"loss_type={loss_type!r}",
                "is computed by a fused kernel",
                "use loss_type='nll', or override captured_loss(model, batch, num_items)",
            )

    def captured_loss(
        self, model: nn.Module, batch: dict[str, Any], num_items: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the negative log-likelihood of the labels, as the model itself computes it."""
        batch["use_cache"] = False
        loss = Trainer.compute_loss(self, model, batch, num_items_in_batch=num_items)
        value: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
        return value
