from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import torch_version
from steelyard.errors import BadInput
from steelyard.torch_version import NEWEST_TESTED, OLDEST, check, dotted, minor_version

_NEWER = f"{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}.0"


@pytest.fixture(autouse=True)
def warns_anew() -> None:
    torch_version._warn.cache_clear()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", (2, 13)),
        ("2.13.0+cpu", (2, 13)),
        ("2.14.0a0+git1234567", (2, 14)),
        ("2.15.0.dev20260901+cu130", (2, 15)),
        ("2.9", (2, 9)),
        ("10.0rc1", (10, 0)),
    ],
)
def test_the_first_two_numbers_of_a_version_count(version: str, expected: tuple[int, int]) -> None:
    assert minor_version(version) == expected


@pytest.mark.parametrize("version", ["", "2", "unknown", "v2.13", "2.x", "9" * 5000 + ".1"])
def test_a_version_that_cannot_be_read_is_refused(version: str) -> None:
    with pytest.raises(BadInput, match="cannot be read") as caught:
        check(version)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cpu", "1.13.1"])
def test_an_older_version_than_the_oldest_is_refused_in_three_lines(version: str) -> None:
    with pytest.raises(BadInput) as caught:
        check(version)
    assert str(caught.value).splitlines() == [
        f"torch {version} is too old",
        f"  expected: torch {dotted(OLDEST)} or newer",
        f'  next: pip install "torch>=2.11,<2.{NEWEST_TESTED[1] + 1}"',
    ]


@pytest.mark.parametrize("version", [f"{dotted(OLDEST)}.0", f"{dotted(NEWEST_TESTED)}.9+cu130"])
def test_tested_versions_pass_in_silence(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check(version)
    assert not caplog.records


def test_a_newer_version_than_the_newest_gets_one_line_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        check(_NEWER, {})
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("steelyard", "WARNING")
    assert record.getMessage() == (
        f"steelyard: torch {_NEWER} is newer than torch {dotted(NEWEST_TESTED)}, the newest "
        "version that was tested"
    )


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0), ("7", 0)])
def test_of_several_ranks_the_first_one_warns(
    rank: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    check(_NEWER, {"RANK": rank})
    assert len(caplog.records) == lines


@pytest.mark.parametrize("door", ["steelyard.api", "steelyard.hooks"])
@pytest.mark.parametrize(
    ("version", "happened"),
    [
        ("2.10.0", "torch 2.10.0 is too old"),
        (_NEWER, f"capture does not work under torch {_NEWER}, which has no torch._functorch."),
    ],
)
def test_a_torch_that_cannot_be_used_is_refused_before_any_name_of_it_is_missed(
    door: str, version: str, happened: str, tmp_path: Path
) -> None:
    """The torch of this test has a version and nothing else."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from steelyard.errors import BadInput
try:
    import {door}
except BadInput as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, expected, remedy = run.stdout.splitlines()
    assert first.startswith(happened)
    assert expected.startswith("  expected: torch 2.11")
    assert remedy.startswith("  next: pip install")
    warning = f"steelyard: torch {version} is newer than"
    assert [line.startswith(warning) for line in run.stderr.splitlines()] == [True] * (
        version == _NEWER
    )
