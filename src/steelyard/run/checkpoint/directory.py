"""A folder of checkpoints, each complete or absent, and never overwritten.

A save writes a new folder under a temporary name, flushes every file, renames the folder, and then
writes its name to LATEST. Not for the content of a checkpoint: see state.py.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steelyard.errors import CheckpointError

MANIFEST = "manifest.json"
_LATEST = "LATEST"
_LOCK = ".lock"
_UNFINISHED = ".saving-"
_MAX_MANIFEST_BYTES = 65536
_NAME = re.compile(r"step-(\d{6,12})")
_FILE = re.compile(r"[a-z]{1,32}\.(safetensors|json)")


def step_of(checkpoint: Path) -> int:
    found = _NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1


class CheckpointFolder:
    """Saves into, lists and prunes one folder; only the newest ``keep`` checkpoints remain."""

    def __init__(self, path: Path, *, keep: int = 3) -> None:
        assert keep >= 1, "the only complete checkpoint is never deleted"
        self.path = path
        self._keep = keep

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, oldest first; ``verify`` checks whether one is complete."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        return sorted(found, key=step_of)

    def latest(self) -> Path:
        known = self.checkpoints()
        try:
            text = (self.path / _LATEST).read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no checkpoint to resume from in {self.path}",
                expected=f"a file {_LATEST} that names a checkpoint",
                remedy=_resume_from(known[-1] if known else None),
            ) from error
        chosen = self.path / text.strip()
        if not _NAME.fullmatch(text.removesuffix("\n")) or chosen not in known:
            raise CheckpointError(
                f"{self.path / _LATEST} names {text[:40]!r}, which does not exist",
                expected="the name of a checkpoint in the same folder",
                remedy=_resume_from(known[-1] if known else None),
            )
        return chosen

    def before(self, checkpoint: Path) -> Path | None:
        """Return the newest complete checkpoint older than this one."""
        older = [p for p in self.checkpoints() if step_of(p) < step_of(checkpoint)]
        for candidate in reversed(older):
            with contextlib.suppress(CheckpointError):
                verify(candidate)
                return candidate
        return None

    def add(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save a checkpoint of ``step``; ``write`` fills the folder it is given."""
        final = self.path / f"step-{step:06d}"
        unfinished = self.path / f"{_UNFINISHED}{final.name}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._clear_unfinished()
            unfinished.mkdir()
            write(unfinished)
            _write_manifest(unfinished)
            _unify_modes(unfinished)
            _flush(unfinished)
            unfinished.rename(final)
            _flush(self.path)
            self._point_to(final)
            self._prune()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._clear_unfinished()
            raise _not_written(final, error) from error
        return final

    def go_on_from(self, checkpoint: Path) -> list[Path]:
        """Make this checkpoint the latest; rename later ones, which belong to an abandoned run."""
        later = [p for p in self.checkpoints() if step_of(p) > step_of(checkpoint)]
        if checkpoint in self.checkpoints():
            self._point_to(checkpoint)
        aside = []
        for path in later:
            target = path.with_name(f"aside-{path.name}")
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"aside-{path.name}.{number}")
            path.rename(target)
            aside.append(target)
        return aside

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: if two runs saved into it, they would delete each other's
        checkpoints.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise _not_written(self.path, error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise CheckpointError(
                    f"another run is saving into {self.path}",
                    expected="one run for each folder",
                    remedy="wait for the other run, or give another folder",
                ) from error
            yield

    def _clear_unfinished(self) -> None:
        for leftover in self.path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)

    def _point_to(self, checkpoint: Path) -> None:
        new = self.path / f".{_LATEST}"
        with new.open("w", encoding="ascii") as file:
            file.write(checkpoint.name + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / _LATEST)
        _flush(self.path)

    def _prune(self) -> None:
        for old in self.checkpoints()[: -self._keep]:
            # It is renamed first, because a partly deleted checkpoint must not look like a damaged
            # one.
            unlisted = old.with_name(_UNFINISHED + old.name)
            old.rename(unlisted)
            shutil.rmtree(unlisted)


def verify(checkpoint: Path) -> None:
    """Raise CheckpointError unless the folder consists of exactly the files in its manifest, byte
    for byte.
    """
    try:
        if checkpoint.is_symlink() or not checkpoint.is_dir():
            raise _damaged(checkpoint, "is not a real folder")
        files = _read_manifest(checkpoint)
        present = {p.name for p in checkpoint.iterdir()}
        for name in sorted(files.keys() | present - {MANIFEST}):
            path = checkpoint / name
            if name not in present:
                raise _damaged(path, "is missing")
            if name not in files:
                raise _damaged(path, "is not in the manifest")
            if path.is_symlink() or not path.is_file():
                raise _damaged(path, "is not a regular file")
            size, digest = files[name]
            if path.stat().st_size != size:
                raise _damaged(path, f"has {path.stat().st_size} bytes instead of {size}")
            if _digest(path) != digest:
                raise _damaged(path, "has changed since it was saved: its SHA-256 differs")
    except OSError as error:
        raise _damaged(checkpoint, f"cannot be read: {error.strerror}") from error


def canonical(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _write_manifest(folder: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in folder.iterdir()}
    assert all(map(_FILE.fullmatch, files)), files
    (folder / MANIFEST).write_bytes(canonical({"files": files, "format": _FORMAT}))


def _unify_modes(folder: Path) -> None:
    """Give all files the mode of the manifest, which follows the user's umask. (safetensors always
    writes files with mode 0600.)
    """
    mode = (folder / MANIFEST).stat().st_mode & 0o777
    for path in folder.iterdir():
        path.chmod(mode)


_FORMAT = "steelyard checkpoint manifest 1"


def _read_manifest(checkpoint: Path) -> dict[str, tuple[int, str]]:
    path = checkpoint / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise _damaged(path, "is missing or not a regular file")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise _damaged(path, "is too large for a manifest")
    text = path.read_bytes()
    try:
        manifest = json.loads(text)
        # A manifest in any other form than ours was changed, if only by a space or a duplicate key.
        files = manifest["files"] if canonical(manifest) == text else None
        if manifest.keys() != {"files", "format"} or manifest["format"] != _FORMAT or not files:
            raise _damaged(path, "has changed since it was saved")
        for name, entry in files.items():
            plain = isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            if not plain or entry.keys() != {"bytes", "sha256"} or not _FILE.fullmatch(name):
                raise _damaged(path, f"has an invalid entry: {name[:60]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path, "has changed since it was saved") from error
    return {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """Flush the files of a folder and its directory entries to disk."""
    for path in (*(p for p in folder.iterdir() if p.is_file()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {how}",
        expected="the checkpoint exactly as it was saved",
        remedy="resume from an older checkpoint, with --resume and its path",
    )


def _not_written(path: Path, error: OSError) -> CheckpointError:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free)"
    return CheckpointError(
        f"{path} could not be saved: {error.strerror or error}{free}",
        expected="free space and permission to write there",
        remedy="free some space or give another folder; earlier checkpoints are untouched",
    )


def _resume_from(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "start without --resume, or give the folder that has checkpoints"
    return f"--resume {shlex.quote(str(checkpoint))}"
