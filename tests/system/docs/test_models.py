"""The page of models names the whole zoo, and some of its rows are compared with the program."""

import pytest

from tests.system.docs import models
from tests.zoo import CASES, REFUSED, case

PAGE = models.PAGE.read_text(encoding="utf-8")


def row(name: str) -> str:
    (found,) = [line for line in PAGE.splitlines() if f"`{name}`" in line]
    return found


@pytest.mark.parametrize("name", [c.name for c in (*CASES, *REFUSED)])
def test_the_page_has_one_row_for_every_case(name: str) -> None:
    assert row(name), "write the page anew: python -m tests.system.docs.models"


def test_nothing_on_the_page_is_unexplained() -> None:
    assert "not explained yet" not in PAGE
    assert "and should not be" not in PAGE


@pytest.mark.parametrize("name", ["mlp", "edge_tied_module", "edge_gru"])
def test_the_row_shows_the_result_of_the_program(name: str) -> None:
    verdict = models.verdict_on(case(name))
    assert f"| {verdict.state.partition(' ')[0]}" in row(name)
    assert models._cell(verdict.cut) in row(name)


def test_the_row_shows_the_refusal_of_the_program() -> None:
    name = "refused_branch_on_item"
    assert models._cell(models.refusal_of(case(name)).reason) in row(name)


def test_a_case_that_differs_is_not_called_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_difference", lambda eager, ours: "the loss differs")
    verdict = models.verdict_on(case("edge_tied_module"))
    assert verdict.state.startswith("rounding")
    assert "not explained yet" in verdict.reason
