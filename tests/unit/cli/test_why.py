"""`steelyard why`: the tensors that fill the device, also if no plan fits."""

import json
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.errors import Infeasible
from steelyard.plans.budget import Budget
from tests.support.sample import MIB
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of, failure_of


def test_why_plans_for_the_memory_that_was_too_small(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "train.py", "--memory", "300MiB"]) == 0
    assert arguments_of("plan_workload")["budget"] == Budget("300MiB")
    out = capsys.readouterr().out
    assert "plain PyTorch needs ~487 MiB of 300 MiB: it runs out of memory" in out
    assert "blocks.*.mlp gpt.py:41" in out
    assert out.splitlines()[-1] == "next: steelyard plan train.py --memory 300MiB"
    assert not Path("train.plan.toml").exists()


def test_why_compares_with_a_plan_file(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "train.py", "--plan", str(planned), "--json"]) == 0
    assert "plan_workload" not in {name for name, _ in fake_api.CALLS}
    document = json.loads(capsys.readouterr().out)
    assert document["budget_bytes"] == 300 * MIB
    assert document["plan"]["nbytes"] == 296 * MIB


def test_if_no_plan_fits_the_tensors_are_named_all_the_same(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome() -> None:
        name, asked = fake_api.CALLS[-1]
        if name == "plan_workload" and asked["budget"] != Budget():
            raise Infeasible("nothing fits 3 MiB", expected="171 MiB", remedy="--memory 171MiB")

    api.outcome = outcome
    assert main(["why", "train.py", "--memory", "3MiB"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing fits 3 MiB" in out
    assert "of 3.00 MiB: it runs out of memory" in out
    assert "blocks.*.mlp gpt.py:41" in out
    assert out.endswith("next: --memory 171MiB")


def test_why_writes_the_page(api: fake_api.Fake, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["why", "train.py", "--html", str(page), "--quiet"]) == 0
    assert '"alive":[[' in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("none.py", "does not exist"),
        ("train.py --plan none.plan.toml", "none.plan.toml does not exist"),
        ("train.py --plan train.plan.toml --memory 1GiB", "were given together"),
        ("train.py --html train.py", "would overwrite an input file"),
        ("train.py --html no/x.html", "cannot be written"),
        ("train.py --memory 2gigs", "gigs"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert said in failure_of(capsys, "why", *arguments.split(), code=2)
    assert "load_workload" not in {name for name, _ in fake_api.CALLS}
