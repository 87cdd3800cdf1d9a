"""A checkpoint is complete or refused, and a resumed run equals one that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from steelyard.errors import BadInput, CheckpointError, CheckpointRefused
from steelyard.run.checkpoint import state as checkpoint
from steelyard.run.checkpoint.directory import CheckpointFolder, verify
from steelyard.run.checkpoint.json_values import Unplain, from_plain, to_plain
from steelyard.run.checkpoint.position import refuse_impossible
from steelyard.run.checkpoint.state import Position
from steelyard.run.data_feed import Feed
from steelyard.run.rng_state import random_state
from tests.zoo.reference import assert_same_model

ROOT = Path(__file__).resolve().parents[4]


class Odd(nn.Module):
    """A model with tensors of every kind."""

    def __init__(self, *, fill: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), fill).t())
        self.tied = self.weight
        self.scalar = nn.Parameter(torch.tensor(fill))
        self.brief = nn.Parameter(torch.full((3,), fill, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.full((2,), complex(fill, -fill), dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.full((2,), complex(fill, fill), dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, fill > 1, False]))
        self.register_buffer("count", torch.tensor(int(fill * 8)))
        self.register_buffer("unsigned", torch.full((3,), int(fill * 8), dtype=torch.uint16))
        self.register_buffer("tiny", torch.full((3,), fill).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("apart", torch.full((4,), fill), persistent=False)
        whole = torch.full((8,), fill)
        self.register_buffer("left", whole[:4])
        self.register_buffer("right", whole[4:])
        self.register_buffer("row", torch.arange(4).expand(3, 4))
        self.register_buffer("conjugate", torch.full((2,), complex(1, fill)).conj())


def position(step: int = 7) -> Position:
    state = random_state({})
    return Position(step=step, epoch=min(1, step), taken=min(3, step), now=state, began=state)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    for _ in range(times):
        for index, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (index + 1))
        optimizer.step()


def saved(folder: Path, model: nn.Module, optimizer: Any = None, step: int = 7) -> Path:
    return CheckpointFolder(folder).add(
        step,
        lambda path: checkpoint.save(
            path, model=model, optimizer=optimizer, position=position(step), plan="7f3c"
        ),
    )


def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path: Path) -> None:
    model, other = Odd(fill=2.5), Odd()
    path = saved(tmp_path, model)
    verify(path)
    strides = {name: t.stride() for name, t in other.named_parameters()}
    where = checkpoint.load(path, model=other, optimizer=None)
    assert_same_model(model, other)
    assert other.tied is other.weight
    assert {name: t.stride() for name, t in other.named_parameters()} == strides
    assert (where.step, where.epoch, where.taken) == (7, 1, 3)


def test_the_model_file_holds_the_state_dict_with_tied_weights_once(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    model = Odd(fill=2.5)
    path = saved(tmp_path, model)
    names = set(load_file(path / "model.safetensors"))
    assert names == set(model.state_dict()) - {"tied"}
    assert json.loads((path / "state.json").read_bytes())["aliases"] == {"tied": "weight"}
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", "model.safetensors", "random.safetensors", "state.json"
    ]  # fmt: skip


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Parameter(torch.randn(4, 3).t())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Small(), Small()
    optimizer, fresh = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    optimizer.param_groups[0]["weight_decay"] = 0.01
    stepped(model, optimizer)
    path = saved(tmp_path, model, optimizer)
    verify(path)
    checkpoint.load(path, model=other, optimizer=fresh)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        state, copy = optimizer.state[p], fresh.state[q]
        assert state.keys() == copy.keys()
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert (value.dtype, value.stride()) == (copy[key].dtype, copy[key].stride())
    stepped(model, optimizer, 3)
    stepped(other, fresh, 3)
    assert_same_model(model, other)
    ours, theirs = optimizer.param_groups[0], fresh.param_groups[0]
    assert {k: v for k, v in ours.items() if k != "params"} == {
        k: v for k, v in theirs.items() if k != "params"
    }
    assert isinstance(theirs.get("betas", ()), tuple)


# --- damaged checkpoints --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    return saved(tmp_path_factory.mktemp("whole"), model, optimizer)


FILES = (
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)


def refused(path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        verify(path)
    assert name in str(error.value)
    assert len(str(error.value).splitlines()) == 3


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), name=st.sampled_from(FILES))
def test_every_flipped_bit_is_refused(whole: Path, data: st.DataObject, name: str) -> None:
    path = whole / name
    before = path.read_bytes()
    place = data.draw(st.integers(0, len(before) - 1))
    changed = bytearray(before)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(changed)
        refused(whole, whole.name)
    finally:
        path.write_bytes(before)
    verify(whole)


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), name=st.sampled_from(FILES), longer=st.binary(min_size=1, max_size=9))
def test_every_truncation_and_every_tail_is_refused(
    whole: Path, data: st.DataObject, name: str, longer: bytes
) -> None:
    path = whole / name
    before = path.read_bytes()
    shorter = before[: data.draw(st.integers(0, len(before) - 1))]
    try:
        for changed in (shorter, before + longer):
            path.write_bytes(changed)
            refused(whole, name)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(whole, tmp_path / whole.name)
    (copy / name).unlink()
    refused(copy, name)


def test_an_extra_file_a_link_and_a_folder_are_refused(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    (copy / "more.json").write_text("{}")
    refused(copy, "more.json is not in the manifest")
    (copy / "more.json").unlink()
    for name in FILES:
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        refused(copy, name)
        (copy / name).unlink()
        (copy / name).mkdir()
        refused(copy, name)
        (copy / name).rmdir()
        (tmp_path / name).rename(copy / name)
    verify(copy)
    (tmp_path / "link").symlink_to(copy)
    refused(tmp_path / "link", "link")


HOSTILE = (
    "../model.safetensors",
    "/etc/passwd",
    "a/b.json",
    "model.safetensors\n",
    "modèle.json",
    "data.pkl",
    ".json",
    "",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_may_only_name_files_beside_it(whole: Path, tmp_path: Path, name: str) -> None:
    from steelyard.run.checkpoint.directory import canonical

    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    manifest = json.loads((copy / "manifest.json").read_bytes())
    manifest["files"][name] = manifest["files"]["model.safetensors"]
    (copy / "manifest.json").write_bytes(canonical(manifest))
    refused(copy, "an invalid entry")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b"null\n",
        b'{"files": {}, "files": {}}',
        b"\xff\xfe",
        b'{"files": NaN}',
        b" " * 100_000,
        b'{\n "files": [],\n "format": "steelyard checkpoint manifest 1"\n}\n',
        b'{\n "files": {\n  "a.json": 3\n },\n "format": "steelyard checkpoint manifest 1"\n}\n',
    ],
)
def test_a_hostile_manifest_is_refused(whole: Path, tmp_path: Path, text: bytes) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    (copy / "manifest.json").write_bytes(text)
    refused(copy, "manifest.json")


def resigned(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json and adjust the manifest, as an attacker would."""
    from steelyard.run.checkpoint.directory import _write_manifest

    state = json.loads((copy / "state.json").read_bytes())
    change(state)
    (copy / "state.json").write_text(json.dumps(state))
    (copy / "manifest.json").unlink()
    _write_manifest(copy)
    verify(copy)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown key": lambda s: s.update(more=1),
    "key gone": lambda s: s.pop("step"),
    "wrong type": lambda s: s.update(step="7"),
    "another format": lambda s: s.update(format="steelyard checkpoint 9"),
    "no such tensor": lambda s: s["optimizer"]["state"]["two"]["exp_avg"].update(tensor="gone"),
    "no such dtype": lambda s: s["optimizer"]["state"]["two"]["exp_avg"].update(dtype="gone"),
    "a stride that is none": lambda s: s["optimizer"]["state"]["two"]["exp_avg"].update(stride=[1]),
    "no such parameter": lambda s: s["optimizer"]["state"].update(gone={"step": 1}),
    "an unknown spelling": lambda s: s["optimizer"]["groups"][0]["settings"].update(lr={"x": 1}),
    "groups gone": lambda s: s["optimizer"].pop("groups"),
    "another optimizer": lambda s: s["optimizer"].update(kind="os.system"),
    "random states gone": lambda s: s["random"].pop("now"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused_and_changes_nothing(
    whole: Path, tmp_path: Path, name: str
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    resigned(copy, FORGED[name])
    model = Small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(copy, model=model, optimizer=optimizer)
    assert len(str(error.value).splitlines()) == 3
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not optimizer.state


IMPOSSIBLE: tuple[tuple[str, Any], ...] = (
    ("step", -5), ("step", 0), ("step", 10**15), ("step", 10**400), ("step", 7.0), ("step", "7"),
    ("step", True), ("step", None), ("step", 8), ("epoch", -1), ("epoch", 1.5), ("epoch", 10**300),
    ("taken", -3), ("taken", "many"), ("taken", [3]),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=lambda x: str(x)[:12])
def test_an_impossible_position_in_a_run_is_refused_with_exit_code_2(
    whole: Path, tmp_path: Path, name: str, value: Any
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    resigned(copy, lambda state: state.update({name: value}))
    (tmp_path / "LATEST").write_text(f"{copy.name}\n")
    model = Small()
    attempts: list[Callable[[], object]] = [
        lambda: checkpoint.load(copy, model=model, optimizer=None),
        # The check needs no torch and runs before planning; it covers the newest checkpoint of a
        # folder and a named one.
        lambda: refuse_impossible(True, tmp_path),
        lambda: refuse_impossible(copy, None),
    ]
    for attempt in attempts:
        with pytest.raises(CheckpointRefused, match=name) as error:
            attempt()
        assert error.value.exit_code == 2
        assert len(str(error.value).splitlines()) == 3


def test_checks_that_need_the_model_are_left_to_the_resuming_run(
    whole: Path, tmp_path: Path
) -> None:
    refuse_impossible(False, None)
    refuse_impossible(True, tmp_path)
    refuse_impossible(tmp_path / "step-000001", None)
    refuse_impossible(whole, None)


def test_optimizer_settings_that_differ_from_the_script_are_reported(tmp_path: Path) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    stepped(model, optimizer)
    path = saved(tmp_path, model, optimizer)

    def told(**settings: Any) -> list[str]:
        notes: list[str] = []
        other = Small()
        now = torch.optim.AdamW(other.parameters(), **settings)
        checkpoint.load(path, model=other, optimizer=now, note=notes.append)
        assert now.param_groups[0]["lr"] == 1e-3
        return notes

    assert told(lr=1e-3, weight_decay=0.1) == []
    assert told(lr=torch.tensor(1e-3, dtype=torch.float64), weight_decay=0.1) == []
    assert told(lr=0.01, weight_decay=0.1) == [
        "learning rate 0.001 from the checkpoint is used; the script says 0.01"
    ]
    assert told(lr=1e-3, weight_decay=0.2, betas=(0.8, 0.99)) == [
        "betas (0.9, 0.999) from the checkpoint is used; the script says (0.8, 0.99)",
        "weight decay 0.1 from the checkpoint is used; the script says 0.2",
    ]


def test_differing_settings_name_their_parameter_group(tmp_path: Path) -> None:
    def made(second: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Small()
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": second}]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    model, optimizer = made(0.2)
    stepped(model, optimizer)
    notes: list[str] = []
    other, now = made(0.3)
    path = saved(tmp_path, model, optimizer)
    checkpoint.load(path, model=other, optimizer=now, note=notes.append)
    assert notes == [
        "parameter group 1: learning rate 0.2 from the checkpoint is used; the script says 0.3"
    ]


def test_a_checkpoint_of_another_model_shows_the_difference(whole: Path) -> None:
    model = nn.Module()
    model.one = nn.Linear(3, 5)
    model.three = nn.Parameter(torch.ones(2))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(whole, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    text = str(error.value)
    assert "one.weight: F32[4, 3] in the checkpoint, F32[5, 3] in the model" in text
    assert "three: nothing in the checkpoint, F32[2] in the model" in text
    assert "two: F32[3, 4] in the checkpoint, nothing in the model" in text
    assert len(text.splitlines()) <= 12


def test_unsavable_state_is_refused_before_the_run() -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> Any:
            return object()

    with pytest.raises(CheckpointError, match="extra state"):
        checkpoint.check_savable(Extra())
    sparse = nn.Module()
    sparse.register_buffer("b", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"b is torch\.sparse_coo"):
        checkpoint.check_savable(sparse)
    checkpoint.check_savable(Odd())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(PLAIN)
def test_plain_values_survive_json(value: Any) -> None:
    again = from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))
    assert repr(again) == repr(value)


def test_non_plain_values_are_refused() -> None:
    for value in (object(), {1: 2}, [torch.ones(1)], len):
        with pytest.raises(Unplain):
            to_plain(value)
    for spelt in ([1], {"float": "1e3"}, {"tuple": [], "list": []}, {"dict": []}, {}):
        with pytest.raises(Unplain):
            from_plain(spelt)


# --- the folder -----------------------------------------------------------------------------------


def words(path: Path) -> None:
    (path / "state.json").write_text("{}")


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_the_newest_are_kept_and_the_latest_is_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20, 30, 1_000_000):
        folder.add(step, words)
    assert names(tmp_path) == ["LATEST", "step-000030", "step-1000000"]
    assert folder.latest().name == "step-1000000"
    assert folder.before(folder.latest()) == tmp_path / "step-000030"


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.add(10, words)
    before = names(tmp_path)

    def full(path: Path) -> None:
        words(path)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device") as error:
        folder.add(20, full)
    assert len(str(error.value).splitlines()) == 3
    assert names(tmp_path) == before
    verify(folder.latest())


@pytest.mark.parametrize("text", ["", "step-000099\n", "../x\n", "step-000010\nmore", "\u00e9"])
def test_a_damaged_latest_checkpoint_names_the_others(tmp_path: Path, text: str) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.add(10, words)
    (tmp_path / "LATEST").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        folder.latest()
    assert error.value.remedy == f"--resume {tmp_path / 'step-000010'}"


def test_checkpoints_of_an_abandoned_course_are_set_aside(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for _ in range(2):
        for step in (10, 20, 30):
            if not (tmp_path / f"step-{step:06d}").exists():
                folder.add(step, words)
        folder.go_on_from(tmp_path / "step-000010")
    assert names(tmp_path) == [
        "LATEST", "aside-step-000020", "aside-step-000020.2", "aside-step-000030",
        "aside-step-000030.2", "step-000010",
    ]  # fmt: skip
    assert folder.latest().name == "step-000010"


def test_two_runs_may_not_save_into_one_folder(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    refused_here = pytest.raises(CheckpointError, match="another run")
    with folder.locked(), refused_here, CheckpointFolder(tmp_path).locked():
        pass
    with folder.locked():
        pass


SAVER = """
    import sys, torch
    from pathlib import Path
    from steelyard.run.checkpoint import state as checkpoint
    from steelyard.run.checkpoint.state import Position
    from steelyard.run.checkpoint.directory import CheckpointFolder
    from steelyard.run.rng_state import random_state
    folder = CheckpointFolder(Path(sys.argv[1]), keep=2)
    model = torch.nn.Linear(700, 700)
    state = random_state({})
    def save(step):
        with torch.no_grad():
            model.weight.fill_(step)
        folder.add(step, lambda path: checkpoint.save(path, model=model, optimizer=None, plan="",
            position=Position(step=step, epoch=0, taken=step, now=state, began=state)))
"""


def child(source: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVER) + textwrap.dedent(source),
         *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=ROOT,
    )  # fmt: skip


def test_killed_while_saving_the_latest_is_whole(tmp_path: Path) -> None:
    """The process saves without a pause, so that nearly every kill interrupts a save."""
    interrupted = 0
    # The killed process is a fork of one that has imported torch.
    process = child(
        """
        import os
        for line in sys.stdin:
            saver = os.fork()
            if saver:
                print(saver, flush=True)
                os.waitpid(saver, 0)
                print("ended", flush=True)
                continue
            step = int(line)
            while True:
                step += 1
                save(step)
        """,
        tmp_path,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for attempt in range(5):
            print(1000 * attempt, file=process.stdin, flush=True)
            saver = int(process.stdout.readline())
            time.sleep(0.15 + 0.037 * attempt)
            os.kill(saver, signal.SIGKILL)
            assert process.stdout.readline() == "ended\n"
            interrupted += any(p.name.startswith(".saving-") for p in tmp_path.iterdir())
            folder = CheckpointFolder(tmp_path)
            latest = folder.latest()
            verify(latest)
            model = nn.Linear(700, 700)
            step = checkpoint.load(latest, model=model, optimizer=None).step
            assert (model.weight == step).all()
        process.stdin.close()
    assert interrupted


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: a write fails halfway through."""
    process = child(
        """
        import resource
        from steelyard.errors import CheckpointError
        save(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(2)
        except CheckpointError as error:
            print(error)
        """,
        tmp_path,
    )
    with process:
        said = process.communicate()[0]
    assert "step-000002 could not be saved" in said
    assert len(said.splitlines()) == 3
    assert names(tmp_path) == ["LATEST", "step-000001"]
    verify(CheckpointFolder(tmp_path).latest())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be saved"):
        CheckpointFolder(tmp_path / "file").add(1, words)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o027])
def test_all_files_of_a_checkpoint_have_the_mode_of_the_users_umask(
    umask: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        model = Odd()
        optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
        folder = CheckpointFolder(tmp_path / "saved")
        whole = folder.add(
            7,
            lambda at: checkpoint.save(
                at, model=model, optimizer=optimizer, position=position(), plan="",
                lost={"weight": torch.zeros(2)},
            ),
        )  # fmt: skip
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in whole.iterdir()}
    assert {"manifest.json", "state.json", "model.safetensors"} <= files.keys()
    assert set(files.values()) == {0o666 & ~umask}
    assert (tmp_path / "saved" / "LATEST").stat().st_mode & 0o777 == 0o666 & ~umask
    assert whole.stat().st_mode & 0o777 == 0o777 & ~umask
    verify(whole)


LARGE = 2**62


def _stretched(state: dict[str, Any]) -> None:
    moments = state["optimizer"]["state"]
    spelt = next(v for s in moments.values() for v in s.values() if len(v.get("stride", ())) == 2)
    spelt["stride"][0] = 2**40


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(step=LARGE),
        lambda state: state.update(step=-5),
        lambda state: state.update(taken=LARGE),
        lambda state: state.update(epoch=LARGE),
        lambda state: state.update(epoch=-1),
        _stretched,
    ],
)
def test_numbers_that_would_be_waited_for_or_allocated_are_refused(
    whole: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    torch.manual_seed(1)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    resigned(copy, change)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(copy, model=model, optimizer=optimizer)
    assert len(str(error.value).splitlines()) == 3


def test_a_position_beyond_the_data_is_refused_quickly(tmp_path: Path) -> None:
    feed = Feed([1, 2, 3])
    with pytest.raises(BadInput, match="an epoch has 3 batches, but the checkpoint is after 4611"):
        feed.go_to(epoch=1, taken=LARGE, began=random_state({}))
    feed.go_to(epoch=1, taken=2, began=random_state({}))
    assert (feed.epoch, feed.taken, feed.next()) == (1, 2, 3)
