"""The memory of an exchange in flight: its argument, the data of others, or neither."""

from __future__ import annotations

import pytest

from steelyard.ir.collective import Exchange, Transport
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.overlap import waits_within
from steelyard.passes.data_parallel.shard_parameters import gathered
from steelyard.predict.liveness import alive_at, liveness
from tests.support.made_up import chain, costs

_SCATTER = frozenset({Exchange.REDUCE_SCATTER})
KEEPS_NOTHING = Transport(name="keeps nothing")
KEEPS_INPUT = Transport(name="keeps its input", keeps_input=_SCATTER)
TAKES = Transport(name="takes what comes", is_direct=True)

GRADIENT, SHARE = 1024, 512
COSTS = costs(exchange_seconds=1.0)


def scattered(transport: Transport, *, window: int | None, ranks: int = 2) -> Program:
    """Return three gradients; the first one is reduce-scattered, and its parameter was gathered
    before."""
    graph = gathered(chain(), ["parameter:p0"], num_ranks=ranks, transport=transport)
    return waits_within(Program.plain(graph), window)


def bytes_when(program: Program, value: str) -> int:
    line = next(i for i, ins in enumerate(program.instructions) if ins.value == value)
    return liveness(program, COSTS).bytes_at[line]


def anyway(ranks: int) -> int:
    """Return the bytes at work2: gradients 1 and 2, the share in flight, and the loss."""
    return 2 * GRADIENT + GRADIENT // ranks + 4


@pytest.mark.parametrize(
    ("transport", "ranks", "window", "held"),
    [
        (KEEPS_NOTHING, 2, 0, 0),
        (KEEPS_NOTHING, 2, None, 0),
        (KEEPS_INPUT, 2, 0, 0),
        (KEEPS_INPUT, 2, None, GRADIENT),
        # The first part is stored where the result will be.
        (TAKES, 2, None, 0),
        (TAKES, 4, 0, 0),
        (TAKES, 4, None, 2 * GRADIENT // 4),
    ],
    ids=lambda value: value.name if isinstance(value, Transport) else str(value),
)
def test_an_outstanding_reduce_scatter_holds_its_buffers(
    transport: Transport, ranks: int, window: int | None, held: int
) -> None:
    program = scattered(transport, window=window, ranks=ranks)
    assert bytes_when(program, "work2") == anyway(ranks) + held


def test_backend_buffers_appear_in_the_memory_explanation() -> None:
    program = scattered(TAKES, window=None, ranks=4)
    alive = liveness(program, COSTS)
    for index, nbytes in enumerate(alive.bytes_at):
        assert sum(h.nbytes for h in alive_at(program, index)) == nbytes
    line = next(i for i, ins in enumerate(program.instructions) if ins.value == "work2")
    held = [h.nbytes for h in alive_at(program, line) if "in flight" in h.what]
    assert held == [2 * GRADIENT // 4]


def test_backend_buffers_are_released_after_the_step() -> None:
    for transport in (KEEPS_NOTHING, KEEPS_INPUT, TAKES):
        for window in (0, None):
            program = scattered(transport, window=window)
            assert liveness(program, COSTS).left_bytes == 2 * GRADIENT + SHARE + 4
