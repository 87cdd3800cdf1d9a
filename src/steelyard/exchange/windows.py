"""When results of exchanges are waited for: the later, the more is hidden, and the more is held.

Moves lines of a program, without torch. Not for choosing the window: that has a price.
"""

from dataclasses import replace

from steelyard.core.program import Instruction, Program


def waits_within(program: Program, window: int | None) -> Program:
    """Wait for each exchange only behind the issue of the ``window``-th one after it.

    Sooner where something computes with the result; with None only that counts. Views of the
    result move along.
    """
    lines = [i for i in program.instructions if i.sink is None]
    bare = _without_sinks(program, lines)
    exchanges = bare.exchanges
    places: list[_Place] = [(index, 0, index) for index in range(len(lines))]
    for number, exchange in enumerate(exchanges):
        if exchange.wait is None:
            continue
        latest = len(lines) - 1
        if window is not None and number + window < len(exchanges):
            latest = exchanges[number + window].issue
        follow, needed = _followers(bare, lines, exchange.wait)
        latest = min(latest, needed - 1)
        for index in follow:
            places[index] = max(places[index], (latest, 1, index))
    return _reordered(program, lines, places)


def issued_ahead(program: Program, count: int) -> Program:
    """Issue each exchange up to ``count`` computing lines sooner, within its pass.

    It cannot be sooner than its arguments exist; a parameter's share always does.
    """
    lines = [i for i in program.instructions if i.sink is None]
    bare = _without_sinks(program, lines)
    nodes = program.graph.by_name
    born = {line.value: index for index, line in enumerate(lines)}
    places: list[_Place] = [(index, 0, index) for index in range(len(lines))]
    for exchange in bare.exchanges:
        issue = lines[exchange.issue]
        earliest = max((born[i] + 1 for i in issue.inputs if i in born), default=0)
        place, left = exchange.issue, count
        while place > earliest and left and lines[place - 1].phase is issue.phase:
            place -= 1
            left -= not nodes[lines[place].node].is_free
        places[exchange.issue] = (place, -1, exchange.issue)
    return _reordered(program, lines, places)


_Place = tuple[int, int, int]


def _without_sinks(program: Program, lines: list[Instruction]) -> Program:
    return replace(program, instructions=tuple(lines))


def _reordered(program: Program, lines: list[Instruction], places: list[_Place]) -> Program:
    ordered = [lines[index] for _, _, index in sorted(places)]
    moved = program.with_lines(ordered, on=program.graph)
    assert not moved.problems(), moved.problems()
    return moved


def _followers(program: Program, lines: list[Instruction], wait: int) -> tuple[list[int], int]:
    """The wait with the views of its result, and the first line that does more than look at it."""
    nodes = program.graph.by_name
    values = {lines[wait].value}
    follow = [wait]
    for index in range(wait + 1, len(lines)):
        if not values.intersection(lines[index].inputs):
            continue
        if not nodes[lines[index].node].is_free:
            return follow, index
        values.add(lines[index].value)
        follow.append(index)
    return follow, len(lines)
