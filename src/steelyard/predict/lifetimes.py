"""The lifetime of each tensor of a step, on the same instants as the predicted timeline.

Not for the bytes at each line (see liveness.py) or for drawing (see report/).
"""

from collections.abc import Iterator

from steelyard.ir.graph import Phase, Role
from steelyard.ir.program import Program
from steelyard.plans.lifetimes import Lifetime, MemoryHistory
from steelyard.plans.peak_memory import LiveTensor
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import (
    held_underway,
    in_flight_tensor,
    label_of,
    owners_and_last_reads,
)
from steelyard.predict.step import StepPass, passes_of, resident_tensors, timeline_of


def memory_history(program: Program, costs: CostTable) -> MemoryHistory | None:
    """Return the tensors alive at each instant of a step; None for a pipeline, whose ranks differ.

    If ranks take unequal shares of the batch, it is the history of the rank with the highest peak.
    """
    if program.pipeline is not None:
        return None
    costs = costs.on(program.layout.num_ranks)
    fullest, passes = max(
        ((one, passes_of(one, costs)) for one in (program, *program.sibling_programs)),
        key=lambda found: max(p.nbytes for p in found[1]),
    )
    end = sum(len(one.program.instructions) for one in passes)
    found = [
        Lifetime(tensor=tensor, first=0, last=end - 1)
        for tensor in resident_tensors(fullest, costs)
        if tensor.nbytes
    ]
    begin = 0
    for one in passes:
        found += _of_pass(one, begin)
        begin += len(one.program.instructions)
    return MemoryHistory(timeline=timeline_of(costs, passes), lifetimes=tuple(found))


def _of_pass(one: StepPass, begin: int) -> Iterator[Lifetime]:
    program, end = one.program, len(one.program.instructions)
    graph = program.graph
    for tensor in one.base:
        if tensor.nbytes and end:
            yield Lifetime(tensor=tensor, first=begin, last=begin + end - 1)
    owners, last = owners_and_last_reads(program, accumulating=one.accumulating)
    for key, (born, instruction) in owners.items():
        node, nbytes = graph.by_name[instruction.node], graph.storages[key[0]].nbytes
        if not nbytes:
            continue
        use = path = ""
        is_saved = False
        if last[key] < end:
            reader = program.instructions[last[key]]
            use = label_of(graph, reader) if reader.sink is None else ""
            path = graph.by_name[reader.node].path if reader.sink is None else ""
            is_saved = instruction.phase is Phase.FORWARD and reader.phase is Phase.BACKWARD
        tensor = LiveTensor(
            nbytes=nbytes, what=label_of(graph, instruction), path=node.path, line=node.line,
            phase=node.phase, role=Role.ACTIVATION,
        )  # fmt: skip
        yield Lifetime(
            tensor=tensor, first=begin + born, last=begin + min(last[key], end - 1), last_use=use,
            last_path=path, is_saved=is_saved,
        )  # fmt: skip
    for exchange, nbytes in held_underway(program):
        node = graph.by_name[program.instructions[exchange.issue].node]
        until = end - 1 if exchange.wait is None else exchange.wait
        yield Lifetime(
            tensor=in_flight_tensor(node, nbytes), first=begin + exchange.issue, last=begin + until
        )
