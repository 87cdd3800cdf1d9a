"""`steelyard doctor`: findings and remedies."""

import json

import pytest

from steelyard.cli import main
from tests.unit.cli import fake_api


def test_doctor_lists_problems_and_remedies(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "note  compiler: none\n      install g++" in capsys.readouterr().out
    assert main(["doctor", "--json", "--forget"]) == 0
    assert [a["forget"] for name, a in fake_api.CALLS if name == "doctor"] == [False, True]
    assert json.loads(capsys.readouterr().out)["rows"][1]["verdict"] == "note"
