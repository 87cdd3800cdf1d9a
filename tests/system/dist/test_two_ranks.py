"""A step on two ranks of gloo: its results, memory and bytes, compared with the prediction.

There is one test for each start of the ranks, which takes most of the time.
"""

from __future__ import annotations

import os
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from tests.system.dist.ranks import on_two_ranks

pytestmark = pytest.mark.dist

# 127.0.0.1 in the format of the kernel.
_LOOPBACK = "0100007F"


def test_bucketed_all_reduces_train_as_one_device() -> None:
    ranks = on_two_ranks("tests.system.dist.scenarios:reductions")
    for rank in ranks:
        assert set(rank["listening"]) == {_LOOPBACK}
        # The policy is set for threads by the names that gloo gives them.
        assert set(rank["policies"]) == {os.SCHED_BATCH}
        assert rank["connections"] > 0
        assert len(rank["programs"]) == 6
        for name, program in rank["programs"].items():
            _as_on_one_device(name, program)
            _sent_as_predicted(name, program)
            assert program["predicted_peak_bytes"] == program["peak_bytes"], name
            # Both ranks get the same bits with every bucket size and every window.
            assert program["digests"] == ranks[0]["programs"]["one each, window 0"]["digests"], name


def test_a_diverging_run_falls_back_to_milder_codecs(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with another codec is bound for the same batch; the loss says nothing about the
    batch."""
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    for rank in on_two_ranks("tests.system.dist.coded:diverged"):
        assert isfinite(rank["losses"][0])
        assert len(rank["losses"]) == 3
        assert not any(map(isfinite, rank["losses"][1:]))


def test_sharded_parameters_train_as_one_device() -> None:
    for rank in on_two_ranks("tests.system.dist.scenarios:parameters"):
        programs = rank["programs"]
        assert len(programs) == 11
        for name, program in programs.items():
            _as_on_one_device(name, program)
            _sent_as_predicted(name, program)
            assert program["predicted_peak_bytes"] == program["peak_bytes"], name
            if name.startswith("all"):
                assert program["digests"] == rank["expected_digests"], name
        keep, again = (programs[f"all, {kind}, window 0"] for kind in ("keep", "re-gather"))
        assert again["peak_bytes"] < 0.8 * keep["peak_bytes"]
        assert again["handed_bytes"] > keep["handed_bytes"]
        assert again["peak_bytes"] < programs["all, re-gather, window None"]["peak_bytes"]


@pytest.mark.parametrize("scenario", ["transformers", "others"])
def test_sharded_tensors_train_as_one_device(scenario: str) -> None:
    for rank in on_two_ranks(f"tests.system.dist.parts:{scenario}"):
        for name, step in rank.items():
            assert step["in_parts"] > 0, name
            assert step["error"] < 1e-5, name
            _sent_as_predicted(name, step)
            assert step["predicted_peak_bytes"] == step["peak_bytes"], name


def _as_on_one_device(name: str, program: dict[str, Any]) -> None:
    # An error of zero would mean that the two halves were not added up separately.
    assert 0 < program["error"] < 1e-6, name


def _sent_as_predicted(name: str, program: dict[str, Any]) -> None:
    assert program["executed"] == program["planned"], name
    # On two ranks a ring sends exactly its input: half of it twice, or a share once.
    assert program["sent_bytes"] == program["handed_bytes"] > 0, name
