"""What is reached of devices, fitted anew, beside what their presets say of it.

Not for the fit itself: see scoring.py. The presets are in src/steelyard/core/preset/devices.toml.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.published.bert import bert_fit, bert_step_errors
from benchmarks.published.rows import Row, predicted, reaching
from benchmarks.published.scoring import figure, fitted, half
from steelyard.core.cluster_file import decode_tree
from steelyard.core.reached import Reached

# Of each device tables of software that fuses; llm-foundry's of 2023 reaches 70 % of an H100.
_TABLES = (
    ("A100-SXM4-40GB", ("sc21-1",)),
    ("A100-SXM4-80GB", ("sc21-1",)),
    ("H100-SXM5", ("titan-1", "titan-3")),
)
_OF_BERT = ("V100-SXM2-16GB", "V100-SXM2-32GB")


def fitted_anew(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    found = {device: _of_half([r for r in rows if r.table in names]) for device, names in _TABLES}
    share, error, _ = bert_fit()
    # One row says little: the larger of its error and of those of single steps.
    error = max(error, median(bert_step_errors()))
    return found | dict.fromkeys(_OF_BERT, _figures(Reached(share=share, median_error=error)))


def said_by_presets(devices: Sequence[str]) -> dict[str, dict[str, float | None]]:
    return {device: _figures(_preset(device)) for device in devices}


def reached_figures(found: dict[str, dict[str, float | None]]) -> Iterator[dict[str, Any]]:
    said = said_by_presets(list(found))
    wrong = [device for device in found if found[device] != said[device]]
    for device in wrong:
        print(f"of {device} is fitted {found[device]}, its preset says {said[device]}")
    yield figure(f"presets that say else than is fitted, of {len(found)}", len(wrong), 0)


def _of_half(table: Sequence[Row]) -> dict[str, float | None]:
    used = half(table)
    share, call_seconds = fitted(used)
    errors = (
        predicted(row, reaching(row, share, call_seconds)).step_seconds / row.step_seconds - 1
        for row in table
        if row not in used
    )
    return _figures(
        Reached(
            share=share,
            attention_share=table[0].stack.attention_share,
            call_seconds=call_seconds,
            median_error=median(abs(error) for error in errors),
        )
    )


def _figures(reached: Reached) -> dict[str, float | None]:
    """Rounded as presets are written."""
    call = reached.call_seconds
    return {
        "share": round(reached.share, 4),
        "attention_share": round(reached.attention_share, 4),
        "call_seconds": None if call is None else round(call, 9),
        "median_error": round(reached.median_error or 0.0, 3),
    }


def _preset(device: str) -> Reached:
    tree = decode_tree(f"[scope.one]\nmembers = {{ {device} = 1 }}\n")
    reached = tree.device_of(0).reached
    assert reached is not None, device
    return reached
