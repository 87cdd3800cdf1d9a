"""Values sent to offload memory are fetched once, before they are read, and nothing else
changes."""

from __future__ import annotations

import random

import pytest

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Device, Link
from steelyard.ir.graph import Phase
from steelyard.ir.program import Program
from steelyard.ir.rule import to_rules
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.trades.offload import Offload, OffloadRule, with_transfers
from steelyard.trades.recompute import recomputable, with_copies
from tests.support.graphs import Whole, random_step, tower

LINK = Link(kind="made up", latency_seconds=0.0, bytes_per_second=1e9, doubt=0.1)
COSTS = CostTable(
    device=Device(
        kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30,
        call_seconds=1e-9,
    ),
    links={OFFLOAD_OUT: LINK, OFFLOAD_IN: LINK},
    offload_bytes=1 << 40,
)  # fmt: skip


def moved(seed: int) -> tuple[Program, Program, dict[str, tuple[int, int]]]:
    """Return a random step with some copies, without and with transfers."""
    rng = random.Random(seed)
    plain = Program.plain(random_step(seed, num_values=12))
    again = [v for v in sorted(recomputable(plain.graph)) if rng.random() < 0.3]
    before = with_copies(plain, again)
    able = sorted(saved_for_backward(before) - {i.node for i in before.recomputed})
    times = {v: (rng.randrange(6), rng.randrange(6)) for v in able if rng.random() < 0.7}
    return before, with_transfers(before, times), times


@pytest.mark.parametrize("seed", range(40))
def test_existing_instructions_keep_their_order(seed: int) -> None:
    before, after, _ = moved(seed)
    nodes = after.graph.by_name

    def computed(program: Program) -> list[str]:
        return [i.value for i in program.instructions if not i.sink and not nodes[i.node].is_free]

    theirs = [v for v in computed(after) if v not in nodes or not nodes[v].is_transfer]
    assert theirs == computed(before)
    assert after.problems() == []
    assert after.flops == before.flops
    assert after.graph.fingerprint == before.graph.fingerprint


@pytest.mark.parametrize("seed", range(40))
def test_offloaded_values_are_not_read_between_transfer_and_fetch(seed: int) -> None:
    _, after, times = moved(seed)
    sent = {e.waits_for.removesuffix(".send") for e in after.graph.nodes if e.waits_for}
    gone = {v for v in times if v in sent}
    late = [i for i in after.instructions if i.phase is Phase.BACKWARD and not i.sink]
    for line in late:
        node = after.graph.by_name[line.node]
        assert node.is_transfer or not gone.intersection(line.inputs), line
    assert len(after.exchanges) == 2 * len(gone)
    assert after.sent_bytes == 2 * sum(after.graph.by_name[v].outputs[0].nbytes for v in gone)


def test_lag_and_lead_are_operators_between() -> None:
    plain = Program.plain(tower(3))
    value = "blocks.0:up"
    after = with_transfers(plain, {value: (2, 1)})
    ops = [i.value for i in after.instructions if not i.sink]
    sent, wanted = ops.index(f"{value}.sent"), ops.index(f"{value}.fetched")
    assert ops[ops.index(f"{value}.send") + 1 : sent] == ["blocks.0:act", "blocks.1:up"]
    assert ops[ops.index(f"{value}.fetch") + 1 : wanted] == ["blocks.1:d_up"]
    assert ops[wanted + 1] == "blocks.0:d_act"


def test_long_lags_end_at_the_fetch() -> None:
    plain = Program.plain(tower(3))
    after = with_transfers(plain, {"blocks.0:up": (1000, 1000)})
    ops = [i.value for i in after.instructions if not i.sink]
    assert ops.index("blocks.0:up.sent") == ops.index("blocks.0:up.fetch") - 1
    assert ops.index("blocks.0:up.send") == ops.index("blocks.0:up") + 1


def test_the_peak_falls_by_the_offloaded_bytes_at_no_cost_of_time() -> None:
    plain = Program.plain(tower(6))
    value = "blocks.0:act"
    before, after = predict(plain, COSTS), predict(with_transfers(plain, {value: (3, 3)}), COSTS)
    pieces = after.peak.resident_bytes - before.peak.resident_bytes
    assert pieces == 2 << 20
    away = plain.graph.by_name[value].outputs[0].nbytes
    assert after.peak.nbytes - pieces == before.peak.nbytes - away
    assert after.metrics.step_seconds.value == pytest.approx(before.metrics.step_seconds.value)
    assert after.metrics.communication_bytes.value == 2 * away


def test_a_link_too_slow_is_waited_for() -> None:
    plain = Program.plain(tower(6))
    slow = Link(kind="made up", latency_seconds=0.0, bytes_per_second=1e4, doubt=0.1)
    costs = CostTable(
        device=COSTS.device, links={OFFLOAD_OUT: slow, OFFLOAD_IN: slow}, offload_bytes=1 << 40
    )
    program = with_transfers(plain, {"blocks.0:act": (0, 0)})
    metrics = predict(program, costs).metrics
    nbytes = plain.graph.by_name["blocks.0:act"].outputs[0].nbytes
    assert metrics.exposed_communication_seconds.value == pytest.approx(2 * nbytes / 1e4)
    alone = predict(plain, costs).metrics.step_seconds.value
    assert metrics.step_seconds.value == pytest.approx(alone + 2 * nbytes / 1e4)


def test_random_values_can_be_offloaded() -> None:
    found = 0
    for seed in range(40):
        plain = Program.plain(random_step(seed, num_values=12))
        able = saved_for_backward(plain)
        found += sum(plain.graph.by_name[v].is_random for v in able)
        leaving = {o.node for o in plain.graph.outputs}
        assert not able & leaving
    assert found


def test_one_value_in_two_rules_is_an_error() -> None:
    graph = tower(3)
    rules = (
        *to_rules(graph, [f"blocks.{i}:up" for i in range(3)], OffloadRule),
        *to_rules(graph, ["blocks.1:up"], OffloadRule),
    )
    with pytest.raises(Mismatch, match="same value"):
        Offload().rewrite(Program.plain(graph), rules, Whole(graph))


def test_recomputed_values_are_not_offloaded_too() -> None:
    graph = tower(3)
    program = with_copies(Program.plain(graph), ["blocks.1:act"])
    rules = to_rules(graph, ["blocks.1:act"], OffloadRule)
    with pytest.raises(Mismatch, match="is recomputed"):
        Offload().rewrite(program, rules, Whole(graph))


def test_values_that_cannot_be_offloaded_are_named() -> None:
    graph = tower(3)
    rules = (OffloadRule(module="", op="aten.sum"),)
    with pytest.raises(Mismatch, match=r"aten\.sum in the top level, which cannot be offloaded"):
        Offload().rewrite(Program.plain(graph), rules, Whole(graph))
