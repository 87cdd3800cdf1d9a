"""A process that takes the place of a rank: nothing that it sends is executed or believed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.dist.ranks import on_two_ranks

pytestmark = pytest.mark.dist


def test_data_from_an_impostor_is_refused_and_never_executed() -> None:
    said, _ = on_two_ranks("tests.system.dist.impostor:told")
    assert said.pop("ran") == "False"
    assert len(said) == 9
    for name, error in said.items():
        lines = error.splitlines()
        assert len(lines) == 3, (name, error)
        assert lines[0].startswith("rank 1 "), (name, error)
    for name in ("too long", "a little too long", "negative", "empty"):
        assert "announced a message of" in said[name], name


def test_ranks_exchange_values_of_many_lengths() -> None:
    assert on_two_ranks("tests.system.dist.impostor:honest") == [[True, True], [True, True]]


_ROOT = Path(__file__).resolve().parents[3]
_TRAIN = """
import torch
from steelyard import Workload

def workload():
    return Workload(model=torch.nn.Linear(4, 1), loss=lambda model, x: model(x).mean(),
                    batches=[torch.ones(8, 4)])
"""


@pytest.mark.parametrize("token", ["", "the secret of this run"])
def test_the_first_host_ends_in_three_lines_when_an_impostor_takes_the_second_s_place(
    token: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    mark = tmp_path / "ran"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = {
        **os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
        "STEELYARD_CACHE": str(tmp_path / "cache" / "costs.sqlite"),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0",
    }  # fmt: skip
    first = subprocess.Popen(
        [sys.executable, "-m", "steelyard", "plan", "train.py", "--quiet"],
        cwd=tmp_path, env={**environ, "RANK": "0", "STEELYARD_TOKEN": token},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    impostor = subprocess.Popen(
        [sys.executable, "-m", "tests.system.dist.impostor", port, str(mark)], cwd=_ROOT, env=environ
    )
    try:
        _, said = first.communicate(timeout=240)
        impostor.wait(timeout=240)
    finally:
        first.kill()
        impostor.kill()
    assert not mark.exists()
    assert first.returncode == 4, said
    lines = said.splitlines()
    (begin,) = [n for n, line in enumerate(lines) if line.startswith("steelyard: ")]
    # Torch's own store also logs a warning when the other end closes a connection.
    told = [line for line in lines[begin:] if not line.startswith("[W")]
    assert len(told) == 3, said
    assert ("does not have this rank's STEELYARD_TOKEN" if token else "sent an invalid message") in told[0]
