"""Of all possible splits and offloads, few levels are explored: the extremes, and the cheap
ones."""

from dataclasses import replace

import pytest

from steelyard.ir.graph import Graph, Node, Phase, Role, Storage, Tensor
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.search.single.granularity import micro_batch_counts, offload_levels, slice_counts
from steelyard.trades.offload_state import OffloadStateRule


@pytest.mark.parametrize("size", [1, 2, 7, 8, 48, 64, 960, 2048, 12288])
def test_the_coarsest_and_the_finest_splits_are_tried(size: int) -> None:
    divisors = [k for k in range(2, size + 1) if size % k == 0]
    chosen = micro_batch_counts([*divisors, *divisors])
    assert chosen[:5] == tuple(divisors[:5])
    assert chosen[-1:] == tuple(divisors[-1:])
    assert len(chosen) == min(8, len(divisors))
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(divisors)


def step(**nbytes: int) -> Program:
    """Return a pass that reads a weight of this size for each name, and an update with as much
    state."""
    nodes: dict[str, list[Node]] = {"parameter:": [], "state:": []}
    storages = []
    for number, (name, size) in enumerate(nbytes.items()):
        tensor = Tensor(shape=(size,), stride=(1,), dtype="int8", storage=number)
        for kind, called in (("parameter:", name), ("state:", f"{name}:sum")):
            nodes[kind].append(
                Node(name=kind + called, op="input", outputs=(tensor,), phase=Phase.UPDATE)
            )
        storages.append(Storage(nbytes=size, role=Role.STATE))
    of_pass, of_update = (
        Graph(nodes=tuple(own), storages=tuple(storages), outputs=(), decomposition="")
        for own in nodes.values()
    )
    return Program(graph=of_pass, instructions=(), update=Program(graph=of_update, instructions=()))


def rules(what: str, names: str = "abcd") -> list[Rule]:
    return [OffloadStateRule(what=what, parameter=name, lead=1) for name in names]


SIZES = {"a": 10, "b": 70, "c": 15, "d": 5}


def test_the_largest_states_are_moved_first_and_at_last_all_with_one_near() -> None:
    levels = offload_levels(step(**SIZES), rules("optimizer"))
    assert [[rule.parameter for rule in level] for level in levels] == [
        [], ["b"], ["b", "c"], ["a", "b", "c", "d"], ["a", "b", "c", "d"],
    ]  # fmt: skip
    assert [{rule.lead for rule in level} for level in levels] == [set(), {1}, {1}, {1}, {0}]
    assert offload_levels(step(), []) == ((),)


def test_state_is_offloaded_before_gradients_and_weights() -> None:
    offered = [*rules("optimizer"), *rules("gradient", "ab"), *rules("weight", "abc")]
    levels = offload_levels(step(**SIZES), offered)

    def told(level: tuple[Rule, ...]) -> dict[str, str]:
        whats = dict.fromkeys(rule.what for rule in level)
        return {w: "".join(r.parameter for r in level if r.what == w) for w in whats}

    both = {"gradient": "ab", "optimizer": "abcd"}
    assert [told(level) for level in levels] == [
        {}, {"optimizer": "b"}, {"optimizer": "bc"}, {"optimizer": "abcd"}, both,
        {**both, "weight": "b"}, {**both, "weight": "abc"}, {"gradient": "ab"}, {"weight": "abc"},
        {"optimizer": "abcd"}, both, {**both, "weight": "abc"},
    ]  # fmt: skip
    assert [{rule.lead for rule in level} for level in levels[-3:]] == [{0}] * 3


def test_without_an_optimizer_weights_are_moved_alone() -> None:
    levels = offload_levels(step(**SIZES), rules("weight"))
    assert [[rule.parameter for rule in level] for level in levels] == [
        [], ["b"], ["a", "b", "c", "d"], ["a", "b", "c", "d"],
    ]  # fmt: skip


def test_the_chosen_and_finer_slices_are_tried() -> None:
    offered = [replace(rule, slices=n) for rule in rules("weight", "ab") for n in (2, 8)]
    offered += rules("weight", "c")
    numbers = slice_counts(offered)
    assert [(rule.parameter, degrees) for rule, degrees in numbers.items()] == [
        ("a", (2, 8)), ("b", (2, 8)), ("c", (0,)),
    ]  # fmt: skip
    chosen = [replace(rule, slices=degrees[0]) for rule, degrees in numbers.items()]
    finer = {rule: degrees[-1] for rule, degrees in numbers.items() if degrees[-1]}
    levels = offload_levels(step(**SIZES), chosen, [finer])
    told = [[(rule.parameter, rule.slices, rule.lead) for rule in level] for level in levels]
    assert [("a", 2, 1), ("b", 2, 1), ("c", 0, 1)] in told
    assert [("a", 8, 1), ("b", 8, 1), ("c", 0, 1)] in told
    assert told[-1] == [("a", 8, 0), ("b", 8, 0), ("c", 0, 0)]
    assert len(levels) == len(set(levels))
