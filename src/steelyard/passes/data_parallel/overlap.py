"""Overlaps collectives with computation: issues them earlier and waits for them later.

A later wait hides more of a collective, but keeps its buffers alive longer. The lines of a program
are moved, without torch. Not for choosing the window, which affects time and memory: see search/.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.gradient_codec import CODED_CALLS, FIRST_CALLS
from steelyard.ir.graph import PACK_ROWS, Graph, Node, OutputKind, Phase
from steelyard.ir.program import SO_FAR, Instruction, Program


def waits_within(program: Program, window: int | None) -> Program:
    """Wait for each collective only after the issue of the ``window``-th collective after it.

    The wait stays before the first line that computes with the result; with a window of None, this
    is the only limit. Views of the result move with the wait. For compressed gradients, the lines
    that decode the result or send it on also move, and the second collective gets a window of its
    own.
    """
    depths = _collective_depths(program)
    for depth in range(max(depths.values(), default=-1) + 1):
        program = _delay_waits(program, window, {v for v, d in depths.items() if d == depth})
    return program


def _delay_waits(program: Program, window: int | None, values: Collection[str]) -> Program:
    """Delay the waits for the collectives that are issued as one of these values."""
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


def _collective_depths(program: Program) -> dict[str, int]:
    """Return each collective's depth: how many collectives its data has already passed through."""
    nodes, found = program.graph.by_name, dict[str, int]()
    reached: dict[str, int] = {}
    for line in program.instructions:
        node = nodes[line.node]
        if line.sink is not None:
            continue
        before = max((reached.get(name, 0) for name in line.inputs), default=0)
        if node.collective is not None:
            before = before if any(_is_codec_call(nodes[i]) for i in node.inputs) else 0
            found[line.value] = before
        elif node.waits_for:
            before = found.get(_issued(node, line), 0) + 1
        elif not (node.is_free or node.op in CODED_CALLS):
            before = 0
        reached[line.value] = before
    return found


def issued_ahead(program: Program, count: int, room: Sequence[int] = ()) -> Program:
    """Issue each collective up to ``count`` computing lines earlier, within its pass.

    It moves only to a line where its arguments exist. (A parameter shard always exists, and the
    line that joins several shards moves with the collective.) If ``room``, the free bytes at each
    line, is given, a collective only moves past lines with enough room for its buffers.
    """
    lines = [i for i in program.instructions if i.sink is None]
    bare = _without_sinks(program, lines)
    nodes = program.graph.by_name
    born = {line.value: index for index, line in enumerate(lines)}
    places = {index: (index, 0, index) for index in range(len(lines))}
    free = [*room]
    for exchange in bare.exchanges:
        moved = _with_joining_line(lines, exchange.issue, nodes, born)
        first = lines[moved[0]]
        earliest = max((born[i] + 1 for i in first.inputs if i in born), default=0)
        buffer_bytes = _live_bytes(program.graph, [nodes[lines[index].node] for index in moved])
        place, left = moved[0], count
        while place > earliest and left and lines[place - 1].phase is first.phase:
            if free and free[place - 1] < buffer_bytes:
                break
            place -= 1
            left -= not nodes[lines[place].node].is_free
            if free:
                free[place] -= buffer_bytes
        places |= {index: (place, -1, index) for index in moved}
    return _reordered(program, lines, places.values())


def sent_first(program: Program) -> Program:
    """Reorder the backward pass so that the data of the next collective is computed first.

    The collective then overlaps the rest, such as the gradient of a layer's input. Waits, and the
    lines that depend on them, stay in place.
    """
    nodes = program.graph.by_name
    gradient_of_sum = {added: gradient for gradient, added in _gradient_sums(program.graph)}
    ordered: list[Instruction] = []
    waiting: dict[str, Instruction] = {}
    arrived: set[str] = set()
    for line in (i for i in program.instructions if i.sink is None):
        node = nodes[line.node]
        if node.collective is not None and line.phase is Phase.BACKWARD:
            ordered += [*_take_needed(line, waiting, gradient_of_sum), line]
        elif node.waits_for or not arrived.isdisjoint(line.inputs):
            arrived.add(line.value)
            if not waiting.keys().isdisjoint(line.inputs):
                ordered += _take_all(waiting)
            ordered.append(line)
        elif line.phase is not Phase.BACKWARD or node.is_random or node.mutates:
            ordered += [*_take_all(waiting), line]
        else:
            waiting[line.value] = line
    return program.with_lines([*ordered, *_take_all(waiting)], on=program.graph)


