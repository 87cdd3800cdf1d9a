"""Logs the loss of every step to a JSON lines file, and to TensorBoard if that is installed.

Each line has ``step``, ``loss``, ``seconds`` (null for a metered step), ``lr`` (one number, or
one per parameter group if they differ; null without an optimizer) and ``time``, in seconds since
1970. A resumed run continues the file after its checkpoint's step, so that no step appears twice;
a new run starts a new file and keeps the old one.

Not for the receipt, which has the first and the last loss.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

_FLUSH_SECONDS = 10


def losses_path(plan: Path) -> Path:
    """Return the path of the loss log of a plan: ``train.plan.toml`` gives
    ``train.losses.jsonl``.
    """
    return plan.with_name(f"{_name(plan)}.losses.jsonl")


def tensorboard_path(plan: Path) -> Path:
    return plan.with_name(f"{_name(plan)}.tensorboard")


def _name(plan: Path) -> str:
    return plan.name.removesuffix(".toml").removesuffix(".plan")


class Losses:
    """Writes losses after each step. A write error is reported once and does not stop training."""

    def __init__(self, plan: Path, tell: Callable[[str], None]) -> None:
        self._path, self._board_path = losses_path(plan), tensorboard_path(plan)
        self._tell = tell
        self._file: RawIOBase | None = None
        self._board: Any = None
        self._begun = False

    def add(self, *, step: int, loss: float, seconds: float | None, lr: Any) -> None:
        if not self._begun:
            self._begun = True
            self._begin(step)
        if self._file is not None:
            line = {"step": step, "loss": loss, "seconds": seconds, "lr": lr, "time": time.time()}
            self._write(json.dumps(line).encode() + b"\n")
        if self._board is not None:
            self._show(step, {"loss": loss, "seconds": seconds, "lr": lr})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _begin(self, step: int) -> None:
        """Open the log; ``step`` is the first step of this process: 1, or the step after a
        checkpoint.
        """
        try:
            if self._path.exists() and not self._path.is_file():
                raise OSError(0, "it is not a regular file")
            if step > 1:
                _keep_before(step, self._path)
            elif self._path.exists():
                self._path.replace(self._path.with_name(f"{self._path.stem}.before.jsonl"))
            # Unbuffered: each line reaches the operating system at once, even if this process is
            # killed.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._give_up(error)
        # Torch's TensorBoard writer is only imported if TensorBoard is installed: the import takes
        # seconds.
        if find_spec("tensorboard") is not None:
            self._begin_board(step)

    def _begin_board(self, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter

            earlier = sorted(self._board_path.iterdir()) if self._board_path.is_dir() else []
            now = time.strftime("%Y-%m-%d-%H-%M-%S") + f"-{os.getpid()}"
            folder = earlier[-1] if step > 1 and earlier else self._board_path / now
            purge_step = step if folder.is_dir() else None  # its later steps will run a second time
            self._board = SummaryWriter(
                log_dir=str(folder), purge_step=purge_step, flush_secs=_FLUSH_SECONDS
            )
        except (ImportError, AttributeError, TypeError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            self._tell(f"losses are not written for TensorBoard: {reason}")

    def _show(self, step: int, values: dict[str, Any]) -> None:
        numbers = {name: v for name, v in values.items() if isinstance(v, float)}
        try:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            self._board = None
            self._tell(f"losses are no longer written for TensorBoard: {error.strerror}")

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._tell(f"losses are not written to {self._path.name}: {error.strerror}")


def _keep_before(step: int, path: Path) -> None:
    """Remove the lines of this step and of later ones, which will be repeated, and an incomplete
    last line of a killed process.
    """
    if not path.exists():
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with path.open("rb") as before, scratch.open("xb") as after:
            for line in _lines_before(step, before):
                after.write(line)
        shutil.copymode(path, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _lines_before(step: int, file: BinaryIO) -> Iterator[bytes]:
    for line in file:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        number = found.get("step") if isinstance(found, dict) else None
        if isinstance(number, int) and number < step:
            yield line if line.endswith(b"\n") else line + b"\n"


__all__ = ["Losses", "losses_path", "tensorboard_path"]
