"""The picture in README is drawn from a measured step, and its figures are those of README."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from steelyard.units import parse_bytes
from tests.harness import in_a_hurry
from tests.system.docs import picture

_SVG = "{http://www.w3.org/2000/svg}"
_PAGE = """
```python
import torch
from torch import nn

import steelyard as sy

torch.manual_seed(0)
parts = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())]
model, batch = nn.Sequential(*parts), torch.randn(4096, 64)


def loss(model, batch):
    return model(batch).square().mean()


plan = sy.plan(model, loss, batch, optimizer=torch.optim.AdamW, budget=sy.Budget(memory="6 MiB"))
step = plan.apply(model)
for _ in range(2):
    step(batch)
```
"""


def _texts(drawing: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(drawing).iter(f"{_SVG}text")]


@pytest.mark.slow
def test_the_curves_are_measured(
    costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with in_a_hurry(costs):
        before, after, budget = picture.measure(_PAGE)
    assert budget == 6 << 20
    assert after.peak_bytes <= budget < before.peak_bytes
    for curve in (before, after):
        assert curve.peak_bytes == pytest.approx(curve.predicted_peak_bytes, rel=0.02)
    # Both begin with weights, optimizer state and batch, and end with the gradients in addition;
    # the plan's step also keeps its loss.
    assert before.levels[0] == after.levels[0]
    assert 0 <= after.levels[-1][1] - before.levels[-1][1] <= 8
    assert before.levels[-1][1] > before.levels[0][1]
    assert "budget 6.00 MiB" in _texts(picture.draw(before, after, budget))


def test_the_drawing_shows_the_peaks_and_the_budget() -> None:
    mib = 1 << 20
    before = picture.Curve(
        levels=((0.0, mib), (0.5, 30 * mib), (1.0, mib)), predicted_peak_bytes=29 * mib
    )
    after = picture.Curve(
        levels=((0.0, mib), (0.5, 10 * mib), (1.2, mib)), predicted_peak_bytes=10 * mib
    )
    texts = _texts(picture.draw(before, after, 12 * mib))
    assert "plain PyTorch: peak 30.0 MiB (predicted ~29.0 MiB)" in texts
    assert "with the plan: peak 10.0 MiB (predicted ~10.0 MiB)" in texts
    assert {"budget 12.0 MiB", "memory", "0 s", "1.20 s"} <= {*texts}


def test_the_picture_in_the_readme_is_of_its_example() -> None:
    drawing = picture.PICTURE.read_text(encoding="utf-8")
    page = picture.README.read_text(encoding="utf-8")
    (shown,) = (text for text in _texts(drawing) if text.startswith("budget "))
    (budget,) = re.findall(r'budget=sy\.Budget\(memory="(.*?)"\)', page)
    assert parse_bytes(shown.removeprefix("budget ")) == parse_bytes(budget)
    (alternative,) = re.findall(r"!\[([^]]*)\]\(docs/images/memory\.svg\)", page)
    (peak,) = re.findall(r"plain PyTorch: peak (.*?) \(", " ".join(_texts(drawing)))
    assert f"a peak of {peak}" in alternative
    assert picture.PICTURE.relative_to(picture.README.parent).as_posix() in page
    assert picture.COMMAND in page
    assert picture.COMMAND in drawing
