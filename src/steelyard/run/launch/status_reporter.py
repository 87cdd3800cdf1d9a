"""Inside a rank: records the exception that ends it, and reports its position when asked.

The launcher asks after others have waited for this rank in vain. A thread answers, so that a rank
that sleeps or loops answers too. If native code holds the interpreter, there is no answer, which is
informative as well. torch's flight recorder has the last collective that was issued, in torch 2.13
also with gloo. (With gloo, its states stay "scheduled", but ``retired`` tells if a collective has
completed.) Not for the diagnosis: see failure_diagnosis.py.
"""

import contextlib
import errno
import linecache
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from steelyard.errors import BadInput, NonFinite, RankFailed, RanksDiffer, SteelyardError
from steelyard.run.launch.environment import RankInfo
from steelyard.run.launch.rank_status import Issued, RankProgress, RankStatus
from steelyard.run.launch.run_files import RankFiles, write_whole
from steelyard.safe_text import printable

if TYPE_CHECKING:
    from steelyard.comm.gloo.point_to_point import Note

# Gloo raises a plain RuntimeError that begins with a position in gloo's source, except for a
# collective that is issued after another has timed out.
_GLOO_ERROR = re.compile(
    r"gloo/|gloo::|Connection (closed|reset) by peer|Application timeout caused pair closure"
)
# The position in gloo's source, and gloo's guess at the cause.
_GLOO_NOISE = re.compile(r"^\[[^\]]*gloo[^\]]*\] |\.? This is typically caused by .*$")
_MEMORY_ERROR = re.compile(r"can't allocate memory|std::bad_alloc|not enough memory|out of memory")
# torchrun reads error files with ProcessFailure, which expects its fields in the file that this
# variable names.
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# More than are ever in flight between the first collective in which ranks differ and the last one.
_LATELY = 64
# Longer than the launcher takes. The launcher lives as long as this process (see orphan_guard.py).
_VERDICT_SECONDS = 20


@contextlib.contextmanager
def recorded(who: RankInfo) -> Iterator[None]:
    """Record the exception that ends this block, for the launcher or for torchrun, and re-raise
    it.

    This may be nested; the first record is kept. A rank that lost another rank waits for the
    launcher's verdict, which ends it, because its own traceback would bury the cause.
    """
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            path = who.files.error if who.files else _path_of(os.environ.get(_ERROR_FILE_VARIABLE))
            if path is not None and not path.exists():
                status = statement_of(error)
                # The original error matters, not a failure to record it (such as a full disk).
                with contextlib.suppress(OSError):
                    write_whole(path, _as_error_file(error, status))
                if who.files is not None and status.of_exchange:
                    time.sleep(_VERDICT_SECONDS)
        raise


@contextlib.contextmanager
def reporting_lost_connections(who: RankInfo) -> Iterator[None]:
    """Raise a readable RankFailed for a lost connection if our launcher cannot diagnose it, as with
    several hosts.
    """
    try:
        yield
    except RuntimeError as error:
        if who.files is not None or isinstance(error, RankFailed) or not _is_of_exchange(error):
            raise
        message = _GLOO_NOISE.sub("", str(error).splitlines()[0])
        raise RankFailed(
            f"rank {who.rank} lost the connection to another rank during a collective: "
            f"{printable(message)}",
            expected="all ranks and their links to stay up until the last step",
            remedy="read the output of the other ranks for the first failure; start all again, "
            "with --resume if there is a checkpoint",
        ) from error


def _path_of(name: str | None) -> Path | None:
    return Path(name) if name else None


def _as_error_file(error: BaseException, status: RankStatus) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    return {
        "message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra},
        "steelyard": status.to_json(),
    }


