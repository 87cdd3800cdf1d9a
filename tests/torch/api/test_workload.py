"""The workload of a script, and how it is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.api import Workload, load_workload
from steelyard.capture.tracing.joint_graph import trace
from steelyard.errors import BadInput

SCRIPT = """
import functools, torch, steelyard as sy

def workload():
    model = torch.nn.Linear(2, 2)
    return sy.Workload(model, lambda m, b: m(b).sum(), [torch.ones(4, 2)])
"""


MAKER = """
import elsewhere

class Make:
    def __call__(self, size=2):
        return elsewhere.workload()

workload = Make()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from elsewhere import workload", ""),
        ("from elsewhere import workload as big", ":big"),
        ("import elsewhere, functools\nworkload = functools.partial(elsewhere.workload)", ""),
        (MAKER, ""),
    ],
)
def test_any_callable_of_that_name_is_the_workload(folder: Path, text: str, name: str) -> None:
    Path("elsewhere.py").write_text(SCRIPT)
    Path("script.py").write_text(text)
    assert isinstance(load_workload(f"script.py{name}"), Workload)


def test_a_script_does_not_see_the_arguments_of_steelyard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["steelyard", "plan", "script.py", "--memory", "1GiB"]
    monkeypatch.setattr(sys, "argv", given)
    parse = "argparse.ArgumentParser().parse_args()"
    within = SCRIPT.replace("    model", f"    {parse}\n    model", 1)
    Path("script.py").write_text(f"import argparse, sys\n{parse}\nseen = sys.argv\n{within}")
    load_workload("script.py")
    assert sys.modules["script"].seen == ["script.py"]
    assert sys.argv is given
    Path("script.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_workload("script.py")
    assert sys.argv is given


@pytest.mark.parametrize("batches", [torch.ones(4, 2), lambda: torch.ones(4, 2)])
def test_a_single_tensor_is_refused_as_a_list_of_batches(batches: Any) -> None:
    workload = Workload(torch.nn.Linear(2, 2), lambda m, b: m(b).sum(), batches)
    with pytest.raises(BadInput, match=r"one tensor of shape \[4, 2\]"):
        workload.first_batch()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "x = 1\ndef other(): pass\ndef loss(model, batch): pass\nclass Model: pass",
            r"no function workload\(\)(.|\n)*\(other\)",
        ),
        ("def loss(model, batch): pass", r"no function workload\(\)(.|\n)*next: write it$"),
        ("workload = 3", r"no function workload\(\)"),
        ("def workload(size, *, depth): pass", r"workload\(size, \*, depth\) .* needs arguments"),
        ("def workload(): return 3", r"returned a int"),
    ],
)
def test_an_invalid_workload_is_refused(folder: Path, text: str, said: str) -> None:
    Path("script.py").write_text(text)
    with pytest.raises(BadInput, match=said):
        load_workload("script.py")


def test_of_two_scripts_of_one_name_each_is_captured(folder: Path) -> None:
    drawn = []
    for line, loss in (
        ("import math", "m(b).sum() * math.pi"),
        ("from torch import nn", "nn.functional.relu(m(b)).sum()"),
    ):
        text = SCRIPT.replace("m(b).sum()", "loss(m, b)") + f"\ndef loss(m, b): return {loss}\n"
        (folder / "train.py").write_text(f"{line}\n{text}")
        made = load_workload("train.py")
        traced = trace(made.model, made.loss, made.first_batch(), decompositions={})
        drawn.append("relu" in str(traced.joint.graph))
    assert drawn == [False, True]
