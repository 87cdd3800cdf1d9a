"""What is held while an exchange is on its way: the argument, a copy of it, or neither."""

from __future__ import annotations

import pytest

from steelyard.core.collective import Exchange, Transport
from steelyard.core.program import Program
from steelyard.exchange.parameters import gathered
from steelyard.exchange.windows import waits_within
from steelyard.predict.liveness import alive_at, liveness
from tests.exchange.made_up import chain, costs

_SCATTER = frozenset({Exchange.REDUCE_SCATTER})
KEEPS_NOTHING = Transport(name="keeps nothing")
KEEPS_INPUT = Transport(name="keeps its input", keeps_input=_SCATTER)
COPIES = Transport(name="copies", copies=_SCATTER)

GRADIENT, SHARE = 1024, 512
COSTS = costs(exchange_seconds=1.0)


def scattered(transport: Transport, *, window: int | None) -> Program:
    """Three gradients; the first is reduced and scattered, its parameter gathered beforehand."""
    graph = gathered(chain(), ["parameter:p0"], num_ranks=2, transport=transport)
    return waits_within(Program.plain(graph), window)


def bytes_when(program: Program, value: str) -> int:
    line = next(i for i, ins in enumerate(program.instructions) if ins.value == value)
    return liveness(program, COSTS).bytes_at[line]


# At work2: gradients 1 and 2, the share that is on its way, the loss.
_ANYWAY = 2 * GRADIENT + SHARE + 4


@pytest.mark.parametrize(
    ("transport", "window", "held"),
    [
        (KEEPS_NOTHING, 0, 0),
        (KEEPS_NOTHING, None, 0),
        (KEEPS_INPUT, 0, 0),
        (KEEPS_INPUT, None, GRADIENT),
        (COPIES, 0, 0),
        (COPIES, None, GRADIENT),
    ],
    ids=lambda value: value.name if isinstance(value, Transport) else str(value),
)
def test_an_outstanding_reduce_scatter_holds_the_whole_gradient(
    transport: Transport, window: int | None, held: int
) -> None:
    program = scattered(transport, window=window)
    assert bytes_when(program, "work2") == _ANYWAY + held


def test_what_a_backend_holds_stands_in_the_explanation() -> None:
    program = scattered(COPIES, window=None)
    alive = liveness(program, COSTS)
    for index, nbytes in enumerate(alive.bytes_at):
        assert sum(h.nbytes for h in alive_at(program, index)) == nbytes
    line = next(i for i, ins in enumerate(program.instructions) if ins.value == "work2")
    assert [h.nbytes for h in alive_at(program, line) if "on its way" in h.what] == [GRADIENT]


def test_nothing_is_left_of_it_after_the_step() -> None:
    for transport in (KEEPS_NOTHING, KEEPS_INPUT, COPIES):
        for window in (0, None):
            program = scattered(transport, window=window)
            assert liveness(program, COSTS).left_bytes == 2 * GRADIENT + SHARE + 4
