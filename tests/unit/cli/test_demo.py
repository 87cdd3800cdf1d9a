"""`steelyard demo`: its lines and its receipt."""

import json

import pytest

from steelyard.cli import main
from tests.unit.cli import fake_api


def test_demo_ends_in_a_receipt(api: fake_api.Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plain PyTorch: killed at 300 MiB\nplan ")
    assert main(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "steelyard.receipt/1"
