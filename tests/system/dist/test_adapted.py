"""Plans that change while they run: on all ranks at the same time if the link changes, and into
a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.dist.adapted import STEPS
from tests.system.dist.ranks import on_two_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.long]


def test_ranks_switch_gradient_codecs_when_the_link_changes(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    one = _adapted("adapted")
    _check_slower(one["slower"])
    faster = one["faster"]
    assert faster["files"]
    assert not faster["codes"]
    assert faster["predicted_then"] < faster["predicted"] / 2
    assert not one["same"]["codes"]


def test_compiled_steps_are_recompiled_for_the_new_plan(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    _check_slower(_adapted("compiled")["slower"])


def test_idle_ranks_rejoin_with_the_same_weights(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    one, other = on_two_ranks("tests.system.dist.adapted:standing_by")
    assert one["losses"] == other["losses"] == pytest.approx(one["expected"], rel=1e-4)
    assert (one["trained"], other["trained"]) == ([True] * 3, [True, False, True])
    assert one["alike"]
    assert other["alike"]
    assert other["error"] < 1e-5


def _adapted(scenario: str) -> dict[str, Any]:
    """Return the report of the first rank; the other one does the same."""
    one, other = on_two_ranks(f"tests.system.dist.adapted:{scenario}")
    for name, found in one.items():
        assert found["losses"] == other[name]["losses"], name
        assert len(found["losses"]) == STEPS
        assert found["losses"][-1] < found["losses"][0], name
        assert found["codes"] == other[name]["codes"], name
        assert found["as_written"], name
        assert len(found["files"]) <= 1, "it went to and fro"
        # The original plan file is unchanged.
        assert ("ternary_gradients" in found["old"]) == (name == "faster")
    return dict(one)


def _check_slower(slower: dict[str, Any]) -> None:
    assert len(slower["files"]) == 1
    assert slower["files"] == [slower["named"]]
    assert slower["codes"], "at a hundredth of the rate codes are faster"
    (turned,) = (note for note in slower["notes"] if "the plan was switched" in note)
    assert "the link between ranks now carries 0.2 MB/s" in turned
    # If the link is known to be slow, no step sends uncompressed gradients first.
    assert not any("sent gradients uncompressed" in note for note in slower["notes"])
    assert "probe" in slower["loses"]
