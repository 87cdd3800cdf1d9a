"""Offloads weights, gradients and optimizer states: puts transfers into the program.

A pass fetches each weight for the lines that read it, and sends each gradient once it is complete.
The update fetches the states of one parameter after another and sends back the ones that it
changed. Not for choosing states or lead times: see trades/. Not for the transfers themselves: see
offload/.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import OutputKind, Phase
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT, owners, portions
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.sliced_gradients import with_gradients_in_slices
from steelyard.passes.offload.sliced_optimizer import update_in_slices
from steelyard.passes.offload.sliced_weight_matmuls import with_sliced_weight_products
from steelyard.passes.offload.transfer_nodes import Calls, OffloadedViews, Running, interleave
from steelyard.passes.slicing.row_rules import IsPointwise


def with_offloaded_states(
    update: Program,
    offloaded: Mapping[str, Sequence[str]],
    leads: Mapping[str, int],
    slices: Mapping[str, int],
) -> Program:
    """Rewrite an optimizer update to fetch, update and send one parameter after another.

    ``offloaded`` maps each parameter to the names of its offloaded states. ``leads`` is a number of
    parameters: a fetch begins that many updates earlier, and a sent state is freed that many
    updates later. Gradients are not sent back. Parameters in ``slices`` are updated some rows at a
    time.
    """
    owner = owners(update.graph)
    assert owner is not None
    calls = Calls(update.graph, Phase.UPDATE)
    groups = list(portions(update, owner, offloaded))
    order = [portion for portion, _ in groups if portion]
    sent_back = {p: [name for name in offloaded[p] if not name.startswith(GRADIENT)] for p in order}
    lines: list[Instruction] = []
    for place, (portion, own) in enumerate(groups):
        for later, parameter in enumerate(order):
            if max(0, later - leads[parameter]) == place and parameter not in slices:
                lines += [calls.fetch(name) for name in offloaded[parameter]]
        if portion in slices:
            lines += update_in_slices(calls, update.graph, own, offloaded[portion], slices[portion])
        else:
            lines += [calls.fetched(name) for name in offloaded.get(portion, ())]
            # States that are only read stay resident until the optimizer returns.
            read = [name for name in offloaded.get(portion, ()) if name not in sent_back[portion]]
            lines += [*own[:-1], replace(own[-1], inputs=(*own[-1].inputs, *read))]
            lines += [calls.send(name, name) for name in sent_back.get(portion, ())]
        for earlier, parameter in enumerate(order):
            last = min(earlier + leads[parameter], len(order) - 1)
            if last == place and parameter not in slices:
                lines += [calls.sent(name, name) for name in sent_back[parameter]]
    result = replace(update, graph=calls.graph(), instructions=tuple(lines))
    assert not result.problems(), result.problems()
    return result


def with_offloaded_weights(
    program: Program,
    leads: Mapping[str, int],
    slices: Mapping[str, int],
    *,
    is_pointwise: IsPointwise,
) -> Program:
    """Rewrite a pass to fetch each of these parameters for the lines that read it.

    A fetch begins ``lead`` operators before the first reader. If that would be before the previous
    reader, the weight stays resident instead. Weights with more than one slice are never resident
    as a whole: each product reads them slice by slice, with two slices resident at a time, fused
    with the pointwise operators that follow.
    """
    if not leads:
        return program
    if sliced := {p: count for p, count in slices.items() if count > 1}:
        program = with_sliced_weight_products(program, sliced, leads, is_pointwise=is_pointwise)
        leads = {parameter: lead for parameter, lead in leads.items() if parameter not in sliced}
    calls = Calls(program.graph, Phase.BACKWARD)
    looks = OffloadedViews(program, [WEIGHT + parameter for parameter in leads])
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    clock = Running(program.graph, lines)
    fetching: dict[int, list[Instruction]] = {}
    arriving: dict[int, list[tuple[str, int]]] = {}
    for weight, reads in looks.reads(lines).items():
        lead = leads[weight.removeprefix(WEIGHT)]
        for number, first in enumerate(clock.first_of_runs(reads, lead)):
            begin = clock.before(first, lead)
            fetch = replace(calls.fetch(weight, number), phase=lines[begin].phase)
            fetching.setdefault(begin, []).append(fetch)
            arriving.setdefault(first, []).append((weight, number))
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += fetching.get(number, [])
        for weight, copy in arriving.get(number, []):
            ordered.append(replace(calls.fetched(weight, copy), phase=line.phase))
            looks.use_copy(weight, copy)
        ordered += looks.rewritten(line)
    result = program.with_lines(ordered, on=calls.graph())
    assert not result.problems(), result.problems()
    return result


def with_offloaded_gradients(
    program: Program, lags: Mapping[str, int], slices: Mapping[str, int]
) -> Program:
    """Rewrite a pass to send each of these gradients once complete; it is freed ``lag`` later.

    ``lag`` counts operators. With several micro-batches, the sum so far is fetched ``lag``
    operators earlier, and the gradient is added to it. Gradients with more than one slice are sent
    slice by slice, each as soon as it is made.
    """
    if sliced := {p: count for p, count in slices.items() if count > 1}:
        program = with_gradients_in_slices(program, sliced, lags)
        lags = {parameter: lag for parameter, lag in lags.items() if parameter not in sliced}
    if not lags:
        return program
    calls = Calls(program.graph, Phase.BACKWARD)
    lines = program.instructions
    clock = Running(program.graph, lines)
    before: dict[int, list[Instruction]] = {}
    instead: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    for number, line in enumerate(lines):
        sink = line.sink
        parameter = "" if sink is None else sink.target.removeprefix(WEIGHT)
        if sink is None or sink.kind is not OutputKind.GRADIENT or parameter not in lags:
            continue
        lag, name, (value,) = lags[parameter], GRADIENT + parameter, line.inputs
        taken = replace(line, sink=replace(sink, kind=OutputKind.OFFLOADED_GRADIENT))
        if program.repeats == 1:
            instead[number] = [taken, calls.send(name, value)]
            sent = calls.sent(name, value)
        else:
            fetch, old = calls.fetch_sum(name, value)
            before.setdefault(clock.before(number, lag), []).append(fetch)
            instead[number] = [old, taken, calls.send(name, value, old.value)]
            sent = calls.sent(name, old.value)
        after.setdefault(clock.after(number, lag), []).append(sent)
    placed = interleave(lines, before=before, after=after, instead=instead)
    result = replace(program, graph=calls.graph(), instructions=tuple(placed))
    assert not result.problems(), result.problems()
    return result
