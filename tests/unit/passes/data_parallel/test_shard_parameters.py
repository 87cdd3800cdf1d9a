"""A sharded parameter is gathered before its first reader, and again if requested."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.errors import BadInput
from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.graph import PACK_ROWS, Graph, Node, OutputKind, Ref, Role
from steelyard.ir.program import Program
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.passes.data_parallel.all_reduce import bucketed_all_reduce
from steelyard.passes.data_parallel.shard_parameters import gathered
from steelyard.trades.recompute import Recompute, recomputable, with_copies
from tests.support.made_up import chain

NAME = "parameter:p0"


def test_a_step_on_sharded_parameters_gathers_them() -> None:
    before = chain()
    graph = gathered(before, [NAME], num_ranks=4, transport=GLOO)
    assert graph.by_name[NAME].outputs[0].shape == (64,)
    whole = before.resident_bytes(Role.PARAMETER)
    assert graph.resident_bytes(Role.PARAMETER) == whole - 1024 + 256
    waited = graph.by_name[f"{NAME}_gathered_waited"]
    assert waited.outputs[0].shape == (256,)
    assert graph.users[waited.name] == ("loss", "work0")
    # Gloo needs the share until the gather has finished.
    assert waited.inputs == (f"{NAME}_gathered", NAME)


def test_the_gradient_of_a_sharded_parameter_is_reduce_scattered() -> None:
    graph = gathered(chain(), [NAME], num_ranks=4, transport=GLOO)
    output = next(o for o in graph.outputs if o.target == NAME)
    assert graph.by_name[output.node].outputs[0].shape == (64,)
    kinds = [graph.by_name[name].collective for name in graph.collectives]
    assert [c.kind for c in kinds if c] == [Exchange.ALL_GATHER, Exchange.REDUCE_SCATTER]
    # Each of four ranks sends three quarters, both times; one received quarter is stored where the
    # sum will be.
    assert [c.sent_bytes for c in kinds if c] == [3 * 256, 3 * 256]
    assert [c.held_bytes for c in kinds if c] == [0, 2 * 256]


def test_a_gradient_is_kept_until_its_reduce_scatter_ends() -> None:
    graph = gathered(chain(), ["parameter:p0", "parameter:p2"], num_ranks=2, transport=GLOO)
    assert graph.users["work0"] == ("work0_scattered", "work0_scattered_waited", "work1")
    assert [graph.by_name[f"work{k}_scattered"].mutates for k in (0, 2)] == [(), ()]
    sent, own = (graph.by_name[f"work2_scattered{end}"] for end in ("", "_waited"))
    assert sent.collective is not None
    assert (sent.collective.kind, sent.collective.held_bytes) == (Exchange.REDUCE_SCATTER, 0)
    assert own.inputs == (sent.name, "work2")
    (storage,) = graph.storages_of(own.name)
    assert graph.storages[storage].nbytes == 512
    lying = [n.name for n in graph.nodes if storage in graph.storages_of(n.name)]
    assert lying == [sent.name, own.name]


def test_a_non_contiguous_gradient_is_copied_before_its_reduce_scatter() -> None:
    """The data that is sent to a rank must be contiguous."""
    graph = chain()
    turned = replace(graph.by_name["work0"].outputs[0], shape=(16, 16), stride=(1, 16))
    whole = replace(graph.by_name[NAME].outputs[0], shape=(16, 16), stride=(16, 1))
    given = {"work0": turned, NAME: whole}
    nodes = tuple(replace(n, outputs=(given.get(n.name, n.outputs[0]),)) for n in graph.nodes)
    scattered = gathered(replace(graph, nodes=nodes), [NAME], num_ranks=2, transport=GLOO)
    assert scattered.problems() == []
    (sent,) = (
        n
        for n in scattered.nodes
        if n.collective is not None and n.collective.kind is Exchange.REDUCE_SCATTER
    )
    assert scattered.by_name[sent.inputs[0]].op == PACK_ROWS
    assert scattered.by_name[sent.inputs[0]].outputs[0].shape == (2, 128)
    output = next(o for o in scattered.outputs if o.target == NAME)
    assert scattered.by_name[output.node].outputs[0].shape == (8, 16)


def test_gathering_twice_recomputes_the_all_gather() -> None:
    plain = Program.plain(gathered(chain(), [NAME], num_ranks=2, transport=GLOO))
    again = with_copies(plain, {f"{NAME}_gathered", f"{NAME}_gathered_waited"})
    assert again.problems() == []
    assert len(again.exchanges) == len(plain.exchanges) + 1
    assert again.sent_bytes == plain.sent_bytes + 512
    # It is not recomputed without a rule, because every rank would have to do so.
    assert not recomputable(plain.graph) & {i.node for i in again.recomputed}


def test_a_parameter_gathered_for_each_pass_is_freed_in_between() -> None:
    graph = gathered(chain(), [NAME], num_ranks=2, transport=GLOO, regathered=[NAME])
    first, second = f"{NAME}_gathered_waited", f"{NAME}_regathered_waited"
    assert (graph.users[first], graph.users[second]) == (("loss",), ("work0",))
    names = [node.name for node in graph.nodes]
    assert names.index("loss") < names.index(f"{NAME}_regathered") < names.index("work0")
    once = gathered(chain(), [NAME], num_ranks=2, transport=GLOO)
    assert Program.plain(graph).sent_bytes == Program.plain(once).sent_bytes + 512


def test_views_of_a_regathered_parameter_are_recomputed() -> None:
    graph = chain()
    tensor = graph.by_name[NAME].outputs[0]
    looks = Node(
        name="look", op="aten.alias.default", args=(Ref(NAME),), inputs=(NAME,), is_view=True,
        outputs=(tensor,),
    )  # fmt: skip
    late = replace(graph.by_name["work1"], inputs=(*graph.by_name["work1"].inputs, "look"))
    nodes = tuple(late if n.name == "work1" else n for n in graph.nodes)
    place = next(i for i, n in enumerate(nodes) if n.name == "loss")
    graph = replace(graph, nodes=(*nodes[:place], looks, *nodes[place:]))
    graph = gathered(graph, [NAME], num_ranks=2, transport=GLOO, regathered=[NAME])
    assert "look_regathered" in graph.by_name["work1"].inputs
    assert graph.by_name["look_regathered"].inputs == (f"{NAME}_regathered_waited",)
    assert graph.storages_of("look_regathered") == graph.storages_of(f"{NAME}_regathered")
    assert graph.storages_of("look") == graph.storages_of(f"{NAME}_gathered")
    assert Program.plain(graph).problems() == []


def test_a_parameter_read_by_the_backward_pass_only_is_gathered_once() -> None:
    graph = chain()
    loss = graph.by_name["loss"]
    unread = replace(loss, inputs=tuple(i for i in loss.inputs if i != NAME))
    graph = replace(graph, nodes=tuple(unread if n is loss else n for n in graph.nodes))
    graph = gathered(graph, [NAME], num_ranks=2, transport=GLOO, regathered=[NAME])
    assert f"{NAME}_regathered" not in graph.by_name


def test_readers_of_a_gathered_parameter_can_be_recomputed() -> None:
    graph = chain()
    reads = Node(
        name="act", op="aten.add.Tensor", inputs=(NAME,), signature="work",
        outputs=(replace(graph.by_name["work0"].outputs[0], storage=len(graph.storages)),),
    )  # fmt: skip
    late = replace(graph.by_name["work1"], inputs=(*graph.by_name["work1"].inputs, "act"))
    nodes = tuple(late if n.name == "work1" else n for n in graph.nodes)
    place = next(i for i, n in enumerate(nodes) if n.name == "loss")
    graph = replace(
        graph,
        nodes=(*nodes[:place], reads, *nodes[place:]),
        storages=(*graph.storages, graph.storages[graph.by_name["work0"].outputs[0].storage]),
    )
    assert "act" in recomputable(graph)
    assert "act" in recomputable(gathered(graph, [NAME], num_ranks=2, transport=GLOO))
    assert Recompute.is_exact


def test_consecutive_parameters_share_a_bucket() -> None:
    names = [f"parameter:p{k}" for k in range(4)]
    wide = chain(gradients=4)
    graph = gathered(
        wide,
        names,
        num_ranks=2,
        transport=GLOO,
        regathered=names,
        together=dict.fromkeys(names, 3072),
    )
    apart = gathered(wide, names, num_ranks=2, transport=GLOO, regathered=names)
    assert graph.problems() == []
    kinds = [graph.by_name[name].collective for name in graph.collectives]
    # One bucket of three weights of a kilobyte, and the rest; only the first is read in both
    # passes.
    sent = [(c.kind, c.sent_bytes) for c in kinds if c]
    assert sorted(sent) == sorted([
        *[(Exchange.ALL_GATHER, nbytes // 2) for nbytes in (3072, 1024, 1024)],
        *[(Exchange.REDUCE_SCATTER, nbytes // 2) for nbytes in (3072, 1024)],
    ])  # fmt: skip
    assert Program.plain(graph).sent_bytes == Program.plain(apart).sent_bytes
    # Each weight is copied out of the bucket before its reader, and freed after it.
    (whole,) = (n for n in graph.by_name["work1"].inputs if n.endswith("_whole"))
    assert graph.by_name[whole].outputs[0].shape == (256,)
    assert graph.users[whole] == ("work1",)
    order = [node.name for node in graph.nodes]
    assert order.index(whole) == order.index("work1") - 1
    # The outputs are views of the rank's own rows, which are not summed over the ranks again.
    outputs = {o.target: graph.by_name[o.node] for o in graph.outputs if o.target in names}
    assert [outputs[name].outputs[0].offset for name in names[:3]] == [0, 128, 256]
    assert len({outputs[name].outputs[0].storage for name in names[:3]}) == 1
    summed = bucketed_all_reduce(graph, bucket_bytes=1 << 20, num_ranks=2, transport=GLOO)
    assert summed.collectives == graph.collectives


def test_bucketed_parameters_are_neither_recomputed_nor_offloaded() -> None:
    names = ["parameter:p0", "parameter:p1"]
    graph = _read_twice(chain(), names)
    graph = gathered(
        graph, names, num_ranks=2, transport=GLOO, together=dict.fromkeys(names, 1 << 20)
    )
    packed = {n.name for n in graph.nodes if n.is_packing and n.name in graph.reaching_backward}
    assert packed
    assert not packed & recomputable(graph)
    assert not packed & saved_for_backward(Program.plain(graph), least_bytes=1)


def _read_twice(graph: Graph, names: list[str]) -> Graph:
    """Return a step in which the loss and the backward pass read the parameter."""
    loss = graph.by_name["loss"]
    reads = replace(loss, args=tuple(map(Ref, names)), inputs=tuple(names))
    return replace(graph, nodes=tuple(reads if n is loss else n for n in graph.nodes))


@pytest.mark.parametrize("num_ranks", [3, 512])
def test_a_parameter_that_cannot_be_cut_evenly_is_refused(num_ranks: int) -> None:
    with pytest.raises(BadInput, match="cannot be sharded into"):
        gathered(chain(), [NAME], num_ranks=num_ranks, transport=GLOO)


def test_a_frozen_parameter_is_only_gathered() -> None:
    graph = chain()
    outputs = tuple(o for o in graph.outputs if o.target != NAME)
    graph = gathered(replace(graph, outputs=outputs), [NAME], num_ranks=2, transport=GLOO)
    assert len(graph.collectives) == 1
    assert all(o.target != NAME for o in graph.outputs if o.kind is OutputKind.GRADIENT)
