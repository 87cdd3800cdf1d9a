"""The wheel that users install: what stands in it, and that the command runs from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(_ROOT))
    (made,) = folder.glob("steelyard-*.whl")
    return made


def test_every_source_file_and_the_licence_are_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (about,) = (name for name in inside if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    sources = {
        str(path.relative_to(_ROOT / "src"))
        for path in (_ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources - inside == set()
    assert "steelyard/py.typed" in inside
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in inside)
    assert (_ROOT / "README.md").read_text("utf-8") in metadata.get_payload()
    assert any("Artificial Intelligence" in name for name in metadata.get_all("Classifier"))


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    _run(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed),
        str(wheel),
    )  # fmt: skip
    where = "import steelyard; print(steelyard.__file__)"
    assert str(installed) in _run("-c", where, path=installed, folder=tmp_path)
    said = _run("-m", "steelyard", "explain", "--help", path=installed, folder=tmp_path)
    assert "Usage: steelyard explain" in said


def _run(*arguments: str, path: Path | None = None, folder: Path | None = None) -> str:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environ.pop("PYTHONPATH", None)
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder or _ROOT, env=environ, text=True, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
