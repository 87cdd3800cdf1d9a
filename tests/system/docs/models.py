"""Writes docs/models.md: what becomes of each case of the zoo when its step is captured and run.

    python -m tests.system.docs.models

One forward and backward pass of each, generated Python beside eager PyTorch from the same state and
seed: loss, every gradient, every buffer. Not for training longer, nor under trades: see the
conformance suite.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import steelyard
from steelyard import _torch
from steelyard.capture.step import CapturedStep
from steelyard.errors import SteelyardError
from steelyard.ir.program import Program
from steelyard.run.step import LiveStep
from tests.zoo import EDGE, HF, OWN, REFUSED, Case, reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
_SEED = 11

# Cases that are not bitwise equal, with the reason; a new one must be investigated.
_ROUNDING = {
    "lstm": "eager runs oneDNN's fused LSTM, the graph the cell's own operators",
    "edge_lstm_on_data": "eager runs oneDNN's fused LSTM, the graph the cell's own operators",
    "edge_gru": "the graph holds the cell's own operators, in another order of sums than eager's",
    "edge_gru_dropout": "the graph holds the cell's own operators, in another order of sums than "
    "eager's",
    "hf_mamba": "compiled, transformers scans by an associative tree, and eager step by step",
    "hf_llama_mask_of_ones": "eager looks into the mask (without `use_cache`, the positions) and "
    "does without where nothing is masked; a graph cannot look",
    "hf_beit": "one gradient is summed in another order",
}

_HEAD = """# Models

This page shows what happens to a model when Steelyard captures its training
step. Of the {legal} models and idioms that plain PyTorch trains, {bitwise} give the same
loss, gradients and buffers bit for bit; {rounded} differ by rounding{refused}. A model that is
not listed either works or is refused with a reason. If eager PyTorch trains a
parameter and the captured step does not, that is always an error.

Each row is one forward and backward pass at a tiny size, with dropout on. It compares generated
Python with eager PyTorch, from the same weights and the same seed, under torch {torch} on a CPU.
This page is written by `python -m tests.system.docs.models`, and tests compare rows of it with the
program.

- **bitwise**: the loss, every gradient and every buffer are bitwise equal.
- **rounding**: equal except for rounding. The figure is the largest difference of a gradient,
  relative to the largest element of that gradient.
- **refused**: the step is not captured. The error says why, and what to do.

*Batch cut* says whether `accumulate` may split the batch into micro-batches, and if not, why.

## `use_cache=False` in transformers

Decoders in which several heads share one key (`num_key_value_heads` below `num_attention_heads`:
Llama, Qwen2, Mistral and others) differ from eager by rounding if they are called with
`use_cache=False`, without an attention mask and without attention dropout. No trade is needed for
that. Eager transformers then looks at the positions, finds one sequence in each sample, and
computes attention without a mask. A graph cannot look, so the captured step has a mask, and with a
mask transformers repeats the shared keys and values. The gradients are then summed in another
order.

For a Qwen2 of 4 layers (transformers 5.23, width 128, 4 heads that share 2 keys, 4 sequences of
128) the gradients differ by at most 8e-7 of their largest element. The loss is equal to the bit in
the first two steps of AdamW; in the third it is 7.3369894 in place of 7.3369899. Everything is
bitwise equal with the default `use_cache`, with attention dropout (as in the row of Qwen2 below),
with as many keys as heads, and with `TRANSFORMERS_SDPA_FORCE_GQA=1` in the environment.

## Half precision and micro-batches

Under bf16 autocast, or with bf16 weights, the gradients of each micro-batch are rounded to bf16
before they are added in the dtype of the parameter. Training with micro-batches therefore differs
from training on the whole batch by rounding. It is bitwise equal to plain PyTorch that accumulates
over the same micro-batches, and as accurate as the whole batch.

`benchmarks/half_precision.py` prints the following figures for a GPT-2 of 4 layers (transformers,
width 128, 8 sequences of 64). The first table shows relative differences of the gradient. The
difference from float64 is the same in 1, 2, 4 or 8 micro-batches.

| | from float64 | micro-batches from the whole batch |
|---|---|---|
| bf16 autocast | 0.65 % of its norm | 0.22 % |
| without autocast | 5e-7 | 2e-7 |

AdamW amplifies the difference, because the size of its first steps does not depend on the size of a
gradient. After three steps with a learning rate of 1e-3, the parameters differ by at most:

| | micro-batches from the whole batch | whole batch from float64 | micro-batches from float64 |
|---|---|---|---|
| AdamW | 2.7e-3 | 4.0e-3 | 3.9e-3 to 4.1e-3 |
| SGD | 1.1e-4 | 2.1e-4 | 2.1e-4 to 2.3e-4 |

