"""Memory of each rank in the receipt: all ranks if they are few, otherwise the worst and a
range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.plans.receipt import RankMemory, Receipt
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.json import to_json
from steelyard.report.rank_memory import lines_of
from steelyard.report.styled_text import plain
from steelyard.report.text import render
from tests.support.sample import MEASURED, MIB, PLAN
from tests.unit.report.test_html import Page


def rank(number: int, measured: float | None = 10, predicted: float = 10) -> RankMemory:
    return RankMemory(
        rank=number,
        predicted_bytes=int(predicted * MIB),
        measured_bytes=None if measured is None else int(measured * MIB),
    )


FEW = (rank(0), rank(1, 11), rank(2, None))
MANY = tuple(rank(n, {5: 8, 70: 13, 99: 11}.get(n, 10 + n / 1000)) for n in range(128))


def test_each_of_few_ranks_has_a_line() -> None:
    assert lines_of(FEW) == (
        "rank 0 measured 10.0 MiB, predicted ~10.0 MiB, +0.0 %",
        "rank 1 measured 11.0 MiB, predicted ~10.0 MiB, +10.0 %",
        "rank 2 not measured, predicted ~10.0 MiB",
    )
    assert lines_of(()) == ()


def test_the_worst_of_many_ranks_have_lines_and_the_others_one() -> None:
    *worst, rest = lines_of(MANY)
    assert [line.split(" measured")[0] for line in worst] == ["rank 5", "rank 70", "rank 99"]
    said = "125 more ranks measured 10.0 MiB to 10.1 MiB, predicted ~10.0 MiB, +0.0 % to +1.3 %"
    assert rest == said
    unknown = tuple(rank(n, None) for n in range(9))
    assert lines_of(unknown)[-1] == "6 more ranks not measured, predicted ~10.0 MiB"


@pytest.mark.parametrize("ranks", [FEW, MANY])
def test_text_page_and_json_have_them(ranks: tuple[RankMemory, ...]) -> None:
    tree = tree_of(Receipt(plan=PLAN, measured=replace(MEASURED, ranks=ranks)))
    text, page = plain(render(tree)), to_html(tree)
    assert all(line in text.replace("\n            ", " ") for line in lines_of(ranks))
    assert text.count("rank memory") == 1
    assert "Memory of each rank" in Page(page).text
    assert page.count('<th scope="row">rank ') == 3
    assert ("125 more ranks" in page) == (ranks is MANY)
    found = to_json(tree)["ranks"]
    assert len(found) == len(ranks)
    assert found[1] == {
        "rank": 1, "predicted_bytes": 10 * MIB, "measured_bytes": ranks[1].measured_bytes,
        "miss": ranks[1].miss,
    }  # fmt: skip


def test_one_device_has_no_such_lines() -> None:
    tree = tree_of(Receipt(plan=PLAN, measured=MEASURED))
    assert "rank memory" not in plain(render(tree))
    assert "Memory of each rank" not in to_html(tree)
    assert to_json(tree)["ranks"] == []
