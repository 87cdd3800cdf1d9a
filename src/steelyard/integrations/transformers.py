"""transformers.Trainer with a planned forward and backward pass.

    trainer = PlannedTrainer(model=model, args=args, train_dataset=data, budget="2 GiB")

The loss is the Trainer's own ``compute_loss``, captured at the first batch. Gradient accumulation,
optimizer, scheduler, clipping, evaluation, logging and checkpoints remain the Trainer's. Not for
TRL's trainers: see trl.py.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from steelyard.api import Planned
from steelyard.api.receipt import ShownReceipt
from steelyard.errors import BadInput
from steelyard.integrations.loop_plan import LOG, LoopPlan, budget_of, refuse_option
from steelyard.plans.budget import Budget

# Options of TrainingArguments that a planned step cannot honour: what they do, and what to do.
_REFUSED = {
    "fp16": ("scales the loss by a GradScaler", "use bf16=True, which is captured"),
    "torch_compile": ("compiles the model", "leave it out: the plan runs its own program"),
    "deepspeed": ("wraps model and optimizer", "leave it out, and run one process"),
    "fsdp": ("shards the model", "leave it out, and run one process"),
    "parallelism_config": ("shards the model", "leave it out, and run one process"),
    "auto_find_batch_size": ("changes the batch size", "leave it out: the plan keeps the budget"),
    "torch_empty_cache_steps": ("frees memory in the middle of a step", "leave it out"),
}


class PlannedTrainer(Trainer):
    """A Trainer whose forward and backward pass are planned within ``budget``.

    ``budget`` is an amount of memory, or a ``sy.Budget``. The plan is made at the first batch. To
    plan a Trainer of your own: ``class MyPlannedTrainer(PlannedTrainer, MyTrainer)``.
    """

    refused_options: ClassVar[dict[str, tuple[str, str]]] = _REFUSED

    def __init__(self, *args: Any, budget: Budget | str, **kwargs: Any) -> None:
        self.budget = budget_of(budget)
        self._loop_plan: LoopPlan | None = None
        self._num_items: torch.Tensor | None = None
        self._refuse_other_steps()
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                self.check_arguments(given)
        super().__init__(*args, **kwargs)
        self._refuse_wrappers()
        _capture_without_unwrapping(self.accelerator)

    @property
    def planned(self) -> Planned:
        """The plan; it exists after the first batch."""
        return self._made().planned

    def receipt(self) -> ShownReceipt:
        """Return the measured cost of the steps so far, with the predicted cost."""
        return self._made().receipt()

    def check_arguments(self, args: TrainingArguments) -> None:
        """Refuse options that a planned step cannot honour; switch gradient checkpointing off."""
        for name, (effect, remedy) in self.refused_options.items():
            if getattr(args, name, None):
                raise refuse_option(f"{name}={getattr(args, name)!r}", effect, remedy)
        optim = str(getattr(args.optim, "value", args.optim))
        if "lomo" in optim or "layerwise" in optim:
            raise refuse_option(
                f"optim={optim!r}",
                "updates weights within the backward pass",
                "use an optimizer that steps after it, such as optim='adamw_torch'",
            )
        # transformers 5 has two names for one option, and sets both.
        names = ("activation_checkpointing", "gradient_checkpointing")
        if any(getattr(args, name, False) for name in names):
            LOG.warning(
                "steelyard: %s is switched off: the plan chooses what is recomputed", names[0]
            )
            for name in names:
                setattr(args, name, False)

    def captured_loss(
        self, model: nn.Module, batch: dict[str, Any], num_items: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the loss that is captured; ``num_items`` as in ``compute_loss``."""
        loss = self.compute_loss(model, batch, num_items_in_batch=num_items)
        value: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
        return value

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run the planned forward and backward pass on one batch; return the detached loss."""
        model.train()
        train_mode = getattr(self.optimizer, "train", None)  # of schedule-free optimizers
        if callable(train_mode):
            train_mode()
        batch = dict(self._prepare_inputs(inputs))
        self._set_num_items(num_items_in_batch)
        loop_plan = self._plan_for(batch)
        # As Trainer.training_step does: a loss over all items of the step is scaled already.
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts or self.compute_loss_func is not None
        parts = 1 if is_scaled else self.current_gradient_accumulation_steps
        return loop_plan.backward(batch, 1 / parts) / parts

    def _plan_for(self, batch: dict[str, Any]) -> LoopPlan:
        """Return the plan of the model and optimizer that train now, made if there is none yet."""
        # The Trainer wraps its optimizer (AcceleratedOptimizer), and makes both anew in train().
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        model: Any = self.model
        known = self._loop_plan
        if known is None or known.model is not model or known.optimizer is not optimizer:
            self._loop_plan = known = LoopPlan(
                model,
                lambda model, batch: self.captured_loss(model, dict(batch), self._num_items),
                batch,
                optimizer=optimizer,
                budget=self.budget,
                keeps_gradients=self.args.gradient_accumulation_steps > 1,
            )
        return known

    def _set_num_items(self, num_items: torch.Tensor | int | None) -> None:
        """Write the number of items into the tensor that the captured loss reads."""
        if num_items is None or self._num_items is None:
            if self._loop_plan is not None and (num_items is None) != (self._num_items is None):
                self._loop_plan = None
            self._num_items = None if num_items is None else torch.as_tensor(num_items).clone()
        else:
            self._num_items.copy_(torch.as_tensor(num_items))

    def _made(self) -> LoopPlan:
        if self._loop_plan is None:
            raise BadInput(
                "there is no plan yet",
                expected="a plan, which is made at the first batch",
                remedy="call train() first",
            )
        return self._loop_plan

    def _refuse_other_steps(self) -> None:
        """Refuse a Trainer below this class that has a training step of its own."""
        order = type(self).__mro__
        for below in order[order.index(PlannedTrainer) + 1 : order.index(Trainer)]:
            library = below.__module__.partition(".")[0]
            if "training_step" in vars(below) and library != "trl":
                raise refuse_option(
                    f"{below.__name__}.training_step",
                    "would be replaced by the planned step",
                    "move the change to compute_loss, which is captured, or to a callback",
                )

    def _refuse_wrappers(self) -> None:
        """Refuse what the environment or accelerate's configuration asks for."""
        self.check_arguments(self.args)
        num_processes = self.accelerator.num_processes
        if num_processes > 1 or self.args.n_gpu > 1:
            count = max(num_processes, self.args.n_gpu)
            raise refuse_option(
                f"a Trainer on {count} devices",
                "shares the batch by DistributedDataParallel or DataParallel",
                "run one process on one device (CUDA_VISIBLE_DEVICES=0), or write a loop with "
                f"cluster=sy.Cluster.here(ranks={count})",
            )
        for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
            if getattr(self, name, False):
                raise refuse_option(
                    f"{name.split('_')[1]}, which accelerate's configuration turns on",
                    "wraps the model",
                    "turn it off, and run one process",
                )


def _capture_without_unwrapping(accelerator: Any) -> None:
    """Make ``unwrap_model`` return its argument while a step is captured.

    A Trainer with label smoothing calls it in ``compute_loss``. The captured model is not wrapped,
    and accelerate looks for installed packages there, which cannot be traced.
    """
    unwrap_model = accelerator.unwrap_model

    def unwrap(model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return model
        return unwrap_model(model, *args, **kwargs)

    accelerator.unwrap_model = unwrap
