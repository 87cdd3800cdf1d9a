"""The cache of earlier measurements on this machine: one SQLite file in the user's cache folder.

An unusable file costs time, but planning goes on: all problems become notes. A file or folder that
another user owns or can write to counts as unusable and is not read. Not for deciding what is worth
measuring: see measure/operators/benchmark.py.
"""

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from steelyard.ir.metrics import Estimate
from steelyard.predict.cost_table import OperatorCost
from steelyard.private_files import why_not_private

# Increased when the meaning of the columns changes; files of other versions are left alone.
_VERSION = 1
_BUSY_SECONDS = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS operator (
    context TEXT NOT NULL, signature TEXT NOT NULL,
    seconds REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL,
    workspace_bytes INTEGER NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (context, signature)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS whole (
    context TEXT NOT NULL, name TEXT NOT NULL,
    value REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (context, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rate (
    context TEXT NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (context, name)
) WITHOUT ROWID;
"""

_T = TypeVar("_T")


def default_path() -> Path:
    """Return ``$STEELYARD_CACHE``, or ``steelyard/costs.sqlite`` in the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "steelyard" / "costs.sqlite"


class CostCache:
    """Costs by (context, signature). Several processes may read and write one file concurrently."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        self._notes: list[str] = []
        self._is_usable = True

    @property
    def notes(self) -> tuple[str, ...]:
        """The problems so far, as messages for the user."""
        return tuple(self._notes)

    def read(self, context: str, signatures: Sequence[str]) -> dict[str, OperatorCost]:
        wanted = set(signatures)

        def select(database: sqlite3.Connection) -> list[tuple[object, ...]]:
            return database.execute(
                "SELECT signature, seconds, low, high, workspace_bytes FROM operator"
                " WHERE context = ?",
                (context,),
            ).fetchall()

        found: dict[str, OperatorCost] = {}
        rows: list[tuple[object, ...]] = []
        for signature, *figures in self._transact(select, rows):
            if signature in wanted:
                cost = _valid_cost(figures)
                if cost is None:
                    self._note(f"{self.path} holds an invalid cost; it is measured again")
                else:
                    found[str(signature)] = cost
        return found

    def write(self, context: str, costs: Mapping[str, OperatorCost]) -> None:
        rows = [
            (context, signature, s.value, s.low, s.high, cost.workspace_bytes, time.time())
            for signature, cost in costs.items()
            for s in (cost.seconds,)
            if cost.is_measured
        ]

        def insert(database: sqlite3.Connection) -> None:
            database.executemany("INSERT OR REPLACE INTO operator VALUES (?,?,?,?,?,?,?)", rows)

        self._transact(insert, None)

    def settle(self, context: str, costs: Mapping[str, OperatorCost]) -> dict[str, OperatorCost]:
        """Store new measurements, except those that another process has stored in the meantime.

        Stored values win, so that both processes use the same costs.
        """
        stored = self.read(context, list(costs))
        self.write(context, {s: cost for s, cost in costs.items() if s not in stored})
        return {**costs, **stored}

    def read_rates(self, context: str) -> dict[str, float]:
        def select(database: sqlite3.Connection) -> list[tuple[object, ...]]:
            statement = "SELECT name, value FROM rate WHERE context = ?"
            return database.execute(statement, (context,)).fetchall()

        rows: list[tuple[object, ...]] = []
        found = self._transact(select, rows)
        return {str(n): v for n, v in found if isinstance(v, float) and 0 < v < math.inf}

    def write_rates(self, context: str, rates: Mapping[str, float]) -> None:
        rows = [(context, name, value, time.time()) for name, value in rates.items()]

        def insert(database: sqlite3.Connection) -> None:
            database.executemany("INSERT OR REPLACE INTO rate VALUES (?,?,?,?)", rows)

        self._transact(insert, None)

    def read_whole(self, context: str, name: str) -> Estimate | None:
        """Return a stored figure of whole steps: the seconds of one, or the ratio of two."""

        def select(database: sqlite3.Connection) -> tuple[object, ...] | None:
            statement = "SELECT value, low, high FROM whole WHERE context = ? AND name = ?"
            row: tuple[object, ...] | None = database.execute(statement, (context, name)).fetchone()
            return row

        row = self._transact(select, None)
        cost = _valid_cost([*row, 0]) if row is not None else None
        return cost.seconds if cost is not None else None

    def write_whole(self, context: str, name: str, found: Estimate) -> None:
        row = (context, name, found.value, found.low, found.high, time.time())

        def insert(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR REPLACE INTO whole VALUES (?,?,?,?,?,?)", row)

        self._transact(insert, None)

    def settle_whole(self, context: str, name: str, found: Estimate) -> Estimate:
        stored = self.read_whole(context, name)
        if stored is not None and stored.low:
            return stored
        self.write_whole(context, name, found)
        return found

    def forget(self) -> None:
        """Delete all costs, so that everything is measured again."""

        def delete(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM operator")
            database.execute("DELETE FROM rate")
            database.execute("DELETE FROM whole")

        self._transact(delete, None)

    def _transact(self, work: Callable[[sqlite3.Connection], _T], default: _T) -> _T:
        """Run ``work`` on the open file; a damaged file is renamed and recreated, once."""
        for attempt in range(2):
            if not self._is_usable:
                break
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if reason := _why_not_read(self.path):
                    self._give_up(reason)
                    break
                with _transaction(self.path) as database:
                    if not _has_our_version(database):
                        self._give_up("was written by another version of steelyard")
                        break
                    return work(database)
            except sqlite3.OperationalError as error:
                self._give_up(f"cannot be used ({error})")
            except sqlite3.DatabaseError as error:
                if attempt:
                    self._give_up(f"cannot be used ({error})")
                else:
                    self._rename_damaged(error)
            except OSError as error:
                self._give_up(f"cannot be used ({error.strerror or error})")
        return default

    def _rename_damaged(self, error: sqlite3.DatabaseError) -> None:
        if not _is_damaged(self.path):
            return  # another process was faster, and this file is already the new one
        renamed = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        try:
            self.path.rename(renamed)
            for suffix in ("-wal", "-shm"):  # these files belong to the damaged file only
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        except OSError as trouble:
            self._give_up(f"is damaged ({error}) and cannot be moved ({trouble.strerror})")
            return
        self._note(
            f"{self.path} was damaged ({error}); moved to {renamed.name}, and a new one was started"
        )

    def _give_up(self, why: str) -> None:
        self._is_usable = False
        self._note(f"the cost cache {self.path} {why}; costs are measured again in every run")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _why_not_read(path: Path) -> str:
    """Return why another user may have written this file; empty if no other user can."""
    real = path.resolve()
    # SQLite reads these companion files, and trusts them.
    companions = (real.with_name(real.name + suffix) for suffix in ("-journal", "-wal", "-shm"))
    for each in (path.parent, path, real.parent, real, *companions):
        if reason := why_not_private(each):
            return f"is not read: {'it' if each == path else each} {reason}"
    return ""


@contextlib.contextmanager
def _transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for one transaction and close it, so that no process locks it for long."""
    database = sqlite3.connect(path, timeout=_BUSY_SECONDS)
    try:
        with database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            yield database
    finally:
        database.close()


def _is_damaged(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        with _transaction(path) as database:
            return bool(database.execute("PRAGMA quick_check").fetchone() != ("ok",))
    except sqlite3.DatabaseError:
        return True


def _has_our_version(database: sqlite3.Connection) -> bool:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        return False
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version = {_VERSION}")
    return True


def _valid_cost(figures: Sequence[object]) -> OperatorCost | None:
    """Return the stored cost; None if no measurement can have produced it."""
    match figures:
        case [float(seconds), float(low), float(high), int(workspace)] if (
            0 <= low <= seconds <= high < math.inf and workspace >= 0
        ):
            estimate = Estimate(value=seconds, low=low, high=high)
            return OperatorCost(seconds=estimate, workspace_bytes=workspace)
    return None
