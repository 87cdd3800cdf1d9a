"""When results of exchanges are waited for: the later, the more is hidden, and the more is held.

Moves lines of a program, without torch. Not for choosing the window: that has a price.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.gradient_codec import CODED_CALLS, FIRST_CALLS
from steelyard.ir.graph import JOINED_ROWS, Graph, Node, OutputKind, Phase
from steelyard.ir.program import SO_FAR, Instruction, Program


def waits_within(program: Program, window: int | None) -> Program:
    """Wait for each exchange only behind the issue of the ``window``-th one after it.

    Sooner where something computes with the result; with None only that counts. Views of the
    result move along, and where it is in codes, what reads them and sends them on: that is waited
    for as long again.
    """
    depths = _depths(program)
    for depth in range(max(depths.values(), default=-1) + 1):
        program = _waits_at(program, window, {v for v, d in depths.items() if d == depth})
    return program


def _waits_at(program: Program, window: int | None, values: Collection[str]) -> Program:
    """Of those that are issued as one of these."""
    lines = [i for i in program.instructions if i.sink is None]
    bare = _without_sinks(program, lines)
    exchanges = bare.exchanges
    places: list[_Place] = [(index, 0, index) for index in range(len(lines))]
    for number, exchange in enumerate(exchanges):
        if exchange.wait is None or lines[exchange.issue].value not in values:
            continue
        latest = len(lines) - 1
        if window is not None and number + window < len(exchanges):
            latest = exchanges[number + window].issue
        follow, needed = _followers(bare, lines, exchange.wait)
        latest = min(latest, needed - 1)
        for index in follow:
            places[index] = max(places[index], (latest, 1, index))
    return _reordered(program, lines, places)


def _depths(program: Program) -> dict[str, int]:
    """Of each exchange, how many are before it that it sends on."""
    nodes, found = program.graph.by_name, dict[str, int]()
    reached: dict[str, int] = {}
    for line in program.instructions:
        node = nodes[line.node]
        if line.sink is not None:
            continue
        before = max((reached.get(name, 0) for name in line.inputs), default=0)
        if node.collective is not None:
            before = before if any(_is_coded(nodes[i]) for i in node.inputs) else 0
            found[line.value] = before
        elif node.waits_for:
            before = found.get(_issued(node, line), 0) + 1
        elif not (node.is_free or node.op in CODED_CALLS):
            before = 0
        reached[line.value] = before
    return found


def issued_ahead(program: Program, count: int, room: Sequence[int] = ()) -> Program:
    """Issue each exchange up to ``count`` computing lines sooner, within its pass, and with
    ``room`` only past lines at which so many bytes as it then holds are free.

    It cannot be sooner than its arguments exist; a parameter's share always does, and what puts
    several side by side moves along.
    """
    lines = [i for i in program.instructions if i.sink is None]
    bare = _without_sinks(program, lines)
    nodes = program.graph.by_name
    born = {line.value: index for index, line in enumerate(lines)}
    places = {index: (index, 0, index) for index in range(len(lines))}
    free = [*room]
    for exchange in bare.exchanges:
        moved = _with_its_joining(lines, exchange.issue, nodes, born)
        first = lines[moved[0]]
        earliest = max((born[i] + 1 for i in first.inputs if i in born), default=0)
        holds = _held_bytes(program.graph, [nodes[lines[index].node] for index in moved])
        place, left = moved[0], count
        while place > earliest and left and lines[place - 1].phase is first.phase:
            if free and free[place - 1] < holds:
                break
            place -= 1
            left -= not nodes[lines[place].node].is_free
            if free:
                free[place] -= holds
        places |= {index: (place, -1, index) for index in moved}
    return _reordered(program, lines, places.values())


def sent_first(program: Program) -> Program:
    """Of what the backward pass computes between two issues, first what the second one sends: it
    goes on its way beside the rest, such as the gradient of what a layer was given. What is waited
    for, and what comes of that, stays where it is."""
    nodes = program.graph.by_name
    makes = {added: gradient for gradient, added in _added(program.graph)}
    ordered: list[Instruction] = []
    waiting: dict[str, Instruction] = {}
    arrived: set[str] = set()
    for line in (i for i in program.instructions if i.sink is None):
        node = nodes[line.node]
        if node.collective is not None and line.phase is Phase.BACKWARD:
            ordered += [*_needed_first(line, waiting, makes), line]
        elif node.waits_for or not arrived.isdisjoint(line.inputs):
            arrived.add(line.value)
            if not waiting.keys().isdisjoint(line.inputs):
                ordered += _all(waiting)
            ordered.append(line)
        elif line.phase is not Phase.BACKWARD or node.is_random or node.mutates:
            ordered += [*_all(waiting), line]
        else:
            waiting[line.value] = line
    return program.with_lines([*ordered, *_all(waiting)], on=program.graph)


def _needed_first(
    issue: Instruction, waiting: dict[str, Instruction], makes: Mapping[str, str]
) -> list[Instruction]:
    """Of the lines that wait, taken from them, those that this exchange sends something of."""
    needed = {*issue.inputs, *(makes[name] for name in issue.inputs if name in makes)}
    found: list[Instruction] = []
    for value, line in reversed([*waiting.items()]):
        if value in needed:
            needed.update(line.inputs)
            needed.update(makes[name] for name in line.inputs if name in makes)
            found.append(waiting.pop(value))
    return found[::-1]


def _all(waiting: dict[str, Instruction]) -> list[Instruction]:
    found = [*waiting.values()]
    waiting.clear()
    return found


_Place = tuple[int, int, int]


def _with_its_joining(
    lines: list[Instruction], issue: int, nodes: Mapping[str, Node], born: Mapping[str, int]
) -> tuple[int, ...]:
    """The line that issues, and before it the one that put side by side what it sends."""
    makers = [born[value] for value in lines[issue].inputs if value in born]
    joining = [index for index in makers if nodes[lines[index].node].op == JOINED_ROWS]
    return (*joining, issue)


def _goes_along(nodes: Mapping[str, Node], node: Node) -> bool:
    """Whether it only reads codes, sends them on or waits for them."""
    if node.collective is not None:
        return any(_is_coded(nodes[name]) for name in node.inputs)
    if node.waits_for:
        return _goes_along(nodes, nodes[node.waits_for])
    return node.op in CODED_CALLS - FIRST_CALLS


def _is_coded(node: Node) -> bool:
    return node.op in CODED_CALLS


def _issued(node: Node, line: Instruction) -> str:
    return line.inputs[node.inputs.index(node.waits_for)]


def _without_sinks(program: Program, lines: list[Instruction]) -> Program:
    return replace(program, instructions=tuple(lines))


def _held_bytes(graph: Graph, moved: Sequence[Node]) -> int:
    """What is there from these lines on: what they make, and what a backend keeps."""
    made = {storage for node in moved for storage in graph.storages_of(node.name)}
    kept = (node.collective.held_bytes for node in moved if node.collective is not None)
    return sum(graph.storages[storage].nbytes for storage in made) + sum(kept)


def _reordered(program: Program, lines: list[Instruction], places: Iterable[_Place]) -> Program:
    ordered = [lines[index] for _, _, index in sorted(places)]
    moved = program.with_lines(ordered, on=program.graph)
    assert not moved.problems(), moved.problems()
    return moved


def _added(graph: Graph) -> list[tuple[str, str]]:
    """Each gradient, and the sum of those so far that it is added to as it leaves."""
    return [(o.node, f"{SO_FAR}{o.target}") for o in graph.outputs if o.kind is OutputKind.GRADIENT]


def _followers(program: Program, lines: list[Instruction], wait: int) -> tuple[list[int], int]:
    """The wait with the views of its result, and the first line that does more than look at it, or
    reads what it is added to."""
    graph, nodes = program.graph, program.graph.by_name
    added = _added(graph)
    values = {lines[wait].value}
    sums = {so_far for value, so_far in added if value in values}
    follow = [wait]
    for index in range(wait + 1, len(lines)):
        if not sums.isdisjoint(lines[index].inputs):
            return follow, index
        if not values.intersection(lines[index].inputs):
            continue
        if not (nodes[lines[index].node].is_free or _goes_along(nodes, nodes[lines[index].node])):
            return follow, index
        values.add(lines[index].value)
        sums |= {so_far for value, so_far in added if value == lines[index].value}
        follow.append(index)
    return follow, len(lines)
