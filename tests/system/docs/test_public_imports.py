"""Every import of Steelyard that README, the docs and the examples show works, attributes included.

What a user wrote from them keeps working when files move.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import steelyard
from tests.system.docs.pages import blocks

_ROOT = Path(__file__).resolve().parents[3]
_PAGES = sorted(
    page
    for page in [_ROOT / "README.md", *(_ROOT / "docs").glob("**/*.md")]
    if page.parent.name != "decisions"
)
_EXAMPLES = sorted((_ROOT / "examples").glob("*.py"))


def _sources() -> Iterator[tuple[str, str]]:
    for page in _PAGES:
        for block in blocks(page.read_text("utf-8")):
            if block.language == "python":
                yield f"{page.relative_to(_ROOT)}:{block.first}", block.text
    for example in _EXAMPLES:
        yield str(example.relative_to(_ROOT)), example.read_text("utf-8")


def _shown() -> dict[tuple[str, str], str]:
    """Map each imported (module, name) to the place that shows it first; the name is empty for a
    module alone."""
    found: dict[tuple[str, str], str] = {}
    for where, text in _sources():
        tree = ast.parse(text)
        nicknames = {"steelyard"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.partition(".")[0] == "steelyard":
                        found.setdefault((name.name, ""), where)
                        nicknames.add(name.asname or name.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("steelyard"):
                for name in node.names:
                    found.setdefault((node.module or "", name.name), where)
        for node in ast.walk(tree):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_attribute and node.value.id in nicknames:
                found.setdefault(("steelyard", node.attr), where)
    return found


_SHOWN = _shown()


@pytest.mark.parametrize(("module", "name"), sorted(_SHOWN))
def test_every_import_of_the_docs_works(module: str, name: str) -> None:
    home = import_module(module)
    assert not name or hasattr(home, name), f"{_SHOWN[module, name]}: {module}.{name}"


def test_every_public_name_exists_and_is_documented() -> None:
    shown = {name for module, name in _SHOWN if module == "steelyard"}
    for name in steelyard.__all__:
        assert hasattr(steelyard, name)
    assert shown >= {"plan", "load", "Budget", "Cluster", "Workload"}
