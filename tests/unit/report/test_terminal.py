"""Output of lines: colour only on a terminal, progress for a person or a log, and failures."""

import io
import os
import pty
import re
import sys
from collections.abc import Callable
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.report.document import tree_of
from steelyard.report.errors import Failure, failure_lines
from steelyard.report.progress import Status, TrainingProgress
from steelyard.report.styled_text import Tone, plain, words
from steelyard.report.terminal import encodable, wants_colour, write
from steelyard.report.text import render
from tests.support.sample import MIB, RECEIPT
from tests.unit.cli.fake_api import Step

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(columns: int, show: Callable[[TextIO], None], *, encoding: str = "utf-8") -> str:
    """Return what ``show`` writes to a terminal of that width, including escapes."""
    reader, writer = pty.openpty()
    os.environ["COLUMNS"], os.environ["LINES"] = str(columns), "24"
    with os.fdopen(writer, "w", encoding=encoding, buffering=1) as stream:
        show(stream)
        stream.flush()
        os.set_blocking(reader, False)
        found = b""
        while True:
            try:
                found += os.read(reader, 65536)
            except BlockingIOError:
                break
    os.close(reader)
    return found.decode(encoding).replace("\r\n", "\n")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_colour_changes_no_character(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = render(tree_of(RECEIPT), width=80)
    coloured = on_a_terminal(80, lambda stream: write(lines, stream))
    assert "\x1b[1;31m" in coloured
    assert "\n".join(l.rstrip() for l in ESCAPE.sub("", coloured).split("\n")) == plain(lines)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_a_terminal(80, lambda stream: write(lines, stream))


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "0"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colour_follows_the_terminal_and_the_environment(
    environ: dict[str, str], wanted: bool
) -> None:
    found: list[bool] = []
    on_a_terminal(80, lambda stream: found.append(wants_colour(stream, environ)))
    assert found == [wanted]
    assert not wants_colour(io.StringIO(), environ)


@settings(deadline=None)
@given(st.text(), st.sampled_from(["ascii", "latin-1", "utf-8", "cp437"]))
def test_unprintable_characters_are_escaped(text: str, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    said = encodable(text, stream)
    assert said.encode(encoding).decode(encoding) == said
    assert said == text or text != text.encode(encoding, "replace").decode(encoding)


# --- progress -------------------------------------------------------------------------------------


def steps(show: TrainingProgress, count: int) -> None:
    with show:
        for step in range(1, count + 1):
            show(
                Step(
                    step=step, steps=count, loss=9 - step / 10, seconds=1.31,
                    peak_bytes=297 * MIB if step == 2 else None, predicted_bytes=296 * MIB,
                )
            )  # fmt: skip


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_bar_fits_its_terminal_and_ends_at_the_last_step(columns: int) -> None:
    text = on_a_terminal(columns, lambda stream: steps(TrainingProgress(stream), 7))
    last = ESCAPE.sub("", text).replace("\r", "\n").rstrip().split("\n")[-1]
    assert last.startswith("7/7")
    assert "loss 8.3000" in last
    assert all(len(l) <= columns for l in ESCAPE.sub("", text).replace("\r", "\n").split("\n"))
    if columns >= 80:
        assert "peak 297 MiB (~296 MiB)" in last


def test_a_bar_on_a_terminal_without_unicode_is_plain() -> None:
    text = on_a_terminal(80, lambda stream: steps(TrainingProgress(stream), 3), encoding="ascii")
    assert "3/3" in text


def test_a_log_gets_notes_without_step_lines() -> None:
    out = io.StringIO()
    show = TrainingProgress(out)
    steps(show, 50)
    show.note("no room \x1b[2J")
    assert out.getvalue() == "note: no room \\x1b[2J\n"
    assert show.last is not None
    assert show.last.step == 50


def test_a_log_gets_each_activity_once_and_none_if_quiet() -> None:
    out = io.StringIO()
    with Status(out) as tell:
        for doing in (
            "capturing \x1b[2J",
            "searching",
            "searching, best 3 s",
            "searching, best 2 s",
        ):
            tell(doing)
    assert out.getvalue() == "   0 s  capturing \\x1b[2J\n   0 s  searching\n"
    with Status(silent := io.StringIO(), quiet=True) as tell:
        tell("capturing")
    assert silent.getvalue() == ""


def test_a_terminal_shows_the_current_activity() -> None:
    def show(stream: TextIO) -> None:
        with Status(stream) as tell:
            tell("capturing \x1b[2J")

    text = on_a_terminal(40, show)
    assert "capturing \\x1b[2J" in text or "capturing" not in text
    assert "\x1b[2J" not in text


# --- failures -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=3000), st.text(max_size=3000), st.text(max_size=300), st.integers(40, 120))
def test_a_failure_is_twelve_lines_and_keeps_its_remedy(
    happened: str, expected: str, remedy: str, width: int
) -> None:
    failure = Failure.of(BadInput(happened, expected=expected, remedy=f"{remedy} END"))
    lines = plain(failure_lines(failure, width=width)).splitlines()
    assert len(lines) <= 12
    assert all(len(line) <= width for line in lines)
    assert lines[-1].endswith("END")


def test_wrapped_text_keeps_its_style_and_lines() -> None:
    lines = words("one\ntwo", width=40, tone=Tone.BAD)
    assert [text for line in lines for text, tone in line if tone is Tone.BAD] == ["one", "two"]


def test_nothing_here_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    write(words("hello", width=40), sys.stdout)
    assert capsys.readouterr().out == "hello\n"
