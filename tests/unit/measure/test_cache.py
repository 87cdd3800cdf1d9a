import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.ir.metrics import Estimate
from steelyard.measure.cache import CostCache, default_path
from steelyard.predict.cost_table import OperatorCost

COST = OperatorCost(seconds=Estimate(value=2e-3, low=1e-3, high=4e-3), workspace_bytes=4096)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "costs.sqlite"


def test_a_cache_is_read_by_a_later_process(path: Path) -> None:
    CostCache(path).write("here", {"relu": COST})
    cache = CostCache(path)
    assert cache.read("here", ["relu", "mm"]) == {"relu": COST}
    assert cache.read("elsewhere", ["relu"]) == {}
    assert cache.notes == ()


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.text(max_size=30), st.integers(0, 1 << 40), max_size=5))
def test_any_signature_is_stored_and_read(
    tmp_path_factory: pytest.TempPathFactory, workspaces: dict[str, int]
) -> None:
    cache = CostCache(tmp_path_factory.mktemp("cache") / "costs.sqlite")
    costs = {
        signature: OperatorCost(seconds=COST.seconds, workspace_bytes=nbytes)
        for signature, nbytes in workspaces.items()
    }
    cache.write("here", costs)
    assert cache.read("here", list(costs)) == costs
    assert cache.notes == ()


def test_the_last_measurement_wins(path: Path) -> None:
    newer = OperatorCost(seconds=Estimate.exactly(1.0), workspace_bytes=0)
    cache = CostCache(path)
    cache.write("here", {"relu": COST})
    cache.write("here", {"relu": newer})
    assert cache.read("here", ["relu"]) == {"relu": newer}
    cache.forget()
    assert cache.read("here", ["relu"]) == {}


def test_of_concurrent_measurements_the_first_is_used(path: Path) -> None:
    slower = OperatorCost(seconds=Estimate.exactly(1.0), workspace_bytes=0)
    first, second = CostCache(path), CostCache(path)
    assert first.settle("here", {"relu": COST}) == {"relu": COST}
    assert second.settle("here", {"relu": slower, "mm": slower}) == {"relu": COST, "mm": slower}
    assert first.read("here", ["relu", "mm"]) == {"relu": COST, "mm": slower}
    assert first.settle_whole("here", "step", COST.seconds) == COST.seconds
    assert second.settle_whole("here", "step", slower.seconds) == COST.seconds
    assert first.read_whole("here", "step") == COST.seconds


def test_only_measurements_are_kept(path: Path) -> None:
    declared = OperatorCost(seconds=COST.seconds, workspace_bytes=0, is_measured=False)
    cache = CostCache(path)
    cache.write("here", {"relu": declared})
    assert cache.read("here", ["relu"]) == {}


def test_device_rates_are_stored_and_read(path: Path) -> None:
    CostCache(path).write_rates("here", {"flops_per_second": 4e10})
    assert CostCache(path).read_rates("here") == {"flops_per_second": 4e10}
    assert CostCache(path).read_rates("elsewhere") == {}


def test_step_times_are_stored_and_read(path: Path) -> None:
    found = Estimate(value=0.5, low=0.4, high=0.75)
    CostCache(path).write_whole("here", "step", found)
    cache = CostCache(path)
    assert cache.read_whole("here", "step") == found
    assert cache.read_whole("here", "other") is cache.read_whole("elsewhere", "step") is None
    cache.forget()
    assert cache.read_whole("here", "step") is None


@pytest.mark.parametrize("change", ["low = 9.0", "high = 9e999", "value = 'long'"])
def test_an_impossible_step_is_run_again(path: Path, change: str) -> None:
    CostCache(path).write_whole("here", "step", Estimate.exactly(0.5))
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE whole SET {change}")
    database.close()
    assert CostCache(path).read_whole("here", "step") is None


def test_an_older_cache_without_step_times_is_read(path: Path) -> None:
    CostCache(path).write("here", {"relu": COST})
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE whole")
    database.close()
    cache = CostCache(path)
    assert cache.read_whole("here", "step") is None
    cache.write_whole("here", "step", Estimate.exactly(0.5))
    assert cache.read_whole("here", "step") == Estimate.exactly(0.5)
    assert (cache.read("here", ["relu"]), cache.notes) == ({"relu": COST}, ())


