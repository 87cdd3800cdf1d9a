"""Values in 8 bits are decoded before they are read, and only gradients are affected by the
error."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Phase
from steelyard.ir.program import Program
from steelyard.ir.quantized_activation import BLOCK, DECODE, ENCODE, coded_bytes
from steelyard.ir.rule import to_rules
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.trades.offload import Offload, OffloadRule, with_transfers
from steelyard.trades.quantize_activations import (
    QuantizeActivations,
    QuantizeActivationsRule,
    quantizable,
    with_codes,
)
from steelyard.trades.recompute import recomputable, with_copies
from tests.support.graphs import Whole, in_floats, random_step, tower

COSTS = CostTable(
    device=Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
)


def coded(seed: int) -> tuple[Program, Program, frozenset[str]]:
    """Return a random step with some copies, without and with 8-bit values."""
    rng = random.Random(seed)
    plain = Program.plain(in_floats(random_step(seed, num_values=12)))
    again = [v for v in sorted(recomputable(plain.graph)) if rng.random() < 0.3]
    before = with_copies(plain, again)
    able = sorted(quantizable(before) - {i.node for i in before.recomputed})
    chosen = frozenset(v for v in able if rng.random() < 0.7)
    return before, with_codes(before, chosen), chosen


@pytest.mark.parametrize("seed", range(40))
def test_existing_instructions_keep_their_order(seed: int) -> None:
    before, after, _ = coded(seed)
    nodes = after.graph.by_name

    def computed(program: Program) -> list[str]:
        return [i.value for i in program.instructions if not i.sink and not nodes[i.node].is_free]

    own = [v for v in computed(after) if v not in nodes or nodes[v].op not in (ENCODE, DECODE)]
    assert own == computed(before)
    assert after.problems() == []
    assert after.graph.problems() == []
    assert after.flops == before.flops
    assert after.graph.fingerprint == before.graph.fingerprint
    assert after.graph.model_fingerprint == before.graph.model_fingerprint


@pytest.mark.parametrize("seed", range(40))
def test_quantized_values_are_not_read_between_encode_and_decode(seed: int) -> None:
    _, after, chosen = coded(seed)
    nodes = after.graph.by_name
    gone = frozenset(after.quantized)
    assert gone <= chosen
    on = {s for v in gone for s in after.graph.storages_of(v)}
    for line in after.instructions:
        if line.phase is Phase.BACKWARD and not line.sink:
            for name in line.inputs:
                is_own = name in nodes and nodes[name].op != DECODE
                assert not (is_own and on.intersection(after.graph.storages_of(name))), line
    assert len([n for n in after.graph.nodes if n.op == DECODE]) == len(gone)


def test_values_are_encoded_after_their_last_forward_use_and_decoded_before_backward() -> None:
    value = "blocks.0:act"
    after = with_codes(Program.plain(in_floats(tower(3))), [value])
    ops = [i.value for i in after.instructions if not i.sink]
    assert ops[ops.index(f"{value}.coded") - 1] == "blocks.1:up"
    assert ops[ops.index(f"{value}.decoded") + 1] == "blocks.1:d_weight"
    phases = {i.value: i.phase for i in after.instructions}
    assert phases[f"{value}.coded"] is Phase.FORWARD
    assert phases[f"{value}.decoded"] is Phase.BACKWARD


def test_the_peak_falls_by_the_bytes_that_quantization_saves() -> None:
    plain = Program.plain(in_floats(tower(6)))
    value = "blocks.0:act"
    before, after = predict(plain, COSTS), predict(with_codes(plain, [value]), COSTS)
    nbytes = plain.graph.by_name[value].outputs[0].nbytes
    assert before.peak.nbytes - after.peak.nbytes == nbytes - coded_bytes(nbytes // 4, dims=1)
    assert after.peak.resident_bytes == before.peak.resident_bytes
    assert any(h.what == "aten.gelu (in 8 bits)" for h in after.peak.alive)
    assert after.metrics.step_seconds.value > before.metrics.step_seconds.value
    assert (before.metrics.accuracy_loss, after.metrics.accuracy_loss) == ("exact", "unknown")


def test_a_scale_is_shared_by_a_block() -> None:
    assert coded_bytes(1, dims=0) == 5
    assert coded_bytes(BLOCK, dims=2) == BLOCK + 4 + 16
    assert coded_bytes(BLOCK + 1, dims=1) == BLOCK + 1 + 8 + 8


def test_integers_and_random_masks_are_not_quantized() -> None:
    plain = Program.plain(random_step(3, num_values=12))
    assert not quantizable(plain)  # its values are bytes
    offers, (refusal,) = QuantizeActivations().offers(plain, Whole(plain.graph))
    assert not offers
    assert "no floating-point value" in refusal.reason


def test_one_value_in_two_rules_is_an_error() -> None:
    graph = in_floats(tower(3))
    rules = (
        *to_rules(graph, [f"blocks.{i}:up" for i in range(3)], QuantizeActivationsRule),
        *to_rules(graph, ["blocks.1:up"], QuantizeActivationsRule),
    )
    with pytest.raises(Mismatch, match="same value"):
        QuantizeActivations().rewrite(Program.plain(graph), rules, Whole(graph))


def test_recomputed_values_are_not_quantized_too() -> None:
    graph = in_floats(tower(3))
    program = with_copies(Program.plain(graph), ["blocks.1:act"])
    rules = to_rules(graph, ["blocks.1:act"], QuantizeActivationsRule)
    with pytest.raises(Mismatch, match="is recomputed"):
        QuantizeActivations().rewrite(program, rules, Whole(graph))


def test_quantized_values_are_not_offloaded_too() -> None:
    graph = in_floats(tower(3))
    program = with_codes(Program.plain(graph), ["blocks.1:act"])
    rules = to_rules(graph, ["blocks.1:act"], OffloadRule)
    with pytest.raises(Mismatch, match="is kept in 8 bits"):
        Offload().rewrite(program, rules, Whole(graph))


def test_inductor_plans_quantize_nothing_and_explain_why() -> None:
    graph = replace(in_floats(tower(3)), decomposition="inductor-1")
    offers, (refusal,) = QuantizeActivations().offers(Program.plain(graph), Whole(graph))
    assert not offers
    assert "only plans for generated Python are probed" in refusal.reason
    rules = to_rules(graph, ["blocks.1:act"], QuantizeActivationsRule)
    with pytest.raises(Mismatch, match="in a plan for Inductor"):
        QuantizeActivations().rewrite(Program.plain(graph), rules, Whole(graph))


def test_values_that_cannot_be_quantized_are_named() -> None:
    graph = in_floats(tower(3))
    rules = (QuantizeActivationsRule(module="", op="aten.sum"),)
    with pytest.raises(Mismatch, match=r"aten\.sum in the top level, which cannot be kept"):
        QuantizeActivations().rewrite(Program.plain(graph), rules, Whole(graph))


@pytest.mark.parametrize("seed", range(30))
def test_kept_recomputed_offloaded_and_quantized_values_combine(seed: int) -> None:
    before, after, chosen = coded(seed)
    rng = random.Random(seed)
    able = sorted(quantizable(before) - {i.node for i in before.recomputed} - chosen)
    times = {v: (rng.randrange(6), rng.randrange(6)) for v in able}
    program = with_transfers(after, times)
    assert program.problems() == []
    assert program.quantized == after.quantized
