"""Programs in which weights, gradients and what an optimizer keeps lie in offload memory.

A pass fetches each weight for the lines that read it, and sends each gradient once it is complete;
the update fetches what it needs of one parameter after another and sends back what it changed. Not
for which of them, nor how far ahead: see trades/. Not for carrying them out: see offload/.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import OutputKind, Phase
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT, owners, portions
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.sliced_gradients import with_gradients_in_slices
from steelyard.passes.offload.sliced_optimizer import in_slices
from steelyard.passes.offload.sliced_weight_matmuls import with_products_far
from steelyard.passes.offload.transfer_nodes import Calls, Looks, Running, interleave
from steelyard.passes.slicing.column_rules import IsPointwise


def with_states_far(
    update: Program,
    moved: Mapping[str, Sequence[str]],
    leads: Mapping[str, int],
    slices: Mapping[str, int],
) -> Program:
    """One parameter after another: fetch, update, send.

    ``moved`` are the names of what comes and goes of each. ``leads``: so many parameters earlier
    fetching begins, and so many later what was sent is let go. Gradients are not sent back. Those
    with ``slices`` are updated some rows at a time, from their first fetch to their last send.
    """
    owner = owners(update.graph)
    assert owner is not None
    calls = Calls(update.graph, Phase.UPDATE)
    groups = list(portions(update, owner, moved))
    order = [portion for portion, _ in groups if portion]
    back = {p: [name for name in moved[p] if not name.startswith(GRADIENT)] for p in order}
    lines: list[Instruction] = []
    for place, (portion, own) in enumerate(groups):
        for later, parameter in enumerate(order):
            if max(0, later - leads[parameter]) == place and parameter not in slices:
                lines += [calls.fetch(name) for name in moved[parameter]]
        if portion in slices:
            lines += in_slices(calls, update.graph, own, moved[portion], slices[portion])
        else:
            lines += [calls.fetched(name) for name in moved.get(portion, ())]
            # What is only read is there until the optimizer returns.
            read = [name for name in moved.get(portion, ()) if name not in back[portion]]
            lines += [*own[:-1], replace(own[-1], inputs=(*own[-1].inputs, *read))]
            lines += [calls.send(name, name) for name in back.get(portion, ())]
        for earlier, parameter in enumerate(order):
            last = min(earlier + leads[parameter], len(order) - 1)
            if last == place and parameter not in slices:
                lines += [calls.sent(name, name) for name in back[parameter]]
    result = replace(update, graph=calls.graph(), instructions=tuple(lines))
    assert not result.problems(), result.problems()
    return result


def with_weights_far(
    program: Program,
    leads: Mapping[str, int],
    slices: Mapping[str, int],
    *,
    is_pointwise: IsPointwise,
) -> Program:
    """Each of these parameters is fetched for the lines that read it, and let go behind them.

    Fetching begins ``lead`` operators before the first of them. Where that would be before the
    weight was last read, it stays instead. Those with more than one slice are never here whole:
    each product that reads one does so slice by slice, two of them near at a time, and with it goes
    what is pointwise behind it.
    """
    if not leads:
        return program
    if parted := {p: count for p, count in slices.items() if count > 1}:
        program = with_products_far(program, parted, leads, is_pointwise=is_pointwise)
        leads = {parameter: lead for parameter, lead in leads.items() if parameter not in parted}
    calls = Calls(program.graph, Phase.BACKWARD)
    looks = Looks(program, [WEIGHT + parameter for parameter in leads])
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    running = Running(program.graph, lines)
    fetching: dict[int, list[Instruction]] = {}
    arriving: dict[int, list[tuple[str, int]]] = {}
    for weight, reads in looks.reads(lines).items():
        lead = leads[weight.removeprefix(WEIGHT)]
        for number, first in enumerate(running.apart(reads, lead)):
            begin = running.before(first, lead)
            fetch = replace(calls.fetch(weight, number), phase=lines[begin].phase)
            fetching.setdefault(begin, []).append(fetch)
            arriving.setdefault(first, []).append((weight, number))
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += fetching.get(number, [])
        for weight, copy in arriving.get(number, []):
            ordered.append(replace(calls.fetched(weight, copy), phase=line.phase))
            looks.begin_anew(weight, copy)
        ordered += looks.rewritten(line)
    result = program.with_lines(ordered, on=calls.graph())
    assert not result.problems(), result.problems()
    return result


def with_gradients_far(
    program: Program, lags: Mapping[str, int], slices: Mapping[str, int]
) -> Program:
    """The gradients of these parameters are sent once they are complete, and let go ``lag``
    operators later. In micro-batches what was sent before is fetched as early, and added to. Those
    with more than one slice are sent in slices, each as soon as it is made."""
    if parted := {p: count for p, count in slices.items() if count > 1}:
        program = with_gradients_in_slices(program, parted, lags)
        lags = {parameter: lag for parameter, lag in lags.items() if parameter not in parted}
    if not lags:
        return program
    calls = Calls(program.graph, Phase.BACKWARD)
    lines = program.instructions
    running = Running(program.graph, lines)
    before: dict[int, list[Instruction]] = {}
    instead: dict[int, list[Instruction]] = {}
    behind: dict[int, list[Instruction]] = {}
    for number, line in enumerate(lines):
        sink = line.sink
        parameter = "" if sink is None else sink.target.removeprefix(WEIGHT)
        if sink is None or sink.kind is not OutputKind.GRADIENT or parameter not in lags:
            continue
        lag, name, (value,) = lags[parameter], GRADIENT + parameter, line.inputs
        taken = replace(line, sink=replace(sink, kind=OutputKind.FAR_GRADIENT))
        if program.repeats == 1:
            instead[number] = [taken, calls.send(name, value)]
            sent = calls.sent(name, value)
        else:
            fetch, old = calls.before(name, value)
            before.setdefault(running.before(number, lag), []).append(fetch)
            instead[number] = [old, taken, calls.send(name, value, old.value)]
            sent = calls.sent(name, old.value)
        behind.setdefault(running.behind(number, lag), []).append(sent)
    placed = interleave(lines, before=before, behind=behind, instead=instead)
    result = replace(program, graph=calls.graph(), instructions=tuple(placed))
    assert not result.problems(), result.problems()
    return result
