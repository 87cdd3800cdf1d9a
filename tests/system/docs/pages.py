"""Runs the code blocks of a page as a reader would, from top to bottom, in an empty folder.

    python -m tests.system.docs.pages README.md  # put what the page's code now prints into the page

    ```python    is executed; all of a page share their names. One that begins with `# train.py`
                 is saved under that name instead.
    ```sh        a line that begins with `steelyard` runs in this process and must end with 0, or
                 as its comment `# exit code 3` says; `torchrun` runs, too. Other lines are ways to
                 set up: see SET_UP.
    ```diff      a change of the code before it, of at most five lines. The changed code is executed
                 or saved, as that code was.
    ```text      what the block before it prints, compared by its form: see form().
    ```toml      tables that the plan file of the page has, with these keys. One that begins with
                 `# cluster.toml` is saved under that name instead.
    ```json      keys that the JSON printed before it has.
    ```          a drawing, which is not checked.

Every page finds the train.py of docs/quickstart.md and the config.json of a model in its folder.
Not for deciding which pages there are: see test_pages.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from steelyard.cli import main as steelyard

ROOT = Path(__file__).resolve().parents[3]
# Shell lines that set something up. They are not run; the test checks that their files exist.
SET_UP = re.compile(
    r"scripts/(?P<script>\w+)( .*)?"
    r"|python3? -m venv \.venv|\. \.venv/bin/activate"
    r"|pip install (-e )?'?\.?(\[test\])?'?( -c constraints\.txt)?"
    r"|cd \w+|git clone .*|(python|pytest) (?P<file>[\w/.-]+\.py).*"
    r"|python -m (?P<module>tests\.system\.docs\.\w+).*"
)
_CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_key_value_heads": 4,
}  # fmt: skip
_LANGUAGES = ("python", "diff", "sh", "text", "toml", "json", "")
_CHANGED_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``first`` and ``last`` are the lines of the page between the fences, counted from 0."""

    language: str
    text: str
    first: int
    last: int


def blocks(page: str) -> Iterator[Block]:
    lines = page.splitlines()
    begin: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begin is None:
            begin = number
            continue
        yield Block(
            language=lines[begin].removeprefix("```").strip(),
            text="\n".join(lines[begin + 1 : number]) + "\n",
            first=begin + 1,
            last=number,
        )
        begin = None
    assert begin is None, f"the fence in line {(begin or 0) + 1} is never closed"


