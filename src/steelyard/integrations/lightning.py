"""Lightning's Trainer with a planned forward and backward pass, as a strategy.

    trainer = L.Trainer(strategy=PlannedStrategy(budget="2 GiB"), ...)

The loss is that of ``training_step(batch, batch_idx)``, captured at the first batch. Optimizers,
schedulers, clipping, accumulation, validation and checkpoints remain Lightning's. Not for Fabric,
whose loop is the user's own: see ``step.backward``.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from steelyard.api import Planned
from steelyard.api.receipt import ShownReceipt
from steelyard.errors import BadInput
from steelyard.integrations.loop_plan import LoopPlan, budget_of, refuse_option
from steelyard.plans.budget import Budget

_PRECISIONS = ("32-true", "bf16-mixed")


@dataclass(frozen=True, slots=True)
class _Logged:
    """One call of ``self.log`` in the training step; its value is the loss."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class PlannedStrategy(SingleDeviceStrategy):
    """One device, on which ``training_step`` and its backward pass run as planned.

    ``budget`` is an amount of memory, or a ``sy.Budget``. By default, ``device`` is the first GPU,
    or the CPU if there is none. ``training_step`` may log the loss, which is then logged at every
    step. Other values exist only in the captured step and are refused.
    """

    strategy_name = "steelyard"

    def __init__(self, *, budget: Budget | str, device: torch.device | str | None = None) -> None:
        is_cuda = torch.cuda.is_available()
        super().__init__(device=device or ("cuda:0" if is_cuda else "cpu"))
        self.budget = budget_of(budget)
        self._loop_plan: LoopPlan | None = None
        self._loss = _TrainingLoss()
        self._logged: tuple[_Logged, ...] = ()
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

    @property
    def planned(self) -> Planned:
        """The plan; it exists after the first batch."""
        return self._made().planned

    def receipt(self) -> ShownReceipt:
        """Return the measured cost of the steps so far, with the predicted cost."""
        return self._made().receipt()

    def setup(self, trainer: Trainer) -> None:
        """Refuse what a planned step cannot honour, then set up the single device."""
        _refuse_options(trainer, self.precision_plugin.precision)
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Run the planned forward and backward pass on one batch; return the detached loss."""
        module = self.lightning_module
        assert module is not None, "Lightning sets it before training"
        trainer = module.trainer
        batch, batch_idx = args[0], trainer.fit_loop.epoch_loop.batch_idx
        parts = trainer.accumulate_grad_batches
        if batch_idx % parts == 0:
            # Lightning does so after this call; gradients of the last step would be added to.
            module.zero_grad(set_to_none=True)
        self._loss.batch_idx = batch_idx
        with _without_log(module):
            loss = self._plan_for(module, batch).backward(batch, 1 / parts)
        for one in self._logged:
            module.log(one.name, loss, *one.args, **one.kwargs)
        # Lightning now zeroes gradients and calls backward(), which returns these.
        self._gradients = [(p, p.grad) for p in module.parameters() if p.grad is not None]
        if batch_idx % parts == 0:
            for parameter, _ in self._gradients:
                parameter.grad = None
        return loss

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,  # noqa: ARG002 - Lightning's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the gradients of the planned step to the parameters, between Lightning's hooks."""
        module = self.lightning_module
        assert module is not None, "Lightning sets it before training"
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the passes, then the optimizer: within its step they could not be told apart.

        Lightning does the same under automatic mixed precision.
        """
        result = closure()
        self.precision_plugin._after_closure(model or self.lightning_module, optimizer)
        optimizer.step(**kwargs)
        return result

    def _plan_for(self, module: LightningModule, batch: Any) -> LoopPlan:
        known = self._loop_plan
        keeps_gradients = module.trainer.accumulate_grad_batches > 1
        if (
            known is None
            or known.model is not module
            or known.optimizer is not self.optimizers[0]
            or (keeps_gradients and not known.keeps_gradients)
        ):
            is_mixed = self.precision_plugin.precision == "bf16-mixed"
            self._loss.autocast_device = self.root_device.type if is_mixed else ""
            self._logged = _logs_of_loss(module, self._loss, batch)
            known = self._loop_plan = LoopPlan(
                module,
                self._loss,
                batch,
                optimizer=self.optimizers[0],
                budget=self.budget,
                keeps_gradients=keeps_gradients,
            )
        return known

    def _made(self) -> LoopPlan:
        if self._loop_plan is None:
            raise BadInput(
                "there is no plan yet",
                expected="a plan, which is made at the first batch",
                remedy="call trainer.fit(module) first",
            )
        return self._loop_plan


class _TrainingLoss:
    """The loss of ``training_step``, as a function of module and batch.

    ``batch_idx`` is that of the current batch: a step that reads it is refused when it changes.
    """

    def __init__(self) -> None:
        self.batch_idx = 0
        self.autocast_device = ""

    def __call__(self, module: LightningModule, batch: Any) -> torch.Tensor:
        if not self.autocast_device:
            return self._loss(module, batch)
        with torch.autocast(self.autocast_device, dtype=torch.bfloat16):
            return self._loss(module, batch)

    def _loss(self, module: LightningModule, batch: Any) -> torch.Tensor:
        if _takes_index(module):
            output = module.training_step(batch, self.batch_idx)
        else:
            output = module.training_step(batch)
        loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output
        return loss


def _takes_index(module: LightningModule) -> bool:
    return "batch_idx" in inspect.signature(module.training_step).parameters


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``self.log`` in a captured step, which computes only the loss."""


