"""PlannedStrategy trains like Lightning's own single device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from steelyard.errors import BadInput
from steelyard.integrations.lightning import PlannedStrategy
from tests.harness import in_a_hurry
from tests.support.tiny_llama import (
    BUDGET,
    BUDGET_BYTES,
    assert_same_weights,
    largest_change,
    sentences,
    tiny_llama,
)


@pytest.fixture(autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with in_a_hurry(costs):
        yield


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_llama().train()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch).loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(strategy: Any, *, epochs: int = 2, **options: Any) -> Any:
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "strategy": strategy,
            "max_epochs": epochs,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        }
    )


def planned_strategy(budget: str = BUDGET) -> PlannedStrategy:
    return PlannedStrategy(budget=budget, device="cpu")


def fit(trainer: Any, net: Net, checkpoint: Path | None = None) -> None:
    data = sentences()
    train, validate = DataLoader(data, batch_size=8), DataLoader(data[:8], batch_size=8)  # type: ignore[arg-type,var-annotated]
    trainer.fit(net, train, validate, ckpt_path=checkpoint and str(checkpoint))


pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Trainer already configured with model summary"),
]


@pytest.mark.slow
def test_training_and_resuming_equal_lightnings_own_device(tmp_path: Path) -> None:
    plain, expected = Net(), trainer_of("auto")
    fit(expected, plain)
    net, strategy = Net(), planned_strategy()
    trainer = trainer_of(strategy)
    fit(trainer, net)
    assert net.seen == pytest.approx(plain.seen, abs=1e-5)
    assert len(net.seen) == 8
    for key in ("train_loss", "val_loss"):
        logged = float(trainer.callback_metrics[key])
        assert logged == pytest.approx(float(expected.callback_metrics[key]), abs=1e-5)
    assert_same_weights(plain, net)
    assert largest_change(plain.net) > 2e-5
    measured = strategy.receipt().measured
    assert (measured.steps, measured.passes) == (4, 8)
    assert measured.memory_bytes is not None
    assert measured.memory_bytes <= BUDGET_BYTES

    first = trainer_of(planned_strategy(), epochs=1)
    fit(first, Net())
    first.save_checkpoint(str(tmp_path / "one.ckpt"))
    resumed = Net()
    fit(trainer_of(planned_strategy()), resumed, tmp_path / "one.ckpt")
    assert_same_weights(plain, resumed)


@pytest.mark.slow
def test_bf16_mixed_equals_lightnings_own_device() -> None:
    plain, net = Net(), Net()
    fit(trainer_of("auto", precision="bf16-mixed", epochs=1), plain)
    # Micro-batches would round each to bf16. With this budget the plan needs none.
    fit(trainer_of(planned_strategy("6 MiB"), precision="bf16-mixed", epochs=1), net)
    assert net.seen == pytest.approx(plain.seen, abs=1e-5)
    assert_same_weights(plain, net)


class LogsMore(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(**batch)
        self.log_dict({"train_loss": outputs.loss, "largest_logit": outputs.logits.max()})
        return {"loss": outputs.loss}


class ReadsIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch).loss * (1 + batch_idx)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Net):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


@pytest.mark.parametrize(
    ("net", "options", "happened"),
    [
        (LogsMore, {}, "training_step logs 'largest_logit'"),
        (Manual, {"accumulate_grad_batches": 1, "gradient_clip_val": None}, "automatic_optimiz"),
        (OwnBackward, {}, r"OwnBackward\.backward"),
        (Net, {"precision": "16-true"}, "precision='16-true'"),
        (Net, {"precision": "bf16-true"}, "precision='bf16-true'"),
        (Net, {"devices": 2}, r"Trainer\(devices=2\)"),
    ],
)
def test_what_a_plan_cannot_honour_is_refused_by_name(
    net: type[Net], options: dict[str, Any], happened: str
) -> None:
    trainer = trainer_of(planned_strategy(), **options)
    with pytest.raises(BadInput, match=happened) as refused:
        fit(trainer, net())
    assert refused.value.remedy


@pytest.mark.slow
def test_a_step_that_reads_the_index_of_the_batch_is_refused() -> None:
    with pytest.raises(BadInput, match="batch_idx"):
        fit(trainer_of(planned_strategy("8 MiB")), ReadsIndex())
