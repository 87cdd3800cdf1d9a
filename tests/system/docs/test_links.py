"""No link or anchor of README and docs/ is broken, and every page can be reached."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from steelyard.trades import BY_NAME
from tests.system.docs import links


def test_every_link_and_anchor_leads_somewhere_and_every_page_is_reached() -> None:
    assert list(links.problems(links.ROOT)) == []


def test_the_navigation_of_the_site_has_every_page() -> None:
    """``scripts/docs`` refuses a page without a place; this says so without Sphinx."""
    settings = ast.parse((links.ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
    tables = [
        ast.literal_eval(node.value)
        for node in settings.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("NAVIGATION", "BELOW")
    ]
    assert len(tables) == 2
    placed = [page for table in tables for pages in table.values() for page in pages]
    names = {page.removesuffix(".md") for page in links.page_names(links.ROOT)} - {"README"}
    assert [n for n in sorted(names) if not any(fnmatch(n, pattern) for pattern in placed)] == []
    assert [page for page in placed if "*" not in page and page not in names] == []


def test_the_readme_lists_every_trade_with_its_page_and_their_number() -> None:
    text = (links.ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^There are (\d+) trades:\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert sorted(re.findall(r"\[(\w+)\]\(docs/trades/\1\.md\)", listed[1])) == sorted(BY_NAME)
    assert int(listed[0]) == len(BY_NAME)


_README = "# A\n[to b](docs/b.md#two-words) [here](#a) [out](https://example.org/x#y)\n"
_B = "# B\n## Two words\n## Two words\n[up](../README.md) ![p](p.svg) [twice](#two-words-1)\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(_README)
    (tmp_path / "docs" / "b.md").write_text(_B)
    (tmp_path / "docs" / "p.svg").write_text("<svg/>")
    return tmp_path


def test_a_sound_site_has_no_problems(site: Path) -> None:
    assert list(links.problems(site)) == []


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("[x](absent.md)", "README.md:4: absent.md: there is no such file"),
        ("![x](docs/none.svg)", "README.md:4: docs/none.svg: there is no such file"),
        ('<img src="docs/none.svg">', "README.md:4: docs/none.svg: there is no such file"),
        ("[x](docs/b.md#three)", "README.md:4: docs/b.md#three: docs/b.md has no such heading"),
        ("[x](docs/b.md#two-words-2)", "docs/b.md has no such heading"),
        ("[x](#b)", "README.md:4: #b: README.md has no such heading"),
        ("[x][y]\n\n[y]: absent.md", "README.md:4: absent.md: there is no such file"),
        ("[x](docs/p.svg#y)", "README.md:4: docs/p.svg#y: only pages have anchors"),
    ],
)
def test_a_broken_link_is_found(site: Path, added: str, expected: str) -> None:
    (site / "README.md").write_text(f"{_README}\n{added}\n")
    (problem,) = links.problems(site)
    assert problem.endswith(expected)


def test_a_page_that_only_unreached_pages_link_is_found(site: Path) -> None:
    (site / "docs" / "c.md").write_text("[d](d.md)\n")
    (site / "docs" / "d.md").write_text("[c](c.md)\n")
    assert [line.partition(":")[0] for line in links.problems(site)] == ["docs/c.md", "docs/d.md"]


def test_code_is_not_searched_for_links(site: Path) -> None:
    (site / "README.md").write_text(_README + "`[x](absent.md)`\n\n```\n[x](absent.md)\n```\n")
    assert list(links.problems(site)) == []
