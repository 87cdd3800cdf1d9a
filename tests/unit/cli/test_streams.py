"""Commands as processes: terminals, pipes, full disks, encodings, and the end of the process."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.plan_files.prediction_file import write_explanation
from tests.support.sample import PLAN
from tests.unit.cli.commands import PYTHONPATH, steelyard_process


def test_a_closed_stdout_is_no_error(planned: Path) -> None:
    with steelyard_process("explain", str(planned)) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("out", ["file", "pipe"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan train.py -o new.plan.toml", "memory (peak/rank)"),
        ("run train.py --steps 5", "largest miss"),
        ("run train.py --plan two.plan.toml --steps 5", "largest miss"),
        ("run train.py --steps 5 --quiet", "largest miss"),
        ("frontier train.py", "next cent"),
    ],
)
@pytest.mark.parametrize("in_json", [False, True])
def test_redirected_stdout_gets_the_result_and_the_terminal_the_progress(
    on_two_ranks: Path, arguments: str, said: str, in_json: bool, out: str
) -> None:
    """Only progress is drawn on the terminal behind stderr."""
    planned = on_two_ranks
    reader, terminal = pty.openpty()
    path = planned.with_name("out")
    with path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.cli.fake_api", "answer", *arguments.split()]
            + ["--json"] * in_json,
            stdin=subprocess.DEVNULL,
            stdout=file if out == "file" else subprocess.PIPE,
            stderr=terminal,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "TERM": "xterm-256color"},
            cwd=planned.parent,
        )
        os.close(terminal)
        drawn, piped = _until_closed(reader), b""
        if process.stdout is not None:
            piped = process.stdout.read()
            process.stdout.close()
    assert process.wait(timeout=60) == 0
    written = (path.read_bytes() + piped).decode()
    if in_json:
        assert json.loads(written)["schema"].startswith("steelyard.")
    else:
        assert said in written
    assert said not in drawn
    assert "schema" not in drawn
    assert ("loss" in drawn) == ("run" in arguments and "--quiet" not in arguments)


def _until_closed(reader: int) -> str:
    found = b""
    # Linux reports EIO when the terminal's other end is closed.
    with contextlib.suppress(OSError):
        while more := os.read(reader, 65536):
            found += more
    os.close(reader)
    return found.decode()


def test_output_to_a_full_disk_is_an_error(planned: Path) -> None:
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "steelyard", "explain", str(planned)],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert found.returncode == 2
    assert found.stderr.startswith("steelyard: the output cannot be written: No space left")


def test_json_is_printed_when_stderr_is_full(planned: Path) -> None:
    """This is the state of stderr after its terminal was closed during a run."""
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "steelyard", "explain", "none.toml", "--json"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert found.returncode == 2
    assert "does not exist" in json.loads(found.stdout)["happened"]


ENDING = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from steelyard.cli import command, main

class Seen:
    def __del__(self):
        os.write(1, b"modules were taken apart\\n")

def late():
    time.sleep(0.3)
    print("the thread ended")

seen = Seen()
atexit.register(print, "what was registered ran")
ThreadPoolExecutor(1).submit(time.sleep, 0)
threading.Thread(target=late).start()
how = sys.argv.pop(1)
if how == "as a command":
    command()
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [("explain train.plan.toml", 0), ("explain none.toml", 2), ("bogus", 2)]
)
@pytest.mark.parametrize("how", ["as a command", "from Python"])
def test_a_command_exits_without_python_teardown(
    planned: Path, how: str, arguments: str, code: int
) -> None:
    """Threads, executors and exit handlers are waited for; the operating system frees the rest.

    A caller of main() gets Python's normal exit.
    """
    found = subprocess.run(
        [sys.executable, "-c", ENDING, how, *arguments.split()],
        cwd=planned.parent,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == code
    assert ("modules were taken apart" in found.stdout) == (how == "from Python")
    said = [line for line in found.stdout.splitlines() if line.startswith(("the thr", "what was"))]
    assert said == ["the thread ended", "what was registered ran"]
    assert ("plan ecd4" in found.stdout) == (code == 0)


def test_a_log_that_is_closed_does_not_stop_training(planned: Path) -> None:
    run = "run train.py --steps 40"
    with steelyard_process(*run.split(), fake="answer", cwd=planned.parent) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdout is not None
        assert "<- largest miss" in process.stdout.read()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_is_plain_and_never_crashes(planned: Path, encoding: str) -> None:
    write_explanation(planned, replace(PLAN, title="größe ☃ \udcff"))
    process = steelyard_process(
        "explain", str(planned), env={"PYTHONIOENCODING": encoding, "TERM": "xterm-256color"}
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