@dataclass(slots=True, kw_only=True)
class Session:
    """A reader of one page, in the current folder."""

    # The module can be imported by its name, because Dynamo looks up the globals of a function
    # there.
    module: ModuleType = field(default_factory=lambda: ModuleType("page"))
    printed: str = ""
    complained: str = ""
    code: str = ""

    def read(self, page: str) -> int:
        """Read the page; return how many blocks were executed or compared."""
        found = list(blocks(page))
        for block in found:
            try:
                self.take(block)
            except BaseException as error:
                error.add_note(f"in the block that begins in line {block.first + 1}")
                raise
        return len(found)

    def take(self, block: Block) -> None:
        """Execute the block, or compare its text with what was printed."""
        assert block.language in _LANGUAGES, f"a block in {block.language!r} is not checked"
        if block.language in ("python", "diff", "sh"):
            self.printed = self.complained = ""
        if block.language:
            getattr(self, f"_{block.language}")(block)

    def said(self) -> str:
        """Return the output of the previous block, or its errors if it printed nothing."""
        return self.printed or self.complained

    def _diff(self, block: Block) -> None:
        self._python(replace(block, text=changed(self.code, block.text)))

    def _python(self, block: Block) -> None:
        self.code = block.text
        if save(block):
            return
        # Blank lines give the code its line numbers of the page, for tracebacks.
        code = compile("\n" * block.first + block.text, "<page>", "exec")
        sys.modules["page"] = self.module
        with self._heard():
            exec(code, vars(self.module))

    def _sh(self, block: Block) -> None:
        for line in block.text.replace("\\\n", " ").splitlines():
            command, _, comment = line.partition("#")
            words = shlex.split(command)
            if not words:
                continue
            if words == ["steelyard", "demo"]:
                continue  # takes minutes; tests/system/demo/test_demo.py runs a smaller one
            if words[0] == "torchrun":
                launch = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
                done = subprocess.run(launch, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr[-3000:]
                self.printed += done.stdout
            elif words[0] == "steelyard":
                with self._heard():
                    code = steelyard(words[1:])
                wanted = re.search(r"exit code (\d+)", comment)
                assert code == int(wanted[1] if wanted else 0), (line, code, self.complained)
            else:
                _check_set_up(command.strip())

    def _text(self, block: Block) -> None:
        said = self.said()
        assert said, "nothing was printed before this block"
        assert matches(form(block.text), form(said)), f"{form(block.text)}\nis not\n{form(said)}"
        _compare_memory(block.text, said)

    def _toml(self, block: Block) -> None:
        if save(block):
            return
        (file,) = Path().glob("*.plan.toml")
        _compare_keys(tomllib.loads(block.text), tomllib.loads(file.read_text()), "")

    def _json(self, block: Block) -> None:
        _compare_keys(json.loads(block.text), json.loads(self.said()), "")

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            self.printed += out.getvalue()
            self.complained += err.getvalue()


def changed(code: str, diff: str) -> str:
    """Return the code after the diff, whose lines are found in this order."""
    old, new = code.splitlines(), list[str]()
    signs = [line[:1] for line in diff.splitlines()]
    for sign in "+-":
        assert signs.count(sign) <= _CHANGED_LINES, f"more than {_CHANGED_LINES} lines with {sign}"
    for line in diff.splitlines():
        sign, text = line[:1], line[1:]
        if sign == "+":
            new.append(text)
            continue
        assert sign in ("-", " ", ""), f"{line!r} is no line of a diff"
        assert text in old, f"{text!r} is not in the code from here on"
        at = old.index(text)
        new += old[: at + (sign != "-")]
        old = old[at + 1 :]
    return "\n".join([*new, *old]) + "\n"


def save(block: Block) -> bool:
    """Save a block that begins with the name of a file as that file."""
    named = re.match(r"# (\w+\.(py|toml))\n", block.text)
    if named:
        Path(named[1]).write_text(block.text, encoding="utf-8")
    return named is not None


def set_the_table() -> None:
    """Write the script of the quickstart, and the configuration of a small Llama."""
    Path("config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    for block in blocks((ROOT / "docs/quickstart.md").read_text(encoding="utf-8")):
        if block.language == "python":
            save(block)


def _check_set_up(command: str) -> None:
    known = SET_UP.fullmatch(command)
    assert known, f"nobody checks the shell line {command!r}"
    named = known.groupdict()
    for path in (
        named["script"] and f"scripts/{named['script']}",
        named["file"],
        named["module"] and named["module"].replace(".", "/") + ".py",
    ):
        assert path is None or (ROOT / path).is_file(), f"{path} is not there"


def _compare_keys(shown: Any, real: Any, where: str) -> None:
    """Check that every shown key exists; of lists, only the first entries are compared."""
    if isinstance(shown, dict):
        assert isinstance(real, dict), where
        for key, value in shown.items():
            assert key in real, f"there is no {where}.{key}"
            _compare_keys(value, real[key], f"{where}.{key}")
    elif isinstance(shown, list) and shown and isinstance(real, list) and real:
        _compare_keys(shown[0], real[0], f"{where}[0]")
    else:
        # The page may show an integer where the program prints 1.5, and null where it prints a
        # number.
        kinds = (int, float) if isinstance(shown, int | float) else type(shown)
        assert shown is None or real is None or isinstance(real, kinds), f"{where}: {real!r}"


# --- the form of printed output -------------------------------------------------------------------

# Lines that appear or not, depending on the measurement.
_SOMETIMES = (
    *("note", "next cent", "reasons"),
    *(
        "* #",
        "* this plan; FLOPs relative to the graph without trades",
    ),  # if it is on the curve
)


def form(text: str) -> tuple[str, ...]:
    """Return the head of each line that does not begin with a blank, without its figures."""
    heads: list[str] = []
    for line in text.splitlines():
        if not line or line[0] == " ":
            continue
        head = re.split(r"\s{2,}|[:(]", line)[0].strip()
        head = re.sub(r"\bplan [0-9a-f]{4}\b", "plan #", head)
        head = re.sub(r"~?[+-]?\d[\d.,]*( ([KMGT]iB|B|[mun]?s|h|%))?", "#", head)
        if head not in _SOMETIMES and heads[-1:] != [head]:
            heads.append(head)
    return tuple(heads)


def matches(shown: tuple[str, ...], real: tuple[str, ...]) -> bool:
    """Return whether the lines match; ``...`` stands for any lines that are left out."""
    if not shown:
        return not real
    if shown[0] == "...":
        return any(matches(shown[1:], real[i:]) for i in range(len(real) + 1))
    return bool(real) and shown[0] == real[0] and matches(shown[1:], real[1:])


def _compare_memory(shown: str, real: str) -> None:
    """Compare eager's memory, which is counted and not timed: it is equal everywhere within a
    few hundredths. The memory that a plan leaves unused depends on measured times."""
    for left, right in zip(_memory(shown), _memory(real), strict=False):
        assert abs(left - right) <= 0.05 * right, f"{left} bytes are shown, {right} were printed"


def _memory(text: str) -> list[float]:
    from steelyard.units import parse_bytes

    rows = [line for line in text.splitlines() if line.startswith("memory (peak/rank)")]
    return [
        parse_bytes(f"{n}{u}") for row in rows for n, u in re.findall(r"([\d.]+) (\wiB)", row)[:1]
    ]


# --- writing the pages ----------------------------------------------------------------------------


def rewritten(page: str) -> str:
    """Return the page with the present output of its code.

    A block that ends in ``...`` keeps its number of lines; a block that leaves out something else
    stays as it is.
    """
    set_the_table()
    session = Session()
    lines = page.splitlines()
    shift = 0
    for block in blocks(page):
        shown = block.text.splitlines()
        if block.language == "text" and "..." not in shown[:-1]:
            new = session.said().rstrip("\n").splitlines()
            if shown[-1:] == ["..."]:
                new[len(shown) - 1 :] = ["..."]
            lines[block.first + shift : block.last + shift] = new
            shift += len(new) - (block.last - block.first)
        else:
            session.take(block)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            fresh = rewritten(path.read_text(encoding="utf-8"))
        path.write_text(fresh, encoding="utf-8")
