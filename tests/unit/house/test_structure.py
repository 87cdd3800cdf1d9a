"""The shape of the source tree: imports have one direction, and each folder is small."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

from steelyard.trades import BY_NAME

WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()
ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "steelyard"
MOST_FILES = 20

GRAPH = grimp.build_graph("steelyard", cache_dir=None)


def test_there_are_no_import_circles() -> None:
    """Imports inside functions and under TYPE_CHECKING count too.

    The public names in ``steelyard`` are left out: they are loaded when first used, and the
    demonstration's model imports them as a user's would.
    """
    modules = GRAPH.modules - {"steelyard"}
    rest = {module: set(GRAPH.find_modules_directly_imported_by(module)) for module in modules}
    # A module that imports none of the remaining modules is in no circle; each module that remains
    # is in one, or leads to one.
    while free := [module for module, imports in rest.items() if not imports & rest.keys()]:
        for module in free:
            del rest[module]
    assert not rest, f"imports that lead back to where they began, among: {sorted(rest)}"


def test_no_folder_has_more_than_20_files() -> None:
    folders = [folder for folder in SOURCE.rglob("*") if folder.is_dir()]
    sizes = {folder.relative_to(SOURCE): len([*folder.glob("*.py")]) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_no_class_name_stands_for_two_things() -> None:
    files: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_modules_are_named_by_words_of_the_field() -> None:
    """A new word goes into words.txt, where people review it."""
    names = {part for path in SOURCE.rglob("*.py") for part in path.relative_to(SOURCE).parts}
    words = {word for name in names for word in name.removesuffix(".py").split("_") if word}
    assert sorted(words - {*WORDS}) == []
    assert sorted({*WORDS} - words) == [], "words that no module has any more"


def test_the_name_of_a_trade_appears_in_its_file_only() -> None:
    """Others know the kind of its rules. Names of one word are only found as whole strings."""
    in_text = "|".join(rf"\b{name}\b" for name in BY_NAME if "_" in name)
    tables = "|".join(rf"\[\[{name}\]\]" for name in BY_NAME)
    pattern = re.compile(f"{in_text}|{tables}")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value[:60]}"
        for path in sorted(SOURCE.rglob("*.py"))
        if "trades" not in path.parts
        for node in _strings(ast.parse(path.read_text(encoding="utf-8")))
        if node.value in BY_NAME or pattern.search(node.value)
    ]
    assert found == []


def _strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The texts of a file, without its docstrings."""
    docs = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node


def test_docstrings_open_with_a_subject_or_a_verb() -> None:
    """They do not read like an index entry: a noun or a verb comes first."""
    openers = re.compile(r"(What|Of|Whether|Where|From which|Which|How much|How many)\b")
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0][:60]}"
        for path in sorted([*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if (text := ast.get_docstring(node) or "") and openers.match(text)
    ]
    assert found == []


def test_the_drawing_of_the_architecture_is_what_the_import_linter_holds() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.partition("```\n")[2].partition("```")[0].splitlines()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["id"] == "layers"
    )
    names = [re.split(r"\s{2,}", line)[0] for line in drawn]
    assert names == [layer for layer in layers if layer != "__main__"]


def test_the_files_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+/(?:[a-z_]+\.py)?)`", page)
    assert len(named) >= 8
    assert [name for name in named if not (SOURCE / name).exists() and name[:4] != "src/"] == []
