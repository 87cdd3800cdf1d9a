"""Of all that could be cut or moved, few levels are looked at: the ends, and what is cheap."""

import pytest

from steelyard.core.graph import Graph, Node, Phase, Role, Storage, Tensor
from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.search.levels import moved_states, splits


@pytest.mark.parametrize("size", [1, 2, 7, 8, 48, 64, 960, 2048, 12288])
def test_the_coarsest_cuts_and_the_finest_are_looked_at(size: int) -> None:
    divisors = [k for k in range(2, size + 1) if size % k == 0]
    chosen = splits([*divisors, *divisors])
    assert chosen[:5] == tuple(divisors[:5])
    assert chosen[-1:] == tuple(divisors[-1:])
    assert len(chosen) == min(8, len(divisors))
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(divisors)


def kept(**nbytes: int) -> Program:
    """An update that keeps one tensor for each parameter."""
    nodes, storages = [], []
    for number, (name, size) in enumerate(nbytes.items()):
        tensor = Tensor(shape=(size,), stride=(1,), dtype="int8", storage=number)
        nodes.append(
            Node(name=f"state:{name}:sum", op="input", outputs=(tensor,), phase=Phase.UPDATE)
        )
        storages.append(Storage(nbytes=size, role=Role.STATE))
    graph = Graph(nodes=tuple(nodes), storages=tuple(storages), outputs=(), decomposition="")
    return Program(graph=graph, instructions=())


def test_the_largest_states_are_moved_first_and_at_last_all_with_one_near() -> None:
    rules = [Rule(trade="offload_state", module=name, lead=1) for name in "abcd"]
    levels = moved_states(kept(a=10, b=70, c=15, d=5), rules)
    assert [[rule.module for rule in level] for level in levels] == [
        [], ["b"], ["b", "c"], ["a", "b", "c", "d"], ["a", "b", "c", "d"],
    ]  # fmt: skip
    assert [{rule.lead for rule in level} for level in levels] == [set(), {1}, {1}, {1}, {0}]
    assert moved_states(None, rules) == moved_states(kept(), []) == ((),)