def _take_needed(
    issue: Instruction, waiting: dict[str, Instruction], gradient_of_sum: Mapping[str, str]
) -> list[Instruction]:
    """Return the lines on which this collective depends, and remove them from ``waiting``."""
    needed = {
        *issue.inputs,
        *(gradient_of_sum[name] for name in issue.inputs if name in gradient_of_sum),
    }
    found: list[Instruction] = []
    for value, line in reversed([*waiting.items()]):
        if value in needed:
            needed.update(line.inputs)
            needed.update(gradient_of_sum[name] for name in line.inputs if name in gradient_of_sum)
            found.append(waiting.pop(value))
    return found[::-1]


def _take_all(waiting: dict[str, Instruction]) -> list[Instruction]:
    found = [*waiting.values()]
    waiting.clear()
    return found


_Place = tuple[int, int, int]


def _with_joining_line(
    lines: list[Instruction], issue: int, nodes: Mapping[str, Node], born: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the line that issues it, preceded by the line that joins the tensors it sends, if
    any.
    """
    makers = [born[value] for value in lines[issue].inputs if value in born]
    joining = [index for index in makers if nodes[lines[index].node].op == PACK_ROWS]
    return (*joining, issue)


def _passes_codes_on(nodes: Mapping[str, Node], node: Node) -> bool:
    """True if the node only decodes compressed gradients, sends them on or waits for them."""
    if node.collective is not None:
        return any(_is_codec_call(nodes[name]) for name in node.inputs)
    if node.waits_for:
        return _passes_codes_on(nodes, nodes[node.waits_for])
    return node.op in CODED_CALLS - FIRST_CALLS


def _is_codec_call(node: Node) -> bool:
    return node.op in CODED_CALLS


def _issued(node: Node, line: Instruction) -> str:
    return line.inputs[node.inputs.index(node.waits_for)]


def _without_sinks(program: Program, lines: list[Instruction]) -> Program:
    return replace(program, instructions=tuple(lines))


def _live_bytes(graph: Graph, nodes: Sequence[Node]) -> int:
    """Return the bytes that these lines keep alive: their results and the backend's buffers."""
    storages = {storage for node in nodes for storage in graph.storages_of(node.name)}
    backend_bytes = (node.collective.held_bytes for node in nodes if node.collective is not None)
    return sum(graph.storages[storage].nbytes for storage in storages) + sum(backend_bytes)


def _reordered(program: Program, lines: list[Instruction], places: Iterable[_Place]) -> Program:
    ordered = [lines[index] for _, _, index in sorted(places)]
    moved = program.with_lines(ordered, on=program.graph)
    assert not moved.problems(), moved.problems()
    return moved


def _gradient_sums(graph: Graph) -> list[tuple[str, str]]:
    """Return pairs of a gradient and the micro-batch sum to which it is added as an output."""
    return [(o.node, f"{SO_FAR}{o.target}") for o in graph.outputs if o.kind is OutputKind.GRADIENT]


def _followers(program: Program, lines: list[Instruction], wait: int) -> tuple[list[int], int]:
    """Return the lines that move with a wait, and the first line that must stay after it.

    The wait moves together with views of its result and the lines that pass compressed gradients
    on. The first other line that reads the result, or a sum to which the result is added, must stay
    after it.
    """
    graph, nodes = program.graph, program.graph.by_name
    added = _gradient_sums(graph)
    values = {lines[wait].value}
    sums = {so_far for value, so_far in added if value in values}
    follow = [wait]
    for index in range(wait + 1, len(lines)):
        if not sums.isdisjoint(lines[index].inputs):
            return follow, index
        if not values.intersection(lines[index].inputs):
            continue
        if not (
            nodes[lines[index].node].is_free or _passes_codes_on(nodes, nodes[lines[index].node])
        ):
            return follow, index
        values.add(lines[index].value)
        sums |= {so_far for value, so_far in added if value == lines[index].value}
        follow.append(index)
    return follow, len(lines)