@contextlib.contextmanager
def _without_log(module: LightningModule) -> Iterator[None]:
    with _with_log(module, _ignore, _ignore):
        yield


@contextlib.contextmanager
def _with_log(
    module: LightningModule, log: Callable[..., None], log_dict: Callable[..., None]
) -> Iterator[None]:
    attributes = vars(module)
    before = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
    attributes["log"], attributes["log_dict"] = log, log_dict
    try:
        yield
    finally:
        del attributes["log"], attributes["log_dict"]
        attributes.update(before)


def _logs_of_loss(module: LightningModule, loss: _TrainingLoss, batch: Any) -> tuple[_Logged, ...]:
    """Run the training step once, without gradients, to learn what it logs.

    Generators and buffers are restored. Values other than the loss are refused.
    """
    found: list[tuple[_Logged, Any]] = []

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        found.append((_Logged(name, args, kwargs), value))

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value, *args, **kwargs)

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), _with_log(module, log, log_dict):
        value = loss(module, batch)
        for buffer, before in buffers:
            buffer.copy_(before)
    for one, logged in found:
        is_loss = isinstance(logged, torch.Tensor) and logged.data_ptr() == value.data_ptr()
        if not is_loss:
            raise BadInput(
                f"training_step logs {one.name!r}, which is not the loss that it returns",
                expected="a training step that logs its loss: a planned step computes no other "
                "value",
                remedy=f"log {one.name!r} in validation_step or on_train_batch_end",
            )
    return tuple(one for one, _ in found)


def _refuse_options(trainer: Trainer, precision: str) -> None:
    module = trainer.lightning_module
    if precision not in _PRECISIONS:
        raise refuse_option(
            f"precision={precision!r}",
            "scales the loss or replaces layers",
            f"use one of {', '.join(_PRECISIONS)}",
        )
    # With a strategy for one device, ``num_devices`` is 1 whatever was asked for.
    count = len(trainer._accelerator_connector._parallel_devices) * trainer.num_nodes
    if count > 1:
        raise refuse_option(
            f"Trainer(devices={count})",
            "shares the batch among processes",
            f"set devices=1, or write a loop with cluster=sy.Cluster.here(ranks={count})",
        )
    if not module.automatic_optimization:
        raise refuse_option(
            f"automatic_optimization=False of {type(module).__name__}",
            "calls backward in training_step",
            "call step.backward(batch) of a sy.plan there, without this strategy",
        )
    if type(module).backward is not LightningModule.backward:
        raise refuse_option(
            f"{type(module).__name__}.backward",
            "would be replaced by the planned backward pass",
            "move the change to training_step, which is captured, or to on_after_backward",
        )
