"""The examples run, and the example of a user's loop trains like plain PyTorch."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from steelyard.cli import main
from tests.harness import in_a_hurry

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, costs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with in_a_hurry(costs):
        yield


@pytest.mark.slow
def test_own_loop_trains_as_plain_pytorch_does() -> None:
    example = imported("own_loop")
    losses = example.main(updates=3)

    torch.manual_seed(0)
    model = example.picture_net()
    data = [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    expected = []
    for update in range(3):
        optimizer.zero_grad()
        for part in range(2):
            value = example.loss(model, data[2 * update + part])
            (value / 2).backward()
            expected.append(float(value.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert losses == expected


@pytest.mark.slow
def test_a_transformers_model_is_planned_unmodified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "gpt2.plan.toml"
    script = EXAMPLES / "transformers_gpt2.py"
    assert main(["plan", str(script), "--memory", "60MiB", "-o", str(plan)]) == 0
    assert "fits" in capsys.readouterr().out
    assert plan.exists()


@pytest.mark.slow
@pytest.mark.dist
def test_lenet_in_four_splits_equals_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    imported("lenet_k_devices").main(2)
    out = capfd.readouterr().out
    apart = [float(x) for x in re.findall(r"weights within (\S+) of one device's", out)]
    assert len(apart) == 4
    assert max(apart) < 1e-11
    held = [int(x.replace(",", "")) for x in re.findall(r"at most ([\d,]+) of 61,706", out)]
    assert held[0] == 61_706 > max(held[1:])
    rows = re.findall(r"rank (\d) \|(.*)\|", out)
    assert [rank for rank, _ in rows] == ["0", "1"] * 4
    assert all("#" in row for _, row in rows)
    assert "." in rows[-1][1]
