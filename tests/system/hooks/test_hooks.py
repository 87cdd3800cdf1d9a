"""Compression under DistributedDataParallel and FSDP2: correct means, equal on all ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.system.dist.ranks import on_ranks
from tests.system.hooks.scenarios import SHAPES, STEPS

# One worker runs all tests, so that the ranks start once.
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.xdist_group("hooks")]
CODED = ("first", "second")


@functools.cache
def _every(count: int, device: str) -> list[dict[str, Any]]:
    return on_ranks("tests.system.hooks.scenarios:every", count=count, device=device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return str(request.param)


def _found(name: str, device: str, count: int = 2) -> list[Any]:
    """Return the results of each rank."""
    return [rank[name] for rank in _every(count, device)]


# Bounds on the error of normal random numbers, which are at most about 4.5. Each is rounded once,
# and the sum once more with more than two ranks. Ternary codes round by half of 2.5 times the mean
# magnitude. Low-rank factors represent next to nothing of random noise: the residual of a few steps
# is the whole.
_OFF = {"int8": 0.06, "bfloat16": 0.06, "ternary": 7.0, "rank 4": 15.0}
# The bytes sent, relative to an all-reduce in float32.
_SHARE = {"int8": 1 / 3.85, "bfloat16": 0.5, "ternary": 1 / 14.5, "rank 4": 1 / 12.5}
_KEEPS = ("ternary", "rank 4")


@pytest.mark.parametrize("count", [2, 3])
def test_hooks_give_the_mean_and_feed_errors_back(count: int, device: str) -> None:
    ranks = _found("added_up", device, count)
    for code, one in ranks[0].items():
        assert {rank[code]["digest"] for rank in ranks} == {one["digest"]}, code
        assert one["state"] == _saved_of(code)
        for name in SHAPES:
            is_coded = name in CODED
            assert one["off"][name] < (_OFF[code] if is_coded else 1e-6), (code, name)
            if code in _KEEPS or not is_coded:
                assert one["left"][name] < 1e-4 * STEPS, (code, name)
        # The share of int8 is too high here, because padded blocks are large for such small
        # gradients.
        assert 0.8 * _SHARE[code] < one["share"] < 1.2 * _SHARE[code], code
        assert one["off"]["first"] > 1e-4, code


def _saved_of(code: str) -> list[str]:
    starts = [f"{name}:start" for name in CODED] if code.startswith("rank") else []
    return sorted([*CODED, *starts]) if code in _KEEPS else []


@pytest.mark.parametrize("code", ["int8", "ternary", "bfloat16", "rank 4"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_model_with_hooks_trains_as_without_them(code: str, parts: int, device: str) -> None:
    """The gradients are clipped, and accumulated over two batches before they are sent."""
    for rank in _found("trains", device):
        plain, coded = rank[str(parts)], rank[f"{code} {parts}"]
        assert plain[-1] < 0.9 * plain[0]
        assert coded[0] == plain[0]
        near = {"int8": 0.01, "bfloat16": 0.01, "ternary": 0.1, "rank 4": 0.1}[code]
        assert coded[-1] == pytest.approx(plain[-1], rel=near)


def test_a_non_finite_step_leaves_no_residuals(device: str) -> None:
    for rank in _found("scaled", device):
        assert rank["skipped"] == [False, False, True, False, False, False]
        assert rank["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
        assert rank["finite"]
        assert rank["alike"]
        # The residual is about one step's gradient; with the old scale it would be far larger.
        assert rank["rest"] < 1.0


def test_unused_parameters_keep_their_residuals(device: str) -> None:
    for rank in _found("unused", device):
        assert rank["alike"]
        assert rank["finite"]
        # Torch would discard the gradient of an unused parameter, so its residual waits.
        assert rank["without"] == ["right.bias", "right.weight"]
        assert rank["kept"] == ["left.weight", "right.weight"]
        assert rank["moved"] == ["left.weight"]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("scenario", "code"), [("resumes", "ternary"), ("resumes_factors", "rank 4")]
)
def test_residuals_are_saved_and_restored_by_checkpoints(
    count: int, scenario: str, code: str, device: str
) -> None:
    for rank in _found(scenario, device, count):
        assert rank["saved"] == _saved_of(code)
        assert rank["norm"] > 1
        assert rank["apart"] < 1e-4
        assert rank["came"] > 0.1 * rank["norm"] / count
        assert rank["kept"] < 1e-4
        assert rank["refused"].startswith("the saved residual of first has shape (2, 2)")


def test_impossible_settings_are_refused_on_every_rank(device: str) -> None:
    for rank in _found("refusals", device):
        assert all(len(said.splitlines()) == 3 for said in rank.values()), rank
        assert rank["another code"].startswith("rank 1 has another codec")
        assert rank["no code"].startswith("unknown gradient codec 'int9'")
        assert rank["no exchange"].startswith("a Given exchanges no gradients")
        assert "'int8'" in rank["ternary shards"]
        assert rank["sparse"].startswith("the gradient of 0 is sparse")


def test_a_failed_exchange_raises_in_the_backward_pass(device: str) -> None:
    for said in _found("breaks", device):
        assert "gradients of some ranks did not arrive: connection closed by peer" in said
        assert "read the output of the rank that ended first" in said


@pytest.mark.parametrize("count", [2, 3])
def test_compressed_reduce_scatters_give_the_mean(count: int, device: str) -> None:
    for rank in _found("shards", device, count):
        plain, coded = rank["losses"]
        assert max(rank["apart"]) < 0.03
        assert max(rank["apart"]) > 1e-5
        assert coded[-1] == pytest.approx(plain[-1], rel=0.02)
