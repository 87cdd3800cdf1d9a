"""PlannedTrainer trains like transformers.Trainer, with the Trainer's own features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from steelyard.errors import BadInput
from steelyard.integrations.transformers import PlannedTrainer
from tests.harness import in_a_hurry
from tests.support.tiny_llama import (
    BUDGET,
    assert_same_weights,
    largest_change,
    sentences,
    tiny_llama,
)


@pytest.fixture(autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 1,
            "max_grad_norm": 0.5,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
    )


def trainer_of(
    kind: Any,
    folder: Path,
    *,
    count: int = 32,
    budget: str = BUDGET,
    compute_loss_func: Any = None,
    **options: Any,
) -> Any:
    planned = {"budget": budget} if issubclass(kind, PlannedTrainer) else {}
    data = sentences(count)
    return kind(
        model=tiny_llama(),
        args=arguments(folder, **options),
        train_dataset=data,
        eval_dataset=data[:8],
        compute_loss_func=compute_loss_func,
        **planned,
    )


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_trained_alike(plain: Any, planned: Any) -> None:
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert logged(planned, key) == pytest.approx(logged(plain, key), abs=1e-5), key
        assert logged(plain, key), key
    assert_same_weights(plain.model, planned.model)
    # Ten times the tolerance: the comparison above would notice a wrong update.
    assert largest_change(plain.model) > 2e-5
    measured = planned.receipt().measured
    assert measured.memory_bytes is not None
    assert measured.memory_bytes <= planned.budget.memory_bytes
    assert measured.steps == 4


@pytest.mark.slow
def test_training_and_resuming_equal_the_plain_trainer(tmp_path: Path) -> None:
    plain = trainer_of(Trainer, tmp_path / "plain")
    plain.train()
    planned = trainer_of(PlannedTrainer, tmp_path / "planned")
    planned.train()
    assert_trained_alike(plain, planned)
    note = next(n for n in planned.receipt().measured.notes if "gradients kept" in n)
    assert "add ~" in note

    resumed = trainer_of(PlannedTrainer, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
    assert resumed.receipt().measured.steps == 2
    assert_same_weights(plain.model, resumed.model)


@pytest.mark.slow
def test_bf16_a_smaller_last_batch_and_label_smoothing_equal_the_plain_trainer(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "count": 12,
        "bf16": True,
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 1,
    }
    plain = trainer_of(Trainer, tmp_path, **options)
    plain.train()
    # Micro-batches would round each to bf16. With this budget the plan needs none.
    planned = trainer_of(PlannedTrainer, tmp_path, budget="5 MiB", **options)
    planned.train()
    assert_trained_alike(plain, planned)
    assert any("also ran batches of [4, 32]" in note for note in planned.receipt().measured.notes)


class Doubled(Trainer):
    """A user's Trainer with a loss of its own, which is not scaled for accumulation."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        value = 2 * outputs.loss
        return (value, outputs) if return_outputs else value


class PlannedDoubled(PlannedTrainer, Doubled):
    pass


@pytest.mark.slow
def test_the_loss_of_a_users_own_trainer_is_captured(tmp_path: Path) -> None:
    plain = trainer_of(Doubled, tmp_path)
    plain.train()
    planned = trainer_of(PlannedDoubled, tmp_path)
    planned.train()
    assert_trained_alike(plain, planned)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=-100, reduction="sum", label_smoothing=0.2
    )
    return total / num_items_in_batch


@pytest.mark.slow
def test_compute_loss_func_is_captured_with_the_number_of_items(tmp_path: Path) -> None:
    trainers = [
        trainer_of(kind, tmp_path, compute_loss_func=own_loss) for kind in (Trainer, PlannedTrainer)
    ]
    for trainer in trainers:
        trainer.train()
    assert_trained_alike(*trainers)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("fp16", True),
        ("torch_compile", True),
        ("deepspeed", "zero.json"),
        ("fsdp", "full_shard"),
        ("auto_find_batch_size", True),
        ("torch_empty_cache_steps", 4),
        ("optim", "lomo"),
    ],
)
def test_an_option_that_a_plan_cannot_honour_is_refused_by_name(
    tmp_path: Path, option: str, value: object
) -> None:
    args = arguments(tmp_path)
    setattr(args, option, value)  # some need a GPU or a library to be given as arguments
    with pytest.raises(BadInput, match=option) as refused:
        PlannedTrainer(model=tiny_llama(), args=args, train_dataset=sentences(8), budget=BUDGET)
    assert refused.value.remedy


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class PlannedOwnStep(PlannedTrainer, OwnStep):
    pass


def test_a_training_step_of_the_users_own_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"OwnStep.training_step"):
        trainer_of(PlannedOwnStep, tmp_path)


def test_several_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(BadInput, match=r"a Trainer on 2 devices") as refused:
        trainer_of(PlannedTrainer, tmp_path)
    assert "ranks=2" in refused.value.remedy


def test_gradient_checkpointing_is_switched_off_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(PlannedTrainer, tmp_path, activation_checkpointing=True)
    assert not trainer.args.activation_checkpointing
    assert "the plan chooses what is recomputed" in caplog.text


def test_a_budget_that_is_no_amount_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="budget= is a float"):
        PlannedTrainer(model=tiny_llama(), args=arguments(tmp_path), budget=2.5)
    with pytest.raises(BadInput, match="there is no plan yet"):
        trainer_of(PlannedTrainer, tmp_path).receipt()
