"""`steelyard plan`: its page, its files, the budget it passes on, and plans that were edited."""

import json
import shlex
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.plan_files.prediction_file import read_plan
from steelyard.plans.budget import Budget, Maximize
from tests.support.sample import PLAN
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of, failure_of


def test_plan_prints_and_writes_the_plan_and_the_next_command(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "train.py", "--memory", "300MiB"]) == 0
    out = capsys.readouterr().out
    assert "memory (peak/rank)  ~487 MiB  ~296 MiB" in out
    assert "next: steelyard run train.py --plan train.plan.toml --steps 100 --checkpoint " in out
    assert arguments_of("load_workload") == {"train": "train.py"}
    assert arguments_of("plan_workload")["budget"] == Budget("300MiB")
    found = read_plan(Path("train.plan.toml"))
    assert found.plan is not None
    assert found.plan.predicted == PLAN.predicted


def test_the_next_command_can_be_typed_as_printed(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "my train.py"]) == 0
    said = capsys.readouterr().out
    (next_line,) = [line for line in said.splitlines() if line.startswith("next: steelyard ")]
    words = shlex.split(next_line.removeprefix("next: steelyard "))
    assert words[:4] == ["run", "my train.py", "--plan", "my train.plan.toml"]
    assert main(words) == 0
    assert "explain 'my train.plan.toml'" in capsys.readouterr().out
    assert "--check 'my train.plan.toml'" in Path("my train.plan.toml").read_text()


def test_every_bound_of_the_budget_reaches_the_search(api: fake_api.Fake) -> None:
    arguments = (
        "plan train.py:small --memory 2GiB --step-time 120ms --communication 1s --computation 2s "
        "--accuracy-loss 0.5% --maximize batch --runner inductor -o other.toml"
    )
    assert main(arguments.split()) == 0
    found = arguments_of("plan_workload")
    assert found["budget"] == Budget("2GiB", "120ms", "1s", "2s", "0.5%")
    assert (found["maximize"], found["runner"]) == (Maximize.BATCH, "inductor")
    assert found["title"] == "train.small"
    check = "#   steelyard plan train.py:small --check other.toml\n"
    assert check in Path("other.toml").read_text()
    main(["plan", "train.py:small", "--check", "other.toml"])
    assert arguments_of("load_planned")["title"] == "train.small"
    assert Path("other.json").exists()


