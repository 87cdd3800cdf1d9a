"""Invalid arguments, scripts and files of every command are refused by name, before any work is
done."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli import fake_api
from tests.unit.cli.commands import failure_of


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan", "requires an argument"),
        ("pln train.py", "Did you mean"),
        ("plan .", ". is a folder, not a script"),
        ("run .", ". is a folder, not a script"),
        (f"run train.py --plan {'x' * 300}.toml", "File name too long"),
        ("plan train.py --memry 3GiB", "Did you mean"),
        ("plan train.py --memory 2gigs", "unknown unit 'gigs'"),
        ("plan train.py --memory 0", "not a possible amount"),
        ("plan train.py --memory -1", "not"),
        ("plan train.py --step-time fast", "not an amount"),
        ("plan train.py --maximize width", "batch"),
        ("plan train.py --runner triton", "python"),
        ("plan train.py -o plan.json", "ends in .toml"),
        ("plan train.py --what-if memry=4GiB", "did you mean memory?"),
        ("plan train.py --what-if 4GiB", "--what-if memory=4GiB"),
        ("plan train.py --check x.toml --memory 3GiB", "takes its budget from the plan file"),
        ("run train.py --plan none.toml", "does not exist"),
        ("run train.py --steps 0", "--steps 0 is not possible"),
        ("run train.py --steps two", "two"),
        ("run train.py --steps -3", "--steps -3 is not possible"),
        ("run train.py --steps nan", "nan"),
        ("run train.py --steps 1e3", "1e3"),
        (f"run train.py --steps {10**40}", "of more than 30 digits is not possible"),
        (f"run train.py --seed {2**70}", f"--seed {2**70} is not possible"),
        ("run train.py --seed -1", "--seed -1 is not possible"),
        ("run train.py --seed 0.5", "--seed 0.5 is not a whole number"),
        ("run train.py --steps 0x10", "--steps 0x10 is not a whole number"),
        pytest.param(f"run train.py --steps {'9' * 5000}", "--steps 999", id="five thousand 9"),
        ("run train.py --checkpoint c --checkpoint-every 1.0", "1.0 is not a whole number"),
        ("run train.py --rank-timeout nan", "--rank-timeout = 'nan' is not an amount"),
        ("run train.py --rank-timeout inf", "--rank-timeout = 'inf' is not an amount"),
        ("run train.py --rank-timeout 0", "--rank-timeout = '0' is not a possible amount"),
        ("run train.py --rank-timeout -1", "--rank-timeout"),
        ("run train.py --rank-timeout 1us", "--rank-timeout 1us is not possible"),
        ("run train.py --rank-timeout 1e9h", "--rank-timeout 1e9h is not possible"),
        ("run train.py --checkpoint-every 10", "was given without --checkpoint"),
        ("run train.py --checkpoint-every 0 --checkpoint c", "--checkpoint-every 0 is not"),
        ("run train.py --checkpoint-every -1 --checkpoint c", "--checkpoint-every -1 is not"),
        ("run train.py --checkpoint train.py", "--checkpoint train.py is not a folder"),
        ("run train.py --html train.plan.json", "would overwrite an input file"),
        ("run train.py --html train.py", "would overwrite an input file"),
        ("plan train.py --html train.plan.toml", "would overwrite an input file"),
        ("plan train.py --ranks 0", "--ranks 0 is not possible"),
        ("plan train.py --ranks -2 --cluster dgx-h100", "--ranks -2 is not possible"),
        ("plan train.py --ranks nan", "nan"),
        (f"plan train.py --ranks {10**9}", f"--ranks {10**9} is not possible"),
        ("plan train.py --memory nan", "not an amount"),
        ("plan train.py --memory inf", "not an amount"),
        ("plan train.py --memory 1e300", "not a possible amount"),
        ("plan train.py --step-time nan", "not an amount"),
        ("plan train.py --step-time 0", "not a possible amount"),
        ("plan train.py --communication -1ms", "communication"),
        ("plan train.py --computation inf", "not an amount"),
        ("plan train.py --accuracy-loss nan", "not an amount"),
        ("plan train.py --accuracy-loss=-1%", "accuracy_loss"),
        ("plan train.py --accuracy-loss 101%", "more than 100 %"),
        ("plan train.py --ranks 2 --speeds nan,1", "speeds"),
        ("plan train.py --ranks 2 --speeds inf,1", "speeds"),
        ("plan train.py --ranks 2 --speeds 0,1", "speeds"),
        ("plan train.py --ranks 2 --speeds 1e-300,1", "speeds (1e-300, 1.0) of 2 ranks"),
        ("plan train.py --ranks 3 --speeds 1,1", "write --speeds 1,1,1 for equal ranks"),
        ("plan train.py --ranks 3 --speeds 1,fast,1", "is not a list of numbers"),
        ("plan train.py --speeds 1,0.5", "write --ranks 2 as well"),
        ("plan train.py --offload-dir . --offload-rate nan --offload-size 1GiB", "not an amount"),
        (
            "plan train.py --offload-dir . --offload-rate 1GB/s --offload-size 0",
            "not a possible amount",
        ),
        ("plan train.py --offload-dir . --offload-rate 1GB/s", "--offload-size is missing"),
        ("plan train.py --what-if memory=nan", "not an amount"),
        ("plan train.py --why-not recomputing", "did you mean recompute?"),
        ("plan train.py --why-not xyz", "the name of a trade, such as recompute"),
        ("plan train.py --maximize batch --minimize devices", "exclude each other"),
        ("plan train.py --maximize batch --ranks 2", "--ranks gives several"),
        ("plan train.py --maximize batch --cluster dgx-h100", "--cluster gives several"),
        ("plan train.py --minimize devices", "no --cluster was given"),
        ("plan train.py --runner inductor --cluster dgx-h100", "--cluster declares other devices"),
        ("plan train.py --check none.toml", "does not exist"),
        ("plan train.py --check none.toml --runner inductor", "takes its budget from the plan"),
        ("scale train.py --cluster dgx-h100 --devices 0..8", "is an empty range"),
        ("scale train.py --cluster dgx-h100 --devices 8..1", "is an empty range"),
        ("scale train.py --cluster dgx-h100 --devices ²..8", "is not a range"),
        (f"scale train.py --cluster dgx-h100 --devices 1..{10**20}", "is not a range"),
        ("scale train.py --cluster dgx-h100 --devices 1..8 --tokens nan", "not an amount"),
        ("scale train.py --cluster dgx-h100 --devices 1..8 --samples 0", "not a possible amount"),
        ("run train.py --resume", "--resume names no folder"),
        ("run train.py --resume c --checkpoint d", "are different folders"),
        ("explain none.toml", "does not exist"),
        ("explain none.toml --html", "html"),
        ("explain .", "is not a file"),
        ("run train.py --plan .", "is a directory"),
        ("plan train.py --check .", "is a directory"),
        ("plan train.py -o .", "is a directory"),
        ("simulate train.py --trace t.json --plan .", "is not a file"),
    ],
)
def test_bad_arguments_are_named(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert said in failure_of(capsys, *arguments.split(), code=2)


def _folder(path: Path) -> None:
    path.mkdir()


def _binary(path: Path) -> None:
    path.write_bytes(Path(sys.executable).read_bytes()[:4096])


@pytest.mark.parametrize("verb", ["plan", "run", "frontier", "scale", "simulate"])
@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("missing.py", None, "missing.py does not exist"),
        ("missing", None, "missing is not a script"),
        ("folder.py", _folder, "folder.py is a folder, not a script"),
        ("program.py", _binary, "program.py is not Python"),
        ("text.py", lambda path: path.write_text("train(\n\n"), "text.py is not Python, line 1"),
        ("latin.py", lambda path: path.write_bytes(b"x = '\xe9'"), "latin.py is not Python"),
        ("deep.py", lambda path: path.write_text("(" * 10**5), "deep.py is not Python"),
        ("train.sh", lambda path: path.write_text("x = 1"), "does not end in .py"),
        ("pipe.py", os.mkfifo, "pipe.py is not a regular file"),
        ("loop.py", lambda path: path.symlink_to(path.name), "loop.py does not exist"),
        ("", None, "not a script"),
        (":name", None, "is not a script"),
    ],
)
def test_an_invalid_script_is_refused_before_torch_is_imported(
    api: fake_api.Fake,
    planned: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    name: str,
    make: Callable[[Path], object] | None,
    said: str,
) -> None:
    if make is not None:
        make(Path(name))
    more = {
        "scale": ["--cluster", "dgx-h100", "--devices", "1..8"],
        "simulate": ["--plan", str(planned), "--trace", "t.json"],
    }
    assert said in failure_of(capsys, verb, name, *more.get(verb, []), code=2)
    assert fake_api.CALLS == []


@pytest.mark.parametrize("verb", ["plan", "frontier", "scale"])
def test_a_plan_file_given_as_the_script_is_named_as_one(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    more = ["--cluster", "dgx-h100", "--devices", "1..8"] if verb == "scale" else []
    said = failure_of(capsys, verb, "train.plan.toml", *more, code=2)
    assert "is a plan or cluster file, not a script" in said


_WRONG_KEY = """
[scope.cluster]
member = { dgx-h100 = 8 }
"""


@pytest.mark.parametrize(
    "command",
    [
        "plan train.py --cluster c.toml",
        "plan train.py --cluster c.toml --minimize devices",
        "plan train.py --check train.plan.toml --cluster c.toml",
        "scale train.py --cluster c.toml --devices 1..8",
        "simulate train.py --cluster c.toml --trace t.json",
    ],
)
def test_a_wrong_cluster_file_is_refused_before_torch_is_imported(
    planned: Path, command: str
) -> None:
    (planned.parent / "c.toml").write_text(_WRONG_KEY)
    (planned.parent / "train.py").write_text("def workload(): ...")
    probe = (
        "import sys; from steelyard.cli import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe, *command.split()],
        cwd=planned.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "scope.cluster.member is not a known key; did you mean members?" in found.stderr
    assert found.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "explain train.plan.toml --html no/such/folder/x.html",
            "the folder no/such/folder does not exist",
        ),
        ("run train.py --html .", "is a directory"),
        ("frontier train.py --html no/x.html", "cannot be written"),
        ("plan train.py --html no/x.html", "cannot be written"),
        ("plan train.py -o no/x.toml", "the folder no does not exist"),
        ("plan train.py -o folder.toml", "folder.toml is a directory"),
    ],
)
def test_unwritable_outputs_are_refused_before_any_work(
    api: fake_api.Fake,
    planned: Path,
    arguments: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("folder.toml").mkdir()
    assert said in failure_of(capsys, *arguments.split(), code=2)
    assert fake_api.CALLS == []
