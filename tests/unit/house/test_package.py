"""The wheel that users install: its content, and its command in a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
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


def test_the_command_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """It has the dependencies that are installed here, but not this checkout."""
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    _run("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    site = _run("-c", "import site; print(site.getsitepackages()[0])", python=python).strip()
    # Add only the path: .pth files of this environment that name this checkout are not read.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    where = "import steelyard; print(steelyard.__file__)"
    assert _run("-c", where, python=python, folder=tmp_path).startswith(site)
    command = str(python.with_name("steelyard"))
    explained = _run(command, "explain", "--help", python=python, folder=tmp_path)
    assert "Usage: steelyard explain" in explained
    # The command reads the machine with torch, so it needs every dependency.
    assert "torch" in _run(command, "doctor", python=python, folder=tmp_path)


def _run(*arguments: str, python: Path | None = None, folder: Path | None = None) -> str:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python or sys.executable), *arguments], cwd=folder or _ROOT, env=environ, text=True,
        check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
