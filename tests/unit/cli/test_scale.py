"""`steelyard scale`: ranges of devices and lengths of a training."""

import json

import pytest

from steelyard.cli import main
from steelyard.plans.budget import Budget
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of


def test_scale_passes_on_devices_and_training_length(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["scale", "train.py", "--cluster", "dgx-h100", "--devices", "2..8"]
    assert main([*command, "--tokens", "1.5B", "--memory", "40GiB"]) == 0
    found = arguments_of("scale_workload")
    assert (found["fewest"], found["most"], found["tokens"]) == (2, 8, 1_500_000_000)
    assert found["budget"] == Budget(memory="40GiB")
    assert found["cluster"].num_devices == 8
    assert "16  d16 z1  ~500 ms" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["same_batch"]["usd"] == 64


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--devices", "2-8"], "--devices 2-8 is not a range"),
        (["--devices", "2..8", "--tokens", "1B", "--samples", "9"], "both give the length"),
        (["--devices", "2..8", "--tokens", "many"], "tokens"),
    ],
)
def test_scale_refuses_invalid_ranges_and_lengths(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(["scale", "train.py", "--cluster", "dgx-h100", *more]) == 2
    assert said in capsys.readouterr().err


def test_scale_over_more_devices_than_there_are_is_refused_before_the_script_is_loaded(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "train.py", "--cluster", "dgx-h100", "--devices", "1..9"]) == 2
    assert "devices 1..9 are not in a cluster of 8" in capsys.readouterr().err
    assert not fake_api.CALLS
