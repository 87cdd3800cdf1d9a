"""The published rows: what was run, and what was measured. Not for predicting it."""

import csv
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.published.gpt import Shape
from steelyard.core.deep_layout import DeepLayout

_HERE = Path(__file__).parent
_AGAIN = {"none": (), "selective": ("attention.core",), "full": ("",)}


@dataclass(frozen=True, kw_only=True)
class Row:
    table: str
    model: str
    shape: Shape
    micro_batch: int
    global_batch: int
    sequence_parallel: bool
    layout: DeepLayout
    step_seconds: float

    @cached_property
    def model_flops(self) -> float:
        """Of a step, none computed twice: Narayanan et al., SC 2021, appendix, without its 4/3."""
        s, l, h, v = (
            self.shape.sequence, self.shape.layers, self.shape.hidden, self.shape.vocabulary
        )  # fmt: skip
        return 72 * self.global_batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))


def megatron_rows() -> list[Row]:
    with (_HERE / "megatron.csv").open(encoding="utf-8") as file:
        return [_row(line) for line in csv.DictReader(file)]


def activation_rows() -> list[tuple[Row, float]]:
    """Bytes that the first stage keeps, of models whose steps stand in the other file."""
    of = {row.model: row for row in megatron_rows() if row.table == "korthikanti-5"}
    with (_HERE / "korthikanti_activations.csv").open(encoding="utf-8") as file:
        return [
            (_with(of[line["model"]], line), float(line["activation_gib"]) * 2**30)
            for line in csv.DictReader(file)
        ]


def _with(row: Row, line: dict[str, str]) -> Row:
    parallel = line["sequence_parallel"] == "yes"
    layout = replace(row.layout, again=_AGAIN[line["recompute"]], gathers_again=parallel)
    return replace(row, sequence_parallel=parallel, layout=layout)


def _row(line: dict[str, str]) -> Row:
    names = ("hidden", "heads", "layers", "sequence", "vocabulary")
    batch, micro, data = (int(line[n]) for n in ("global_batch", "micro_batch", "data"))
    parallel = line["sequence_parallel"] == "yes"
    row = Row(
        table=line["table"],
        model=line["model"],
        shape=Shape(**{name: int(line[name]) for name in names}),
        micro_batch=micro,
        global_batch=batch,
        sequence_parallel=parallel,
        layout=DeepLayout(
            tensor=int(line["tensor"]),
            pipeline=int(line["pipeline"]),
            data=data,
            micro_batches=batch // (data * micro),
            virtual=int(line["virtual"]),
            again=_AGAIN[line["recompute"]],
            draws_parts=True,
            gathers_again=parallel,
        ),
        step_seconds=float(line["step_seconds"] or 0),
    )
    if line["step_seconds"]:
        return row
    # The paper's FLOPs of a step count the forward pass that runs again: 96 B s l h^2 (1 + ...).
    s, l, h, v = row.shape.sequence, row.shape.layers, row.shape.hidden, row.shape.vocabulary
    flops = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    rate = float(line["tflops_per_gpu"]) * 1e12 * row.layout.num_ranks
    return replace(row, step_seconds=flops / rate)
