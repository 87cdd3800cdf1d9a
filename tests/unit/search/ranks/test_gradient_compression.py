"""The codec of each gradient: a less lossy one, or none, wherever that costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.errors import Mismatch
from steelyard.ir.gradient_codec import BFLOAT16, INT8, LARGEST, TERNARY, Codec
from steelyard.ir.rule import Rule
from steelyard.plans.trade import codecs_of
from steelyard.search.ranks.gradient_compression import CompressedCandidate, Weighing
from steelyard.trades import TRADES
from steelyard.trades.gradient_compression import TernaryGradientsRule, TopKGradientsRule

# Seconds of the step for each gradient, by its number of bits.
_SECONDS = {
    "hidden": {32: 0.0, 16: 0.0, 8: 0.0, 2: 0.0},
    "half hidden": {32: 1.0, 16: 0.0, 8: 0.0, 2: 0.0},
    "exposed": {32: 4.0, 16: 2.0, 8: 1.0, 2: 0.5},
    "dear to code": {32: 0.0, 16: 0.1, 8: 0.4, 2: 0.5},
}
_REST = 10.0


def _counted(rules: tuple[Rule, ...]) -> Any:
    bits = {rule.parameter: rule.codec.bits for rule in rules}
    seconds = sum(taken[bits.get(name, 32)] for name, taken in _SECONDS.items())
    return SimpleNamespace(seconds=_REST + seconds, nbytes=0)


def _layouts(counted: Callable[[tuple[Rule, ...]], Any]) -> Any:
    return SimpleNamespace(candidates=SimpleNamespace(counted=counted, trades=TRADES))


def _gentler(names: list[str], *codecs: Codec) -> dict[str, int]:
    """Return the number of bits of each gradient; at first all have 2."""
    weighing = Weighing(
        layouts=_layouts(_counted),
        codecs=codecs or codecs_of(TRADES),
    )
    rules = tuple(sorted(TernaryGradientsRule(parameter=name) for name in names))
    way = CompressedCandidate(
        codec=TERNARY, trade="ternary_gradients", rules=rules, without=(),
        seconds=_counted(rules).seconds, nbytes=0,
    )  # fmt: skip
    found = weighing.gentler(way)
    assert found.seconds == pytest.approx(_counted(found.rules).seconds)
    assert found.seconds <= way.seconds * 1.002
    return {rule.parameter: rule.codec.bits for rule in found.rules}


def test_hidden_gradients_stay_exact_and_half_hidden_ones_use_16_bits() -> None:
    assert _gentler([*_SECONDS]) == {"exposed": 2, "half hidden": 16}


def test_an_unavailable_codec_is_not_taken() -> None:
    assert _gentler([*_SECONDS], INT8, TERNARY) == {"exposed": 2, "half hidden": 8}
    assert _gentler([*_SECONDS], TERNARY) == {"exposed": 2, "half hidden": 2}


def test_a_candidate_keeps_the_codec_it_is_named_for() -> None:
    assert _gentler(["hidden"], BFLOAT16, TERNARY) == {"hidden": 2}


def test_slow_low_rank_factors_do_not_rule_out_other_codecs() -> None:
    """They are exchanged in two steps, one after the other."""

    def counted(rules: tuple[Rule, ...]) -> Any:
        late = sum(rule.trade == "low_rank_gradients" for rule in rules)
        plain = 2 - len(rules)
        return SimpleNamespace(seconds=_REST + late + plain, nbytes=0)

    weighing = Weighing(
        layouts=_layouts(counted),
        codecs=codecs_of(TRADES),
    )
    rules = tuple(TopKGradientsRule(parameter=name) for name in ("one", "other"))
    way = CompressedCandidate(
        codec=LARGEST, trade="top_k_gradients", rules=rules, without=(), seconds=_REST, nbytes=0
    )
    codecs = {rule.codec for rule in weighing.gentler(way).rules}
    assert codecs == {LARGEST, BFLOAT16}


def test_a_gradient_that_cannot_go_in_a_milder_code_keeps_its_own() -> None:
    """Factors of a thin matrix are hardly smaller, and a plan that requests them is refused."""

    def counted(rules: tuple[Rule, ...]) -> Any:
        asked = [rule for rule in rules if rule.trade == "low_rank_gradients"]
        if any(rule.parameter == "thin" for rule in asked):
            raise Mismatch("of thin", expected="a matrix", remedy="plan again")
        is_largest = sum(rule.trade == "top_k_gradients" for rule in rules)
        return SimpleNamespace(seconds=_REST - is_largest - len(asked), nbytes=0)

    weighing = Weighing(
        layouts=_layouts(counted),
        codecs=codecs_of(TRADES),
    )
    rules = tuple(TopKGradientsRule(parameter=name) for name in ("thin", "wide"))
    way = CompressedCandidate(
        codec=LARGEST, trade="top_k_gradients", rules=rules, without=(), seconds=_REST - 2,
        nbytes=0,
    )  # fmt: skip
    found = {rule.parameter: rule.trade for rule in weighing.gentler(way).rules}
    assert found == {"thin": "top_k_gradients", "wide": "low_rank_gradients"}