@pytest.mark.parametrize("damage", ["no database", "cut short", "overwritten inside"])
def test_a_damaged_file_is_moved_aside_and_replaced(path: Path, damage: str) -> None:
    costs = {f"operator {i}": COST for i in range(2000)}
    CostCache(path).write("here", costs)
    content = path.read_bytes()
    match damage:
        case "no database":
            path.write_bytes(b"not a database at all, but longer than a header of one is" * 20)
        case "cut short":
            path.write_bytes(content[: len(content) // 2])
        case "overwritten inside":
            path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    cache = CostCache(path)
    assert cache.read("here", list(costs)) == {}
    (note,) = cache.notes
    assert "damaged" in note
    assert len(list(path.parent.glob("costs.sqlite.damaged-*"))) == 1
    cache.write("here", costs)
    assert CostCache(path).read("here", list(costs)) == costs
    assert len(cache.notes) == 1


@pytest.mark.parametrize("trouble", ["a folder", "below a file"])
def test_an_unwritable_cache_gives_a_note(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "costs.sqlite"
    if trouble == "a folder":
        path.mkdir()
    else:
        path.write_text("a file")
        path = path / "costs.sqlite"
    cache = CostCache(path)
    cache.write("here", {"relu": COST})
    assert cache.read("here", ["relu"]) == {}
    (note,) = cache.notes
    assert "cannot be used" in note


def test_a_cache_of_another_version_is_left_unchanged(path: Path) -> None:
    CostCache(path).write("here", {"relu": COST})
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    cache = CostCache(path)
    cache.write("here", {"mm": COST})
    assert cache.read("here", ["relu"]) == {}
    assert "another version" in cache.notes[0]
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM operator").fetchone() == (1,)
    database.close()


@pytest.mark.parametrize(
    "change",
    ["seconds = -1.0", "seconds = 9e999", "low = 1.0", "seconds = 'fast'", "workspace_bytes = -1"],
)
def test_an_impossible_cost_is_measured_again(path: Path, change: str) -> None:
    CostCache(path).write("here", {"relu": COST, "mm": COST})
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE operator SET {change} WHERE signature = 'relu'")
    database.close()
    cache = CostCache(path)
    assert cache.read("here", ["relu", "mm"]) == {"mm": COST}
    assert "impossible" in cache.notes[0]


def test_several_processes_write_at_once(path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path\n"
        "from steelyard.measure.cache import CostCache\n"
        "from steelyard.predict.cost_table import OperatorCost\n"
        "from steelyard.ir.metrics import Estimate\n"
        "cost = OperatorCost(seconds=Estimate.exactly(1.0), workspace_bytes=0)\n"
        "cache = CostCache(Path(sys.argv[1]))\n"
        "for i in range(25): cache.write('here', {f'{sys.argv[2]}-{i}': cost})\n"
        "print(*cache.notes)"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", writer, str(path), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(4)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == [""] * 4
    wanted = [f"{number}-{i}" for number in range(4) for i in range(25)]
    assert sorted(CostCache(path).read("here", wanted)) == sorted(wanted)


def test_the_cache_path_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STEELYARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "steelyard" / "costs.sqlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path() == Path("~/.cache/steelyard/costs.sqlite").expanduser()
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"


# --- a cache of another user ------------------------------------------------------------------

ANOTHER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def refused(path: Path) -> str:
    """Return the note of a cache that is refused, and neither read nor written."""
    before = path.read_bytes() if path.is_file() else b""
    cache = CostCache(path)
    assert cache.read("here", ["relu"]) == {}
    cache.write("here", {"relu": COST})
    assert cache.read("here", ["relu"]) == {}
    assert (path.read_bytes() if path.is_file() else b"") == before
    (note,) = cache.notes
    assert note.endswith("costs are measured again in every run")
    return note


@AS_ROOT
def test_another_users_file_is_not_read(path: Path) -> None:
    CostCache(path).write("here", {"relu": COST})
    os.chown(path, ANOTHER, ANOTHER)
    assert f"belongs to user {ANOTHER}, and this process is of user 0" in refused(path)


@AS_ROOT
@pytest.mark.parametrize("suffix", ["-wal", "-journal", "-shm"])
def test_a_cache_with_another_users_journal_is_refused(path: Path, suffix: str) -> None:
    CostCache(path).write("here", {"relu": COST})
    beside = path.with_name(path.name + suffix)
    beside.write_bytes(b"")
    os.chown(beside, ANOTHER, ANOTHER)
    assert f"{suffix} belongs to user {ANOTHER}" in refused(path)


@AS_ROOT
def test_a_file_in_another_users_folder_is_not_read(path: Path) -> None:
    CostCache(path).write("here", {"relu": COST})
    os.chown(path.parent, ANOTHER, ANOTHER)
    assert f"{path.parent} belongs to user {ANOTHER}" in refused(path)


@AS_ROOT
def test_a_link_to_another_users_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite"
    CostCache(theirs).write("here", {"relu": COST})
    os.chown(theirs, ANOTHER, ANOTHER)
    path.parent.mkdir(mode=0o700)
    path.symlink_to(theirs)
    assert f"belongs to user {ANOTHER}" in refused(path)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_anybody_can_write_to_is_not_used(path: Path, mode: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    assert f"{path.parent} can be written by other users" in refused(path)
    assert [*path.parent.iterdir()] == []


def test_a_file_that_anybody_can_write_is_not_read(path: Path) -> None:
    CostCache(path).write("here", {"relu": COST})
    path.chmod(0o646)
    assert "can be written by other users" in refused(path)


def test_the_users_own_link_and_folder_are_used(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    CostCache(real / "costs.sqlite").write("here", {"relu": COST})
    assert real.stat().st_mode & 0o777 == 0o700
    path.parent.symlink_to(real)
    cache = CostCache(path)
    assert cache.read("here", ["relu"]) == {"relu": COST}
    assert cache.notes == ()
