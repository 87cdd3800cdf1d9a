"""Every code block of the README and of docs/ does what the page says."""

import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import steelyard as sy
from steelyard import api
from steelyard.api.planned import planned
from steelyard.planner.cost_provider import Progress
from steelyard.planner.planner import Planner
from steelyard.planner.session import PlanningSession, PlanRequest, Runner
from tests.harness import in_a_hurry
from tests.system.docs import pages

ROOT = pages.ROOT
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
# test_new_trade.py runs this page, because it changes the package.
NEW_TRADE = "docs/extend/a-new-trade.md"
LOOPS = "docs/loops.md"
WITH_CODE = [
    p for p in PAGES if p != NEW_TRADE and any(pages.blocks((ROOT / p).read_text(encoding="utf-8")))
]


_PLAN_WORKLOAD = api.plan_workload
# Maps each script and cluster on these pages to its planning session.
_LOOKS: dict[tuple[str, ...], PlanningSession] = {}


def _planned_once(
    workload: sy.Workload,
    *,
    budget: sy.Budget,
    title: str,
    cluster: sy.Cluster | None = None,
    runner: Runner = "python",
    on_progress: Progress,
    **wishes: Any,
) -> sy.Planned:
    """Plan like ``plan_workload``, but reuse the captured and searched step for other budgets,
    because pages plan one script many times."""
    cluster = cluster or sy.Cluster.here()
    if any(wishes.values()) or not cluster.is_here:
        return _PLAN_WORKLOAD(
            workload, budget=budget, title=title, cluster=cluster, runner=runner,
            on_progress=on_progress, **wishes,
        )  # fmt: skip
    script = inspect.getsource(inspect.getmodule(workload.loss) or inspect)
    key = script, str(cluster), runner, title
    if key not in _LOOKS:
        _LOOKS[key] = PlanRequest(
            model=workload.model, loss=workload.loss, batch=workload.first_batch(),
            optimizer=workload.optimizer, cluster=cluster, budget=budget,
            runner=runner, title=title, on_progress=on_progress,
        ).capture_and_price()  # fmt: skip
    return planned(Planner(_LOOKS[key]), budget)


def _in_one_worker(name: str) -> Any:
    """Keep pages that plan the quickstart's script on one worker, so that they share its costs."""
    marks = []
    if "steelyard plan train.py" in _text(name):
        marks.append(pytest.mark.xdist_group("train.py"))
    if name == LOOPS:
        # Other libraries warn about one another, and about few workers and small batches.
        marks.append(pytest.mark.filterwarnings("ignore"))
    return pytest.param(name, marks=marks)


@pytest.fixture
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Use the same folder for all pages, because source lines are relative to it."""
    folder = tmp_path_factory.getbasetemp() / "page"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", [_in_one_worker(name) for name in WITH_CODE])
def test_commands_and_code_of_the_page_work(
    name: str,
    costs: Path,
    empty_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(empty_folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a Python prompt
    pages.set_the_table()
    monkeypatch.setattr(api, "plan_workload", _planned_once)
    text = _text(name)
    fences = re.findall(r"^```", text, re.MULTILINE)
    # The check compares the form, not the figures. But the figures decide which plan is made, and
    # another process that takes half of a core can change it. So the costs are measured a second
    # time.
    try:
        shown = _shown(text, costs)
    except AssertionError:
        _LOOKS.clear()
        for left in empty_folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        pages.set_the_table()
        shown = _shown(text, tmp_path / "costs.sqlite")
    assert shown == len(fences) // 2


def _shown(text: str, costs: Path) -> int:
    with in_a_hurry(costs):
        return pages.Session().read(text)


# --- the checker itself can fail ------------------------------------------------------------------


def test_blocks_are_found_with_their_lines() -> None:
    (block,) = pages.blocks("a\n```python\nx = 1\ny = 2\n```\nb\n")
    assert (block.language, block.text, block.first, block.last) == (
        "python",
        "x = 1\ny = 2\n",
        2,
        4,
    )


def read(page: str) -> pages.Session:
    session = pages.Session()
    session.read(page)
    return session


def test_names_are_shared_by_the_blocks_of_a_page() -> None:
    page = "```python\nx = 1\n```\n```python\nprint('x  is', x)\n```\n```text\nx  is 2\n```\n"
    assert read(page).said() == "x  is 1\n"


@pytest.mark.parametrize(
    "page",
    [
        "```python\nraise KeyError\n```\n",
        "```python\nprint('memory (peak/rank) 2 MiB')\n```\n```text\nmemory (peak/rank) 3 MiB\n```",
        "```python\nprint('taken')\n```\n```text\nrefused\n```\n",
        "```text\nnothing was printed\n```\n",
        "```python\nprint('{\"a\": 1}')\n```\n```json\n{\"b\": 1}\n```\n",
        "```sh\nrm -rf /\n```\n",
        "```sh\nscripts/absent\n```\n",
        "```sh\nsteelyard explain absent.plan.toml\n```\n",
        "```c\nint x;\n```\n",
        "```python\nx = 1\n```\n```diff\n-x = 2\n+x = 3\n```\n",
        "```python\nx = 1\n```\n```diff\n" + "+x = 2\n" * 6 + "```\n",
        "```python\nx = 1\n```\n```diff\n+raise KeyError\n```\n",
    ],
)  # fmt: skip
def test_wrong_output_on_a_page_is_detected(page: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        read(page)


def test_a_block_that_is_written_anew_ends_where_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "```python\nprint('a 1\\nb 2\\nc 3')\n```\n```text\n{}\n```\nend\n"
    assert pages.rewritten(page.format("a 0\n...")) == page.format("a 1\n...")
    assert pages.rewritten(page.format("a 0")) == page.format("a 1\nb 2\nc 3")
    assert pages.rewritten(page.format("...\nc 0")) == page.format("...\nc 0")


def test_a_diff_changes_the_code_before_it_which_is_then_run() -> None:
    page = (
        "```python\nx = 1\nx += 1\nprint(x, 'is x')\n```\n"
        "```diff\n x = 1\n-x += 1\n+x += 2\n```\n```text\n3 is x\n```\n"
    )
    assert read(page).said() == "3 is x\n"


def test_an_exit_code_that_is_promised_is_no_failure() -> None:
    session = read("```sh\nsteelyard explain absent.plan.toml   # exit code 2\n```\n")
    assert "absent.plan.toml" in session.said()


def test_the_form_leaves_figures_out() -> None:
    shown = "plan 7f3c  train\ncomputation  ~1.2 s\nnote  x\ntaken (3 of 4)\n  recompute  a\n"
    real = "plan 0000  train\ncomputation  ~300 ms\ntaken (1 of 9)\n"
    assert pages.form(shown) == pages.form(real) == ("plan #", "computation", "taken")
    assert pages.matches(("plan #", "..."), pages.form(real))
    assert not pages.matches(("plan #",), pages.form(real))
