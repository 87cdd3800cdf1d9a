"""A planned step in transformers.Trainer against the same planned step in a loop by hand.

    python benchmarks/loops.py [steps]

One process trains a Llama of 16 million parameters. After each step of the Trainer, a callback
takes one step of the same plan on the same model by hand: next batch, ``step.backward``, clipping,
AdamW, schedule. A Trainer's step is the time from the end of one step by hand to the end of its own
optimizer step, so that its data loader, callbacks and logging count. The figure is the median of
the paired ratios, less one, with its 95 % interval. ``ours`` is the part of it that is spent in
PlannedTrainer itself, outside of the planned passes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from benchmarks.runner import interval
from steelyard.integrations.transformers import PlannedTrainer

TARGET, STEPS, WARM_UP = 0.02, 60, 6
BUDGET = "320 MiB"
WORDS, LENGTH, SAMPLES = 8192, 128, 4


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(folder, steps + WARM_UP)
        sides.trainer.train()
    pairs = list(zip(sides.in_trainer, sides.by_hand, sides.in_passes))[WARM_UP:]
    low, middle, high = interval([a / b - 1 for a, b, _ in pairs])
    own = interval([outside / b for (_, b, outside) in pairs])[1]
    print(
        json.dumps(
            {
                "name": "loops: a planned step in Trainer over the same by hand, less one",
                "value": round(middle, 4),
                "interval": [round(low, 4), round(high, 4)],
                "target": TARGET,
                "ok": middle <= TARGET,
                "ours": round(own, 4),
                "seconds_by_hand": round(interval(sides.by_hand[WARM_UP:])[1], 4),
                "steps": len(pairs),
                "threads": torch.get_num_threads(),
            }
        )
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
            num_attention_heads=6, num_key_value_heads=6,
        )
    ).train()  # fmt: skip


class Timed(PlannedTrainer):
    """Records the seconds of each training step that are not in the planned passes."""

    outside = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        begin = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        self.outside = time.perf_counter() - begin - self.passes
        return loss

    passes = 0.0


class Sides(TrainerCallback):
    """The Trainer, and the loop by hand that takes a step after each step of the Trainer."""

    def __init__(self, folder: str, steps: int) -> None:
        words = torch.randint(WORDS, (SAMPLES * 8, LENGTH))
        self.data = [{"input_ids": row, "labels": row} for row in words]
        self.in_trainer, self.by_hand, self.in_passes = list[float](), list[float](), list[float]()
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=SAMPLES, max_steps=steps, report_to=[],
            disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=10,
            learning_rate=1e-4,
        )  # fmt: skip
        self.trainer = Timed(
            model=llama(), args=arguments, train_dataset=self.data, callbacks=[self], budget=BUDGET
        )
        self._step: Any = None
        self._begin = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        end = time.perf_counter()
        if self._step is None:
            self._prepare()
        else:
            self.in_trainer.append(end - self._begin)
            self.in_passes.append(self.trainer.outside)
            begin = time.perf_counter()
            self._by_hand()
            self.by_hand.append(time.perf_counter() - begin)
        self._begin = time.perf_counter()

    def _prepare(self) -> None:
        """Make the loop by hand, and time the passes of the Trainer."""
        passes = self.trainer._loop_plan
        assert passes is not None
        self._step, self._model = passes.step, passes.model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer)
        self._batches = iter(())
        call = passes.backward

        def timed(*args: Any) -> torch.Tensor:
            begin = time.perf_counter()
            loss = call(*args)
            self.trainer.passes = time.perf_counter() - begin
            return loss

        passes.backward = timed  # type: ignore[method-assign]

    def _by_hand(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(DataLoader(self.data, batch_size=SAMPLES, shuffle=True))
            batch = next(self._batches)
        self._step.backward(batch)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()


if __name__ == "__main__":
    main()