The difference is rounding, not an error. Accumulation stays exact for a budget without accuracy
loss, and a plan that splits the batch of such a step says so in a note.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``state`` is one of the three words of the page; ``reason`` explains why it is not the
    first."""

    state: str
    reason: str = ""
    cut: str = ""


def verdict_on(case: Case) -> Verdict:
    model, loss, batch = case.make()
    eager = reference.eager_step(case.make()[0], loss, batch, _SEED)
    source = CapturedStep(model=model, loss=loss, batch=batch)
    try:
        captured = source.captured()
        step = LiveStep(
            model, Program.plain(captured.graph), constants=captured.constants, batch=batch
        )
    except SteelyardError as error:
        return Verdict(state="refused", reason=error.happened)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(_SEED)
    value = step.backward(batch)
    ours = (value, reference.gradients(model), reference.buffers(model))
    cut = source.why_not_split() or f"yes ({source.reduction().value} of the parts)"
    said = _difference(eager, ours)
    if said is None:
        return Verdict(state="bitwise", cut=cut)
    return Verdict(
        state=f"rounding {_worst(eager[1], ours[1]):.0e}",
        reason=_ROUNDING.get(case.name, f"not explained yet: {said}"),
        cut=cut,
    )


def refusal_of(case: Case) -> Verdict:
    """Return the reason of cases that must be refused; plain PyTorch refuses some of them too."""
    model, loss, batch = case.make()
    try:
        # A model without values can be planned, but its plan cannot be applied.
        steelyard.plan(model, loss, batch).apply()
    except SteelyardError as error:
        return Verdict(state="refused", reason=error.happened)
    return Verdict(state="captured", reason="and should not be")


def _difference(eager: tuple[Any, ...], ours: tuple[Any, ...]) -> str | None:
    return (
        reference.difference({"loss": eager[0]}, {"loss": ours[0]})
        or reference.difference(eager[1], ours[1])
        or reference.difference(eager[2], ours[2])
    )


def _worst(eager: dict[str, Any], ours: dict[str, Any]) -> float:
    shares = [
        float((e - ours[n]).abs().max() / e.abs().max())
        for n, e in eager.items()
        if e is not None and bool(e.abs().max() > 0)
    ]
    return max(shares, default=0.0)


# --- the page -------------------------------------------------------------------------------------


def page(verdicts: dict[str, Verdict]) -> str:
    legal = [verdicts[c.name] for c in (*OWN, *HF, *EDGE)]
    states = [v.state.partition(" ")[0] for v in legal]
    head = _HEAD.format(
        bitwise=states.count("bitwise"),
        rounded=states.count("rounding"),
        refused=f"; {states.count('refused')} are refused" if "refused" in states else "",
        legal=len(legal),
        torch=torch.__version__.partition("+")[0],
    )
    parts = [
        head,
        "## Models of `transformers`, with random weights\n",
        _table(HF, verdicts, first="model", name=_class_name),
        "## Models of our own\n",
        _table(OWN, verdicts, first="model"),
        "## Idioms\n\nThings that models do and that could go wrong, one case each.\n",
        _table(EDGE, verdicts, first="case"),
        "## Refused\n\nA captured step could not repeat these faithfully.\n",
        _refusals(REFUSED, verdicts),
    ]
    return "\n".join(parts)


def _table(
    cases: Iterable[Case], verdicts: dict[str, Verdict], *, first: str, name: Any = None
) -> str:
    lines = [f"| {first} | state | batch cut | note |", "|---|---|---|---|"]
    for case in cases:
        verdict = verdicts[case.name]
        shown = name(case) if name else f"`{case.name}`"
        note = "; ".join(_cell(part) for part in (verdict.reason, case.note) if part)
        lines.append(f"| {shown} | {verdict.state} | {_cell(verdict.cut)} | {note} |")
    return "\n".join(lines) + "\n"


def _refusals(cases: Iterable[Case], verdicts: dict[str, Verdict]) -> str:
    lines = ["| case | what is said |", "|---|---|"]
    for case in cases:
        what = case.note or case.name
        lines.append(f"| {_cell(what)} (`{case.name}`) | {_cell(verdicts[case.name].reason)} |")
    return "\n".join(lines) + "\n"


def _class_name(case: Case) -> str:
    model = case.build.__self__.model  # type: ignore[attr-defined]
    return f"{model} (`{case.name}`)"


def _cell(text: str) -> str:
    # Line numbers are removed, because they change with every case that is added above.
    return re.sub(r"(\.py):\d+", r"\1", " ".join(text.split())).replace("|", "\\|")[:220]


def all_verdicts(cases: Iterable[Case]) -> Iterator[tuple[str, Verdict]]:
    refused = {case.name for case in REFUSED}
    for case in cases:
        verdict = refusal_of(case) if case.name in refused else verdict_on(case)
        print(f"{case.name:<36} {verdict.state:<16} {verdict.reason[:80]}", file=sys.stderr)
        yield case.name, verdict


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cases = (*OWN, *HF, *EDGE, *REFUSED)
    PAGE.write_text(page(dict(all_verdicts(cases))), encoding="utf-8")


if __name__ == "__main__":
    with _torch.quiet_logs():
        main()
