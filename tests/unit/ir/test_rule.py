"""Rules name exactly the values that they were made from, in any trace of the model, or raise an
error."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import Mismatch
from steelyard.ir.graph import BlockRun, Graph, Node, Phase, Role, Storage, Tensor
from steelyard.ir.rule import CallSite, matching, spots, starred, to_rules
from steelyard.trades.recompute import RecomputeRule


def model(lists: dict[str, int], *, ops: tuple[str, ...] = ("aten.mm", "aten.gelu")) -> Graph:
    """Return a model in which each list's modules call each operator once; the second operator
    has two results."""
    nodes, storages = [], []

    def tensor() -> Tensor:
        storages.append(Storage(nbytes=4, role=Role.ACTIVATION))
        return Tensor(shape=(1,), stride=(1,), dtype="float32", storage=len(storages) - 1)

    for prefix, count in lists.items():
        for index in range(count):
            path = f"{prefix}.{index}" if prefix else str(index)
            for op in ops:
                name = f"{path}:{op}"
                nodes.append(Node(name=name, op=op, outputs=(tensor(),), path=path))
            pair = Node(
                name=f"{path}:pair", op="aten.pair", outputs=(tensor(), tensor()), path=path
            )
            nodes.append(pair)
            nodes += [
                Node(name=f"{path}:pair{k}", op="getitem", args=(pair.name, k), inputs=(pair.name,),
                     outputs=(pair.outputs[k],), path=path, is_view=True)
                for k in (0, 1)
            ]  # fmt: skip
            nodes.append(
                Node(name=f"{path}:view", op="aten.view", inputs=(f"{path}:aten.mm",),
                     outputs=nodes[-5].outputs, path=path, is_view=True)
            )  # fmt: skip
    return Graph(nodes=tuple(nodes), storages=tuple(storages), outputs=(), decomposition="none")


def run(prefix: str, count: int, *, first: int = 0) -> BlockRun:
    return BlockRun(prefix=prefix, first=first, count=count)


def test_call_sites_are_values_and_not_views_or_tuples() -> None:
    found = spots(model({"blocks": 1}))
    assert set(found) == {
        CallSite("blocks.0", "aten.mm", 0),
        CallSite("blocks.0", "aten.gelu", 0),
        CallSite("blocks.0", "aten.pair#0", 0),
        CallSite("blocks.0", "aten.pair#1", 0),
    }


@settings(deadline=None)
@given(st.data())
def test_rules_name_exactly_the_values_they_were_made_from(data: st.DataObject) -> None:
    graph = model({"blocks": 4, "encoder.layers": 3, "head": 1})
    runs = data.draw(
        st.sampled_from(
            [(), (run("blocks", 4),), (run("blocks", 2), run("blocks", 2, first=2)),
             (run("blocks", 4), run("encoder.layers", 3))]
        )
    )  # fmt: skip
    graph = replace(graph, runs=runs)
    names = sorted(spots(graph).values())
    chosen = frozenset(data.draw(st.sets(st.sampled_from(names))))
    rules = to_rules(graph, chosen, RecomputeRule)
    assert matching(graph, rules) == chosen
    assert list(rules) == sorted(set(rules))
    assert sum(rule.count for rule in rules) == len(chosen)


def test_a_star_matches_a_whole_run_of_blocks_only() -> None:
    graph = replace(model({"blocks": 3}), runs=(run("blocks", 3),))
    whole = {f"blocks.{i}:aten.mm" for i in range(3)}
    assert to_rules(graph, whole, RecomputeRule) == (
        RecomputeRule(module="blocks.*", op="aten.mm", count=3),
    )
    part = to_rules(graph, whole - {"blocks.1:aten.mm"}, RecomputeRule)
    assert [r.module for r in part] == ["blocks.0", "blocks.2"]


def test_one_star_does_not_match_two_runs_of_one_list() -> None:
    graph = replace(model({"blocks": 4}), runs=(run("blocks", 2), run("blocks", 2, first=2)))
    first_run = {f"blocks.{i}:aten.mm" for i in range(2)}
    rules = to_rules(graph, first_run, RecomputeRule)
    assert [r.module for r in rules] == ["blocks.0", "blocks.1"]
    assert matching(graph, rules) == first_run


def test_blocks_at_the_top_of_the_model_are_starred_too() -> None:
    assert starred("2.mlp", run("", 3)) == "*.mlp"
    assert starred("3.mlp", run("", 3)) is None
    assert starred("blocks.1", run("blocks", 3)) == "blocks.*"
    assert starred("blocks", run("blocks", 3)) is None
    assert starred("other.1", run("blocks", 3)) is None


@pytest.mark.parametrize(
    ("blocks", "count", "said"), [(3, 2, "3 operators.*\n.*2 op"), (1, 4, "1 operator of")]
)
def test_a_rule_with_another_number_of_calls_is_refused(blocks: int, count: int, said: str) -> None:
    graph = replace(model({"blocks": blocks}), runs=(run("blocks", blocks),))
    rule = RecomputeRule(module="blocks.*", op="aten.mm", count=count)
    with pytest.raises(Mismatch, match=f"matches {said}"):
        matching(graph, (rule,))


def test_backward_values_have_no_call_site() -> None:
    graph = model({"blocks": 1})
    late = replace(graph, nodes=tuple(replace(n, phase=Phase.BACKWARD) for n in graph.nodes))
    assert spots(late) == {}