def test_the_cluster_is_this_machine_a_preset_or_a_file(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked_for, devices in (
        ("--ranks 2", 2),
        ("--cluster dgx-h100", 8),
        ("--gpu T4", 1),
        ("", 1),
    ):
        fake_api.CALLS.clear()
        assert main(["plan", "train.py", *asked_for.split()]) == 0
        assert arguments_of("plan_workload")["cluster"].num_devices == devices
    fake_api.CALLS.clear()
    assert main(["plan", "train.py", "--ranks", "2", "--speeds", "1,0.5"]) == 0
    assert arguments_of("plan_workload")["cluster"].speeds == (1, 0.5)
    for wrong in ("--cluster dgx-h100 --gpu T4", "--gpu T5", "--gpu T4 --ranks 2",
                  "--cluster dgx-h100 --ranks 2", "--cluster dgx-h10", "--ranks 2 --speeds 1",
                  "--ranks 2 --speeds fast", "--cluster dgx-h100 --speeds 1,0.5",
                  "--cluster none.toml", "--ranks 0", "--ranks 100000"):  # fmt: skip
        assert main(["plan", "train.py", *wrong.split()]) == 2, wrong
        assert "next: " in capsys.readouterr().err


def test_each_workload_of_a_script_has_a_plan_of_its_own(api: fake_api.Fake) -> None:
    assert main(["plan", "train.py:small"]) == 0
    assert Path("train.small.plan.toml").exists()


def test_plan_with_json_prints_one_document(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "plan train.py --memory 300MiB --json --what-if memory=4GiB --why-not accumulate"
    assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "steelyard.plan/1"
    assert document["what_if"]["budget_bytes"] == 2**32
    assert document["why_not"] == "accumulate is not needed: the budget is met without it"
    assert "printed by the user's script" in captured.err


def test_what_if_and_why_not_are_answered_below_the_plan(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "train.py", "--what-if", "memory=4GiB", "--why-not", "accumulate", "--quiet"])
    out = capsys.readouterr().out
    assert "what if\nplan " in out
    assert "budget: memory <= 4.00 GiB" in out
    assert "why not: accumulate is not needed" in out
    assert "next: steelyard run" not in out


def test_why_not_of_a_checked_plan_uses_the_stored_reasons(
    api: fake_api.Fake, planned: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        fake_api.Planned, "why_not", lambda self, trade: f"{trade}: {self.plan.num_offers} offers"
    )
    assert main(["plan", "train.py", "--check", str(planned), "--why-not", "recompute"]) == 0
    assert PLAN.num_offers > 0
    assert f"recompute: {PLAN.num_offers} offers" in capsys.readouterr().out


def test_a_checked_edit_gets_new_predictions(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = planned.read_text().replace("micro_batches = 2", "micro_batches = 4") + "# mine\n"
    planned.write_text(edited)
    assert main(["explain", str(planned)]) == 0
    out = capsys.readouterr().out
    assert "was edited" in out
    assert "296" not in out
    assert main(["plan", "train.py", "--check", str(planned)]) == 0
    assert planned.read_text() == edited
    assert main(["explain", str(planned)]) == 0
    assert "~296 MiB" in capsys.readouterr().out


def test_a_plan_that_no_longer_fits_says_so_in_its_exit_code(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write_text(planned.read_text().replace("300 MiB", "200 MiB"))
    assert main(["plan", "train.py", "--check", str(planned)]) == 3
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_an_edited_plan_file_is_not_overwritten(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write_text(planned.read_text().replace("nth = 0", "nth = 1"))
    before = planned.read_bytes()
    assert "would be overwritten" in failure_of(capsys, "plan", "train.py", code=2)
    assert planned.read_bytes() == before
    assert main(["plan", "train.py", "-o", "other.plan.toml"]) == 0


@pytest.mark.parametrize("edit", [("nth = 0", "nth = 1"), ("[budget]", "# mine\n[budget]")])
@pytest.mark.parametrize("verb", ["plan train.py --check train.plan.toml", "run train.py"])
def test_an_edited_plan_file_is_not_overwritten_after_use(
    api: fake_api.Fake, planned: Path, verb: str, edit: tuple[str, str]
) -> None:
    assert main(verb.split()) == 0
    assert main(["plan", "train.py"]) == 0
    planned.write_text(planned.read_text().replace(*edit))
    before = planned.read_bytes()
    assert main(verb.split()) == 0
    assert main(["plan", "train.py"]) == 2
    assert planned.read_bytes() == before
    planned.unlink()
    assert main(["plan", "train.py"]) == 0


def test_a_plan_with_damaged_predictions_can_be_checked(api: fake_api.Fake, planned: Path) -> None:
    planned.with_suffix(".json").write_text("{")
    assert main(["plan", "train.py", "--check", "train.plan.toml"]) == 0
    assert read_plan(planned).plan is not None


@pytest.mark.parametrize("command", ["plan train.py", "frontier train.py"])
def test_the_page_has_what_only_the_script_can_tell(
    api: fake_api.Fake, tmp_path: Path, command: str
) -> None:
    page = tmp_path / "page.html"
    assert main([*command.split(), "--html", str(page)]) == 0
    assert arguments_of("detail") == {}
    assert "computed from the script" not in page.read_text("utf-8")


def test_without_a_page_its_details_are_not_computed(api: fake_api.Fake) -> None:
    assert main(["plan", "train.py"]) == 0
    assert "detail" not in {name for name, _ in fake_api.CALLS}
