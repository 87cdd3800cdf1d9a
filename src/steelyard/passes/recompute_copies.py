"""When a value that is made again is made: for which of the late lines that read it each copy is.

What the recompute trade writes by and the search counts by. Not for which values: see search/.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from steelyard.ir.graph import Graph
from steelyard.ir.program import Instruction

# The line that reads a value, and the last that reads what that line made of it by looking only.
Span = tuple[int, int]


def starts(reads: Iterable[Span], times: int) -> tuple[int, ...]:
    """The lines before which a value is made, at most so many: the first that reads it, and those
    that end its longest waits."""
    apart = merged(reads)
    waits = [(begin - end, begin) for (_, end), (begin, _) in pairwise(apart)]
    longest = sorted(waits, key=lambda wait: (-wait[0], wait[1]))[: times - 1]
    return (apart[0][0], *sorted(begin for _, begin in longest))


def merged(reads: Iterable[Span]) -> list[Span]:
    """The same lines, in spans that do not overlap."""
    apart: list[Span] = []
    for begin, end in sorted(reads):
        if apart and begin <= apart[-1][1]:
            begin, end = apart[-1][0], max(end, apart.pop()[1])
        apart.append((begin, end))
    return apart


def late_reads(
    graph: Graph, lines: Sequence[Instruction], first_late: int, storages: Collection[int]
) -> dict[int, list[Span]]:
    """Of each of these storages of the forward pass, where the backward pass reads it."""
    begun: dict[int, list[list[int]]] = {storage: [] for storage in storages}
    early = {node.name for node in graph.nodes} - {i.value for i in lines[first_late:]}
    # By late value, the reads that it prolongs, since it lies on what was read.
    looks: dict[str, list[tuple[int, list[int]]]] = {}
    for number in range(first_late, len(lines)):
        line = lines[number]
        found: list[tuple[int, list[int]]] = []
        for name in line.inputs:
            found += looks.get(name, [])
            if name in early:
                found += [(s, [number, number]) for s in graph.storages_of(name) if s in begun]
        own = set(graph.storages_of(line.node)) if found else set()
        for storage, span in found:
            if span[0] == number:
                begun[storage].append(span)
            span[1] = number
            if storage in own:
                looks.setdefault(line.value, []).append((storage, span))
    return {s: [(begin, end) for begin, end in spans] for s, spans in begun.items()}
