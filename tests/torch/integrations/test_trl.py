"""PlannedSFTTrainer trains like TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from steelyard.errors import BadInput
from steelyard.integrations.trl import PlannedSFTTrainer
from tests.harness import in_a_hurry
from tests.support.tiny_llama import (
    BUDGET,
    WORDS,
    assert_same_weights,
    largest_change,
    sentences,
    tiny_llama,
)

pytestmark = [
    # TRL 1.16 and peft 0.21 call transformers 5 by names that it will drop.
    pytest.mark.filterwarnings("ignore:.*checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    disable_progress_bars()
    with in_a_hurry(costs):
        yield


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(WORDS - 2)}
    words |= {"<eos>": WORDS - 2, "<pad>": WORDS - 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="<eos>",
        pad_token="<pad>",
    )


def trainer_of(kind: Any, folder: Path, *, peft: bool = False, **options: Any) -> Any:
    rows = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in sentences()])
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-4,
        "bf16": False,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return kind(
        model=tiny_llama(),
        args=SFTConfig(**settings),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        processing_class=tokenizer(),
        **({"peft_config": config} if peft else {}),
        **({"budget": BUDGET} if issubclass(kind, PlannedSFTTrainer) else {}),
    )


@pytest.mark.slow
def test_training_and_resuming_equal_trls_trainer(tmp_path: Path) -> None:
    plain = trainer_of(SFTTrainer, tmp_path / "plain")
    plain.train()
    planned = trainer_of(PlannedSFTTrainer, tmp_path / "planned")
    planned.train()
    for one, other in zip(plain.state.log_history, planned.state.log_history, strict=True):
        for key in {"loss", "grad_norm", "learning_rate"} & one.keys():
            assert other[key] == pytest.approx(one[key], abs=1e-5), key
    assert_same_weights(plain.model, planned.model)
    assert largest_change(plain.model) > 2e-5
    evaluated = planned.evaluate()
    assert evaluated["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    assert "eval_mean_token_accuracy" in evaluated
    measured = planned.receipt().measured
    assert (measured.steps, measured.passes) == (4, 8)
    assert measured.memory_bytes is not None
    assert measured.memory_bytes <= planned.budget.memory_bytes

    resumed = trainer_of(PlannedSFTTrainer, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
    assert resumed.receipt().measured.steps == 2
    assert_same_weights(plain.model, resumed.model)


@pytest.mark.slow
def test_adapters_train_as_with_trls_trainer(tmp_path: Path) -> None:
    plain = trainer_of(SFTTrainer, tmp_path, peft=True, save_strategy="no")
    plain.train()
    planned = trainer_of(PlannedSFTTrainer, tmp_path, peft=True, save_strategy="no")
    planned.train()
    assert_same_weights(plain.model, planned.model)
    trained = [p for p in plain.model.parameters() if p.requires_grad]
    assert len(trained) == 8
    assert max(float(p.detach().abs().max()) for p in trained) > 0


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"activation_offloading": True}, "activation_offloading"),
        ({"padding_free": True}, "padding_free"),
        ({"packing": True, "max_length": 32}, "packing_strategy='bfd'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_plan_cannot_honour_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], happened: str
) -> None:
    with pytest.raises(BadInput, match=happened) as refused:
        trainer_of(PlannedSFTTrainer, tmp_path, **options)
    assert refused.value.remedy
