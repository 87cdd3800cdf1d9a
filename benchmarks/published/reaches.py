"""The achieved fractions of devices, fitted anew, beside those of their presets.

Not for the fit itself: see scoring.py. The presets are in
src/steelyard/hardware/preset/devices.toml.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.published.bert import bert_fit
from benchmarks.published.rows import Row
from benchmarks.published.scoring import figure, fitted, half
from steelyard.hardware.cluster_file import decode_tree
from steelyard.hardware.efficiency import AchievedFraction

# For each device, tables of software that fuses kernels; llm-foundry of 2023 reaches only 70 % of
# an H100.
TABLES = (
    ("A100-SXM4-40GB", ("sc21-1",)),
    ("A100-SXM4-80GB", ("sc21-1",)),
    ("H100-SXM5", ("titan-1", "titan-3")),
)
_OF_BERT = ("V100-SXM2-16GB", "V100-SXM2-32GB")


def fitted_anew(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    found = {device: _of_half([r for r in rows if r.table in names]) for device, names in TABLES}
    share, _, _ = bert_fit()
    return found | dict.fromkeys(_OF_BERT, _figures(AchievedFraction(share=share)))


def said_by_presets(devices: Sequence[str]) -> dict[str, dict[str, float | None]]:
    return {device: _figures(_preset(device)) for device in devices}


def reached_figures(found: dict[str, dict[str, float | None]]) -> Iterator[dict[str, Any]]:
    said = said_by_presets(list(found))
    wrong = [device for device in found if found[device] != said[device]]
    for device in wrong:
        print(f"{device}: the fit is {found[device]}, the preset has {said[device]}")
    yield figure(f"presets that say else than is fitted, of {len(found)}", len(wrong), 0)


def _of_half(table: Sequence[Row]) -> dict[str, float | None]:
    """Fit the figures on half of a table. For their errors on other steps, see presets.py."""
    share, call_seconds = fitted(half(table))
    attention = table[0].stack.attention_share
    return _figures(
        AchievedFraction(share=share, attention_share=attention, call_seconds=call_seconds)
    )


def _figures(reached: AchievedFraction) -> dict[str, float | None]:
    """Return the figures, rounded as in the presets."""
    call = reached.call_seconds
    return {
        "share": round(reached.share, 4),
        "attention_share": round(reached.attention_share, 4),
        "call_seconds": None if call is None else round(call, 9),
    }


def _preset(device: str) -> AchievedFraction:
    tree = decode_tree(f"[scope.one]\nmembers = {{ {device} = 1 }}\n")
    reached = tree.device_of(0).reached
    assert reached is not None, device
    return reached
