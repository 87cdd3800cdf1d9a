"""Orders of gathers that corrupt the heap on gloo are refused before they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.comm.backend_bugs import refuse_hazards
from steelyard.comm.channel import Channel
from steelyard.errors import Mismatch
from steelyard.ir.collective import GLOO
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.all_reduce import bucketed_all_reduce
from steelyard.passes.data_parallel.overlap import issued_ahead
from steelyard.passes.data_parallel.shard_parameters import gathered
from steelyard.run.codegen import emit
from tests.support.made_up import chain

_PLAIN = "_c10d_functional.all_gather_into_tensor.default"


def two_gathers(*ops: str, overlapping: bool) -> Program:
    """Return two gathers, the second of which is issued before or after the first is waited for."""
    graph = chain(gradients=2)
    for number, op in enumerate(ops):
        graph = gathered(graph, [f"parameter:p{number}"], num_ranks=2, transport=GLOO)
        name = f"parameter:p{number}_gathered"
        nodes = (replace(n, op=op) if n.name == name and op else n for n in graph.nodes)
        graph = replace(graph, nodes=tuple(nodes))
    program = Program.plain(graph)
    if not overlapping:
        return program
    first, second = (f"parameter:p{n}_gathered" for n in range(2))
    lines = [i for i in program.instructions if i.sink is None]
    moved = next(i for i in lines if i.value == second)
    lines.remove(moved)
    lines.insert(next(n for n, i in enumerate(lines) if i.value == first) + 1, moved)
    program = Program.of(graph, lines)
    assert program.problems() == []
    return program


def channel(backend: str, *, num_ranks: int = 2) -> Channel:
    return Channel(group="0", backend=backend, num_ranks=num_ranks, rank=0)


@pytest.mark.parametrize("ops", [(_PLAIN, _PLAIN), (_PLAIN, ""), ("", _PLAIN)])
def test_concurrent_plain_gathers_are_refused_on_gloo(ops: tuple[str, str]) -> None:
    program = two_gathers(*ops, overlapping=True)
    with pytest.raises(Mismatch, match="while parameter:p0_gathered is in flight"):
        emit(program, channels={"data": channel("gloo")})
    refuse_hazards(program, backends={"data": "nccl"})
    refuse_hazards(two_gathers(*ops, overlapping=False), backends={"data": "gloo"})


def test_a_group_of_unknown_backend_is_treated_as_gloo() -> None:
    with pytest.raises(Mismatch, match="corrupts memory"):
        refuse_hazards(two_gathers(_PLAIN, _PLAIN, overlapping=True), backends={})


def test_our_gather_uses_the_operator_without_the_bug() -> None:
    program = two_gathers("", "", overlapping=True)
    emitted = emit(issued_ahead(program, 3), channels={"data": channel("gloo")})
    assert emitted.source.count("all_gather") == 2


def test_a_program_for_other_ranks_is_refused() -> None:
    graph = bucketed_all_reduce(chain(), bucket_bytes=1, num_ranks=2, transport=GLOO)
    with pytest.raises(Mismatch, match="among 2 ranks over the axis 'data', but its group has no"):
        emit(Program.plain(graph))
    with pytest.raises(Mismatch, match="but its group has 4"):
        emit(Program.plain(graph), channels={"data": channel("gloo", num_ranks=4)})
