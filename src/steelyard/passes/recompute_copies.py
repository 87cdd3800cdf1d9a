"""Places recomputed copies of a value: determines which backward lines read each copy.

The recompute trade and the estimator of the search both use it. Not for choosing values: see
search/.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from steelyard.ir.graph import Graph
from steelyard.ir.program import Instruction

# A read: the line that reads a value, and the last line that reads it or a view made by the former.
Span = tuple[int, int]


def starts(reads: Iterable[Span], times: int) -> tuple[int, ...]:
    """Return the lines before which a value is recomputed, at most ``times`` of them.

    These are the line of the first read and those of the reads after the longest gaps.
    """
    spans = merged(reads)
    gaps = [(begin - end, begin) for (_, end), (begin, _) in pairwise(spans)]
    longest = sorted(gaps, key=lambda gap: (-gap[0], gap[1]))[: times - 1]
    return (spans[0][0], *sorted(begin for _, begin in longest))


def merged(reads: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans."""
    spans: list[Span] = []
    for begin, end in sorted(reads):
        if spans and begin <= spans[-1][1]:
            begin, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((begin, end))
    return spans


def late_reads(
    graph: Graph, lines: Sequence[Instruction], first_backward_line: int, storages: Collection[int]
) -> dict[int, list[Span]]:
    """Return the spans of lines in which the backward pass reads each of these forward storages."""
    begun: dict[int, list[list[int]]] = {storage: [] for storage in storages}
    early = {node.name for node in graph.nodes} - {i.value for i in lines[first_backward_line:]}
    # For each backward value that is a view of the storage that was read: the reads that it
    # extends.
    extended: dict[str, list[tuple[int, list[int]]]] = {}
    for number in range(first_backward_line, len(lines)):
        line = lines[number]
        found: list[tuple[int, list[int]]] = []
        for name in line.inputs:
            found += extended.get(name, [])
            if name in early:
                found += [(s, [number, number]) for s in graph.storages_of(name) if s in begun]
        own = set(graph.storages_of(line.node)) if found else set()
        for storage, span in found:
            if span[0] == number:
                begun[storage].append(span)
            span[1] = number
            if storage in own:
                extended.setdefault(line.value, []).append((storage, span))
    return {s: [(begin, end) for begin, end in spans] for s, spans in begun.items()}
