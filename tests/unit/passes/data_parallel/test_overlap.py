"""Lines moved within a program: it stays valid, has the same lines, and waits no later than
allowed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from steelyard.ir.collective import GLOO
from steelyard.ir.graph import Graph, Role
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.all_reduce import bucketed_all_reduce
from steelyard.passes.data_parallel.overlap import issued_ahead, sent_first, waits_within
from steelyard.passes.data_parallel.shard_parameters import gathered
from steelyard.predict.liveness import liveness
from steelyard.trades.recompute import with_copies
from tests.support.graphs import random_step
from tests.support.made_up import chain, costs

_COSTS = costs(exchange_seconds=1.0)
# With one exchange this far ahead, or all together, the peak would rise.
TOO_SOON = ((18, 20, 0), (25, 20, 0))
_WINDOWS = st.none() | st.integers(0, 8)


def exchanging(seed: int, *, again: bool) -> Program:
    """Return a random step whose parameters are all sharded, and whose other gradients are
    reduced."""
    graph = random_step(seed, num_values=12)
    weights = [
        n.name for n in graph.inputs()
        if graph.storages[n.outputs[0].storage].role is Role.PARAMETER
    ]  # fmt: skip
    together = dict.fromkeys(weights[::2], 2048) if seed % 2 else {}
    graph = gathered(graph, weights[::2], num_ranks=2, transport=GLOO, together=together)
    program = Program.plain(
        bucketed_all_reduce(graph, bucket_bytes=4096, num_ranks=2, transport=GLOO)
    )
    if again and not seed % 2:
        copies = {f"{name}_gathered{end}" for name in weights[::2] for end in ("", "_waited")}
        program = with_copies(program, copies)
    return program


def in_shares(seed: int) -> Program:
    """Return a random step whose parameters are gathered for each pass; with odd seeds in
    buckets."""
    graph = random_step(seed, num_values=40)
    weights = [n.name for n in graph.inputs() if n.name.startswith("parameter:")]
    together = dict.fromkeys(weights, 4096) if seed % 2 else {}
    graph = gathered(
        graph, weights, num_ranks=2, transport=GLOO, regathered=weights, together=together
    )
    return Program.plain(graph)


def lines(program: Program) -> list[str]:
    return [i.value for i in program.instructions if i.sink is None]


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10_000), again=st.booleans(), window=_WINDOWS, ahead=st.integers(0, 9),
    first=st.booleans(),
)  # fmt: skip
def test_moving_lines_keeps_the_program(
    seed: int, again: bool, window: int | None, ahead: int, first: bool
) -> None:
    before = exchanging(seed, again=again)
    assert before.problems() == []
    after = sent_first(before) if first else before
    after = issued_ahead(waits_within(after, window), ahead)
    assert after.problems() == []
    assert sorted(lines(after)) == sorted(lines(before))
    assert after.sent_bytes == before.sent_bytes
    assert [i.sink for i in before.instructions if i.sink] == [
        i.sink for i in sorted(after.instructions, key=lambda i: _place(before, i)) if i.sink
    ]


def _place(program: Program, instruction: object) -> int:
    sinks = [i.sink for i in program.instructions]
    return sinks.index(instruction.sink)  # type: ignore[attr-defined] # an Instruction


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), again=st.booleans(), window=st.integers(0, 6))
@example(seed=5499, again=False, window=0)
def test_waiting_later_never_holds_less(seed: int, again: bool, window: int) -> None:
    program = exchanging(seed, again=again)
    sooner, later = (
        liveness(waits_within(program, w), _COSTS).peak_bytes for w in (window, window + 1)
    )
    assert sooner <= later


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(0, 8192))
@example(*TOO_SOON[0])
@example(*TOO_SOON[1])
def test_prefetched_collectives_fit_into_the_free_memory(seed: int, count: int, spare: int) -> None:
    program = in_shares(seed)
    before = liveness(program, None)
    alive = zip(program.instructions, before.bytes_at, strict=True)
    most = before.peak_bytes + spare
    room = [most - nbytes for line, nbytes in alive if line.sink is None]
    within, freely = issued_ahead(program, count, room), issued_ahead(program, count)
    assert within.problems() == []
    assert sorted(lines(within)) == sorted(lines(program))
    assert liveness(within, None).peak_bytes <= most
    if (seed, count, spare) in TOO_SOON:
        assert liveness(freely, None).peak_bytes > most
    # If there is room everywhere, the exchange moves as far ahead as possible.
    assert lines(issued_ahead(program, count, [1 << 40] * len(room))) == lines(freely)


def test_the_lag_counts_collectives_issued_after() -> None:
    program = Program.plain(
        bucketed_all_reduce(chain(gradients=4), bucket_bytes=1, num_ranks=2, transport=GLOO)
    )
    issued = [f"bucket_{n}_reduced" for n in range(4)]
    waited = [f"{name}_waited" for name in issued]
    for window in (0, 1, 2, 3):
        order = [v for v in lines(waits_within(program, window)) if v.startswith("bucket")]
        for number in range(4 - window):
            assert order.index(waited[number]) == order.index(issued[number + window]) + 1
    assert lines(waits_within(program, None))[-4:] == waited


def test_no_wait_comes_after_a_reader_of_its_result() -> None:
    program = Program.plain(gathered(chain(), ["parameter:p1"], num_ranks=2, transport=GLOO))
    late = lines(waits_within(program, None))
    assert late.index("parameter:p1_gathered_waited") == late.index("work1") - 1
    # Nothing is computed between the gather and its wait; when issued earlier, the gather overlaps
    # an operator.
    early = lines(issued_ahead(program, 1))
    assert early.index("parameter:p1_gathered") == early.index("work0") - 1


def renamed(graph: Graph) -> Graph:
    """Rename the collectives, so that the program can get buckets again."""
    names = {node.name: f"first_{node.name}" for node in graph.nodes if not node.is_input}
    nodes = (replace(n.reading(names), name=names.get(n.name, n.name)) for n in graph.nodes)
    outputs = (replace(o, node=names.get(o.node, o.node)) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs))


def test_a_sum_is_never_sent_before_the_last_part_of_it() -> None:
    """The exchange is not issued before that part is computed, nor while the part itself is in
    flight."""
    graph = bucketed_all_reduce(
        chain(gradients=3), bucket_bytes=1, num_ranks=2, transport=GLOO, repeats=2
    )
    moved = issued_ahead(Program.plain(graph).repeated(2), 99)
    assert moved.problems() == []
    parts = bucketed_all_reduce(
        chain(gradients=3), bucket_bytes=1, num_ranks=2, transport=GLOO, axis="tensor"
    )
    both = bucketed_all_reduce(
        renamed(parts), bucket_bytes=1, num_ranks=2, transport=GLOO, axis="data", repeats=2
    )
    for window in (1, 4, None):
        late = waits_within(Program.plain(both).repeated(2), window)
        assert late.problems() == []
        assert len(late.exchanges) == 6