def statement_of(error: BaseException) -> RankStatus:
    of_exchange = any(map(_is_of_exchange, _chain(error)))
    own_error = error if isinstance(error, SteelyardError) else None
    failed = error if isinstance(error, RankFailed) else None
    return RankStatus(
        kind=type(error).__name__,
        text=own_error.happened if own_error else str(error),
        line=_line_of_error(error),
        at_seconds=time.monotonic(),
        of_input=isinstance(error, BadInput),
        of_exchange=of_exchange,
        of_memory=any(map(_is_of_memory, _chain(error))),
        expected=own_error.expected if own_error else "",
        remedy=own_error.remedy if own_error else "",
        differs=(error.rank, error.item) if isinstance(error, RanksDiffer) else None,
        absent=failed.rank if failed and failed.cause == "absent" else None,
        missed=failed.rank if failed and failed.cause == "exchange" and failed.rank >= 0 else None,
        not_finite=isinstance(error, NonFinite),
        progress=progress() if of_exchange else RankProgress(),
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and the errors from which it was raised or while handling which it was
    raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_exchange(error: BaseException) -> bool:
    if isinstance(error, RankFailed | torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_GLOO_ERROR.search(str(error)))


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY_ERROR.search(str(error)))


# --- where the rank is ----------------------------------------------------------------------------


def progress(line: str = "") -> RankProgress:
    # Imported only after an error, because this loads much of torch; a running step has already
    # loaded it.
    from steelyard import _torch
    from steelyard.comm.gloo.point_to_point import LATELY

    entries, notes = _torch.exchanges_issued(), [*LATELY]
    issued = _numbered(entries, notes)
    last = {each.group: each for each in issued}
    return RankProgress(
        issued=tuple(each for _, each in sorted(last.items())),
        lately=tuple(issued[-_LATELY:]),
        # Without records the state is unknown: the recorder can be switched off.
        is_waiting=not entries
        or any(not entry["retired"] for entry in entries)
        or any(not note.is_over for note in notes),
        line=line,
    )


def _numbered(entries: list[dict[str, Any]], notes: "list[Note]") -> list[Issued]:
    """Number the collectives in the order of issue, torch's and ours together; each of the two
    counts only its own.

    Sends and receives are skipped, because their numbers are not the same on all ranks.
    """
    entries_by_time = [(note.at_ns, note.group, "ours", note.number, note.words) for note in notes]
    for entry in entries:
        if not entry["is_p2p"]:
            group, number = str(entry["process_group"][0]), entry["collective_seq_id"]
            entries_by_time.append(
                (entry["time_created_ns"], group, "torch's", number, _words_for(entry))
            )
    issued, counts = list[Issued](), defaultdict[str, dict[str, int]](dict)
    for _, group, source, number, words in sorted(entries_by_time):
        counts[group][source] = number
        issued.append(Issued(group=group, number=sum(counts[group].values()), words=words))
    return issued


def _words_for(entry: dict[str, Any]) -> str:
    kind = str(entry["profiling_name"]).removeprefix("gloo:")
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    return f"{kind} {', '.join(f'{dtype} {sizes}' for dtype, sizes in shapes)}".rstrip()


def answer_when_asked(files: RankFiles) -> None:
    os.mkfifo(files.ask, mode=0o600)
    # Opened for writing too, because a pipe without a writer would be at its end at once.
    pipe = os.open(files.ask, os.O_RDWR | os.O_CLOEXEC)

    def answer() -> None:
        while os.read(pipe, 1):
            write_whole(files.answer, progress(_line_of_main_thread()).to_json())

    threading.Thread(target=answer, name="steelyard-witness", daemon=True).start()


def _line_of_main_thread() -> str:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return _line_of([(f, number) for f, number in traceback.walk_stack(frame)][::-1])


def _line_of_error(error: BaseException) -> str:
    return _line_of(list(traceback.walk_tb(error.__traceback__)))


def _line_of(frames: list[tuple[FrameType, int]]) -> str:
    """Return the innermost line outside of torch, Python and Steelyard, or an empty text."""
    users = [(f, number) for f, number in frames if not _is_library(f.f_code.co_filename)]
    if not users:
        return ""
    frame, number = users[-1]
    code = linecache.getline(frame.f_code.co_filename, number).strip()
    return f"{Path(frame.f_code.co_filename).name}:{number}" + (f": {code}" if code else "")


_LIBRARIES = tuple(
    f"{Path(path)}{os.sep}"
    for path in (
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        Path(__file__).parents[2],
    )
)


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", *_LIBRARIES))
