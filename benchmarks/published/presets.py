"""Scores the predictions of each device preset on fitted and on held-out published steps.

    python benchmarks/published/presets.py            # from the recorded predictions: seconds
    python benchmarks/published/presets.py --predict  # predicts every step anew: minutes

Every step is priced as a plan for that cluster prices its layout: with the preset's share of the
declared rates, its time per call, and fused kernels, whatever the software of the publication was.
The predictions are recorded in benchmarks/results/calibration.csv. The accuracy of each preset is
written to src/steelyard/hardware/preset/calibration.toml, from which plans print it. Needs no GPU.
"""

import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.bert import bert_rows
from benchmarks.published.foundry import foundry_rows
from benchmarks.published.held_out import held_out_rows
from benchmarks.published.megatron import megatron_rows
from benchmarks.published.reaches import TABLES
from benchmarks.published.rows import Row, predicted
from benchmarks.published.scoring import half
from benchmarks.published.titan import llama_rows
from steelyard.hardware.calibration import COVERED, ENOUGH_ROWS, Parallelism
from steelyard.hardware.software_stack import stack_on

_ROOT = Path(__file__).resolve().parents[2]
RECORD = _ROOT / "benchmarks" / "results" / "calibration.csv"
PRESET = _ROOT / "src" / "steelyard" / "hardware" / "preset" / "calibration.toml"
# The presets of one chip share the fitted figures and the steps that these are scored on.
_CHIPS = (
    ("A100-SXM4-40GB", "A100-SXM4-80GB"),
    ("H100-SXM5",),
    ("V100-SXM2-16GB", "V100-SXM2-32GB"),
)
# For each table: software, family of models, format of the matrix products.
_ABOUT = {
    "sc21-1": ("Megatron-LM", "GPT", "float16"),
    "sc21-2": ("Megatron-LM", "GPT", "float16"),
    "korthikanti-5": ("Megatron-LM", "GPT", "float16"),
    "sc21-2-zero3": ("DeepSpeed", "GPT", "float16"),
    "foundry-a100": ("llm-foundry", "MPT", "bfloat16"),
    "foundry-h100": ("llm-foundry", "MPT", "bfloat16"),
    "foundry-h100-large": ("llm-foundry", "MPT", "bfloat16"),
    "titan-1": ("torchtitan", "Llama", "bfloat16"),
    "titan-3": ("torchtitan", "Llama", "bfloat16"),
    "titan-tensor": ("torchtitan", "Llama", "bfloat16"),
    "titan-a100": ("torchtitan", "Llama", "bfloat16"),
    "llama3-4": ("Meta's own", "Llama", "bfloat16"),
    "megatron-core": ("Megatron-Core", "GPT", "bfloat16"),
    "bert": ("NVIDIA's BERT", "BERT", "float16"),
}
_SIZES = {"m": 1e6, "b": 1e9, "t": 1e12}
_FIELDS = (
    "device", "table", "name", "role", "software", "family", "model", "parameters", "kind",
    "precision", "devices", "measured_seconds", "predicted_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One published step with its prediction."""

    device: str
    table: str
    name: str
    role: str
    software: str
    family: str
    model: str
    parameters: int
    kind: str
    precision: str
    devices: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def missed(self) -> float:
        """The absolute error of the prediction, as a share of the prediction."""
        return abs(self.measured_seconds / self.predicted_seconds - 1)


def main() -> None:
    if "--predict" in sys.argv:
        write_record([step_of(row, role) for row, role in published_steps()])
    steps = read_record()
    for chip in _CHIPS:
        _report(chip, [step for step in steps if step.device in chip])
    PRESET.write_text(calibration_toml(steps), encoding="utf-8")
    print(f"written: {PRESET.relative_to(_ROOT)}")


def published_steps() -> Iterator[tuple[Row, str]]:
    """Yield every published step, and whether a preset was fitted on it."""
    rows = [*megatron_rows(), *foundry_rows(), *llama_rows(), *bert_rows(), *held_out_rows()]
    by_kind = {row.cluster.device.kind: row for row in rows}
    fitted = {row for kind in by_kind for row in _fitted_on(kind, rows)}
    for row in rows:
        yield row, "fitted" if row in fitted else "scored"


def _fitted_on(device: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows that the preset of a device was fitted on.

    Without a table, as for BERT, they are the rows with the fewest ranks: the share was fitted on
    the whole training on one machine, of which these steps are parts.
    """
    names = dict(TABLES).get(device)
    if names is None:
        own = [row for row in rows if row.cluster.device.kind == device]
        fewest = min(row.layout.num_ranks for row in own)
        return [row for row in own if row.layout.num_ranks == fewest]
    return half([row for row in rows if row.table in names])


def step_of(row: Row, role: str) -> Step:
    software, family, precision = _ABOUT[row.table]
    model = row.name.partition(" on ")[0].partition(" of ")[0].partition(",")[0]
    return Step(
        device=row.cluster.device.kind,
        table=row.table,
        name=row.name,
        role=role,
        software=software,
        family=family,
        model=model,
        parameters=_parameters(model),
        kind=Parallelism.of(tensor=row.layout.tensor, pipeline=row.layout.pipeline).value,
        precision=precision,
        devices=row.layout.num_ranks,
        measured_seconds=float(f"{row.step_seconds:.6g}"),
        predicted_seconds=float(f"{as_planned(row):.6g}"),
    )


def as_planned(row: Row) -> float:
    """Return the seconds of a step, as a plan prices its layout on that cluster."""
    layout = replace(
        row.layout,
        draws_parts=False,
        overlaps=row.layout.data > 1 and row.layout.state_stage < 3,
    )
    stack = stack_on(row.cluster.device)
    return predicted(replace(row, layout=layout, stack=stack), stack).step_seconds


def _parameters(model: str) -> int:
    """Return the number of parameters from the name of a model, such as ``GPT-1.7B``."""
    found = re.search(r"-([0-9.]+)([mbt])$", model.lower())
    assert found is not None, model
    return round(float(found[1]) * _SIZES[found[2]])


# --- the calibration of a preset


def calibration_toml(steps: Sequence[Step]) -> str:
    lines = [
        "# How far steps are priced from published ones, by device. Written by",
        "# benchmarks/published/presets.py from benchmarks/results/calibration.csv: not by hand.",
    ]
    for chip in _CHIPS:
        own = [step for step in steps if step.device in chip]
        for device in chip:
            lines += ["", *_device_toml(device, own)]
    return "\n".join(lines) + "\n"


def _device_toml(device: str, steps: Sequence[Step]) -> Iterator[str]:
    fitted = [step for step in steps if step.role == "fitted"]
    scored = [step for step in steps if step.role == "scored"]
    inside, outside = parted_by(fitted, scored)
    yield f"[device.{device}.fitted]"
    yield from _domain_toml(fitted)
    groups = [("", True, inside), ("", False, outside)]
    groups += [
        (kind.value, False, [s for s in outside if s.kind == kind.value]) for kind in Parallelism
    ]
    for kind, is_inside, group in groups:
        if group:
            yield ""
            yield f"[[device.{device}.score]]"
            yield f"kind = {_text(kind)}"
            yield f"inside = {str(is_inside).lower()}"
            yield from _domain_toml(group)
            yield from _errors_toml(group)
    for name, pairs in pair_errors(scored).items():
        if pairs:
            yield ""
            yield f"[device.{device}.{name}]"
            yield f"count = {len(pairs)}"
            yield f"high_error = {_figure(high(pairs))}"


def parted_by(fitted: Sequence[Step], scored: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Return the scored steps that are like the fitted ones, and all others.

    Steps are alike in software, layout, precision, model size and number of devices.
    """

    def lies_in(name: str, step: Step) -> bool:
        values = [getattr(other, name) for other in fitted]
        return bool(min(values) <= getattr(step, name) <= max(values))

    def is_inside(step: Step) -> bool:
        alike = ("software", "kind", "precision")
        return all(
            getattr(step, name) in {getattr(other, name) for other in fitted} for name in alike
        ) and all(lies_in(name, step) for name in ("parameters", "devices"))

    inside = [step for step in scored if is_inside(step)]
    return inside, [step for step in scored if step not in inside]


def pair_errors(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Return the absolute errors of the predicted ratio of two steps of the same software."""
    found: dict[str, list[float]] = {"alike": [], "unlike": []}
    for one, other in combinations(steps, 2):
        if one.software == other.software:
            ratio = (1 + one.error) / (1 + other.error)
            name = "alike" if one.kind == other.kind else "unlike"
            found[name].append(max(ratio, 1 / ratio) - 1)
    return found


def high(errors: Iterable[float]) -> float:
    """Return the 90th percentile, by nearest rank."""
    found = sorted(errors)
    return found[math.ceil(COVERED * len(found)) - 1]


def doubt(steps: Sequence[Step]) -> float | None:
    """Return the bound on the error of a further step in nine of ten cases; None for too few."""
    if len(steps) < ENOUGH_ROWS:
        return None
    found = sorted(step.missed for step in steps)
    return found[math.ceil(COVERED * (len(found) + 1)) - 1]


def _domain_toml(steps: Sequence[Step]) -> Iterator[str]:
    def bounds(name: str) -> str:
        values = [getattr(step, name) for step in steps]
        return f"[{min(values)}, {max(values)}]"

    models = sorted({step.model for step in steps})
    yield f"rows = {len(steps)}"
    yield f"software = {_texts(step.software for step in steps)}"
    yield f"models = {_texts(models if len(models) < 3 else (s.family for s in steps))}"
    yield f"kinds = {_texts(step.kind for step in steps)}"
    yield f"precisions = {_texts(step.precision for step in steps)}"
    yield f"parameters = {bounds('parameters')}"
    yield f"devices = {bounds('devices')}"


def _errors_toml(steps: Sequence[Step]) -> Iterator[str]:
    yield f"median_error = {_figure(median(abs(step.error) for step in steps))}"
    yield f"high_error = {_figure(high(abs(step.error) for step in steps))}"
    yield f"bias = {_figure(median(step.error for step in steps))}"
    found = doubt(steps)
    if found is None:
        return
    yield f"doubt = {_figure(found)}"
    worst, missed, error = max(_by_software(steps), key=lambda one: one[1])
    if missed > found:
        yield f"worst_software = {_text(worst)}"
        yield f"worst_error = {_figure(error)}"


def _by_software(steps: Sequence[Step]) -> Iterator[tuple[str, float, float]]:
    """Yield each software with two median errors of its steps.

    They are relative to the prediction and to the measured time.
    """
    for software in dict.fromkeys(step.software for step in steps):
        own = [step for step in steps if step.software == software]
        missed = median(step.missed for step in own)
        yield software, missed, median(abs(step.error) for step in own)


def _figure(value: float) -> str:
    return f"{value:.3f}"


def _text(value: str) -> str:
    return f'"{value}"'


def _texts(values: Iterable[str]) -> str:
    return f"[{', '.join(_text(value) for value in dict.fromkeys(values))}]"


# --- the record, and the printed report


def write_record(steps: Iterable[Step]) -> None:
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        writer.writeheader()
        for step in steps:
            writer.writerow({name: getattr(step, name) for name in _FIELDS})


def read_record() -> list[Step]:
    with RECORD.open(encoding="utf-8") as file:
        return [_read(line) for line in csv.DictReader(file)]


def _read(line: Mapping[str, str]) -> Step:
    texts = {name: line[name] for name in _FIELDS[:7]}
    return Step(
        **texts,
        parameters=int(line["parameters"]),
        kind=line["kind"],
        precision=line["precision"],
        devices=int(line["devices"]),
        measured_seconds=float(line["measured_seconds"]),
        predicted_seconds=float(line["predicted_seconds"]),
    )


def _report(chip: Sequence[str], steps: Sequence[Step]) -> None:
    print(f"{', '.join(chip)}: {len(steps)} steps")
    fitted = [step for step in steps if step.role == "fitted"]
    inside, outside = parted_by(fitted, [step for step in steps if step.role == "scored"])
    for name, group in (("fitted", fitted), ("inside", inside), ("outside", outside)):
        _line(f"  {name}", group)
    for attribute in ("software", "family", "kind", "precision"):
        for value in dict.fromkeys(getattr(step, attribute) for step in outside):
            own = [step for step in outside if getattr(step, attribute) == value]
            _line(f"    outside, {attribute} {value}", own)
    for name, pairs in pair_errors([s for s in steps if s.role == "scored"]).items():
        if pairs:
            print(
                f"  {len(pairs)} pairs {name}: median {median(pairs):.1%}, high {high(pairs):.1%}"
            )


def _line(name: str, steps: Sequence[Step]) -> None:
    if steps:
        errors = [step.error for step in steps]
        sizes = [abs(error) for error in errors]
        print(
            f"{name:48} {len(steps):4} steps  median {median(sizes):6.1%}  "
            f"90th percentile {high(sizes):6.1%}  bias {median(errors):+6.1%}"
        )


if __name__ == "__main__":
    main()
