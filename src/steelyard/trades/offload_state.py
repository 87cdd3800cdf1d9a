"""Offload state: weights, their gradients and what an optimizer keeps lie in offload memory.

ZeRO-Offload's and ZeRO-Infinity's trade (Rajbhandari et al., SC 2021), of each parameter apart: a
weight is fetched for the operators that read it, a gradient sent once it is complete; the update
fetches what it needs of one parameter after another and sends back what it changed. Struck last, so
that it counts the operators that really run. Not for which parameters: see search/.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, OutputKind, Role, path_matches
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT, owners, states
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.step_source import StepSource
from steelyard.passes.offload.sliced_gradients import made_by_products
from steelyard.passes.offload.sliced_weight_matmuls import sliceable
from steelyard.passes.offload.state_transfers import (
    with_gradients_far,
    with_states_far,
    with_weights_far,
)
from steelyard.plans.rule_table import MOST_PARAMETERS, Parameter, Positive, RuleTable, Whole
from steelyard.plans.trade import Offer, Rejection

# Of a parameter; less costs as many calls and buys nothing. A smaller tensor, such as the number of
# the step, stays where it is.
_LEAST_BYTES, _LEAST_TENSOR_BYTES = 64 << 10, 1024
# What of a parameter can be moved, each by rules of its own.
OPTIMIZER, GRADIENTS, WEIGHTS = "optimizer", "gradient", "weight"
MOVABLE = (OPTIMIZER, GRADIENTS, WEIGHTS)
_NOTHING_LARGE = {
    OPTIMIZER: "the optimizer keeps nothing large",
    GRADIENTS: "no gradient is large and whole",
    WEIGHTS: "no weight is large, whole and only read",
}
# Of a weight that may be fetched in slices, and of the slices: few leave the first and the last of
# them exposed, many take the least memory and make products slow. Two of them are near, so that of
# few nothing is gained.
_LEAST_SLICED_BYTES, _FEWEST_SLICES = 16 << 20, 4
_SLICE_BYTES = (16 << 20, 8 << 20, 4 << 20, 1 << 20)
# Of one that is trained, and of its gradient. An update has slices of weight, gradient and state
# near at once, and smaller ones make it no slower.
_TRAINED_SLICE_BYTES, _UPDATE_SLICE_BYTES = 8 << 20, 2 << 20
# A weight is read in the middle of a pass: fetching it begins some operators earlier. In slices one
# is enough: most of them come while it is read.
_LEADS = {OPTIMIZER: 1, GRADIENTS: 2, WEIGHTS: 2}
_LEAD_OF_SLICES = 1

_ON_RANKS = "is not tried where ranks exchange gradients"


class OffloadStateTable(RuleTable):
    """``[[offload_state]]``: the state of a parameter that is offloaded, and in how many slices."""

    most: ClassVar[int] = MOST_PARAMETERS

    module: Parameter
    op: Annotated[Literal["optimizer", "gradient", "weight"], Field(alias="what")] = "optimizer"
    count: Positive = 1
    degree: Annotated[Whole, Field(alias="slices")] = 0
    lead: Whole = 0


class OffloadState:
    """Pays communication with offload memory, buys memory for the whole step.

    To the bit, but for weights that are read in slices: there sums are added in another order. A
    trained weight in slices is so in its update too, with its gradient and its state.
    """

    name: ClassVar[str] = "offload_state"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = OffloadStateTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """One for each parameter, those of equal blocks together; of some in several numbers of
        slices, of which one can be taken."""
        if program.layout.num_ranks > 1:
            refusal = Rejection(trade=self.name, label=", ".join(MOVABLE), reason=_ON_RANKS)
            return (), (refusal,)
        able = {what: movable(program, what) for what in MOVABLE}
        possible = _possible(program, able)
        offers = {what: self._offers(program, what, able, possible) for what in MOVABLE}
        refusals = [
            Rejection(trade=self.name, label=what, reason=_why_not(program) or _NOTHING_LARGE[what])
            for what, found in offers.items()
            if not found
        ]
        refusals += [
            Rejection(trade=self.name, label=f"{part} in slices", reason=reason)
            for part, reason in possible.whole.items()
        ]
        return tuple(offer for found in offers.values() for offer in found), tuple(refusals)

    def _offers(
        self,
        program: Program,
        what: str,
        able: Mapping[str, Mapping[str, int]],
        possible: "_SliceLimits",
    ) -> list[Offer]:
        by_pattern: dict[str, list[tuple[int, ...]]] = {}
        for parameter in able[what]:
            pattern = pattern_of(parameter, program.graph.runs)
            by_pattern.setdefault(pattern, []).append(possible.of[what].get(parameter, (0,)))
        found = []
        for pattern, parts in by_pattern.items():
            label = f"{what} of {pattern}{f' ({len(parts)})' if len(parts) > 1 else ''}"
            for degree in min(parts):
                is_read_so = what == WEIGHTS and degree
                rule = Rule(
                    trade=self.name,
                    module=pattern,
                    op=what,
                    count=len(parts),
                    degree=degree,
                    lead=_LEAD_OF_SLICES if is_read_so else _LEADS[what],
                )
                sliced = f"{label}, {degree} slices" if len(min(parts)) > 1 else label
                found.append(Offer(trade=self.name, label=sliced, rules=(rule,)))
        return found

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: StepSource,
    ) -> Program:
        if not rules:
            return program
        if program.layout.num_ranks > 1:
            raise Mismatch(
                f"the plan lies on {program.layout.num_ranks} ranks and moves weights, gradients "
                "or what the optimizer keeps",
                expected="one of the two",
                remedy="take the offload_state rules out of the plan, or plan again",
            )
        from steelyard.operators import is_pointwise

        leads = {
            what: _leads(
                movable(program, what, least_bytes=1), [r for r in rules if r.op == what], program
            )
            for what in MOVABLE
        }
        slices = {what: _degrees(leads[what], [r for r in rules if r.op == what]) for what in leads}
        program = _with_update(program, leads, _updated_in_slices(program, leads, slices))
        # Whole where the pass has become another, by another trade or another batch.
        read = _of(slices[WEIGHTS], sliceable(program, slices[WEIGHTS]))
        program = with_weights_far(program, leads[WEIGHTS], read, is_pointwise=is_pointwise)
        if read:
            # So that what the new calls cost is known.
            source.rewritten(program.graph)
        made = made_by_products(program, slices[GRADIENTS])
        return with_gradients_far(program, leads[GRADIENTS], _of(slices[GRADIENTS], made))


def _of(slices: Mapping[str, int], able: Collection[str]) -> dict[str, int]:
    return {parameter: count for parameter, count in slices.items() if parameter in able}


def _with_update(
    program: Program, leads: Mapping[str, Mapping[str, int]], slices: Mapping[str, int]
) -> Program:
    """What is far between steps comes near for the update."""
    update = program.update
    if update is None:
        return program
    kept = states(update.graph)
    moved: dict[str, tuple[str, ...]] = {}
    for parameter in _trained(program):
        names = (
            *([WEIGHT + parameter] if parameter in leads[WEIGHTS] else ()),
            *([GRADIENT + parameter] if parameter in leads[GRADIENTS] else ()),
            *(_large(update.graph, kept[parameter]) if parameter in leads[OPTIMIZER] else ()),
        )
        if names:
            moved[parameter] = names
    if not moved:
        return program
    ahead = {p: max(given.get(p, 0) for given in leads.values()) for p in moved}
    return replace(program, update=with_states_far(update, moved, ahead, slices))


def _why_not(program: Program) -> str:
    """Why nothing that is updated can be moved; empty where something may be."""
    update = program.update
    if program.graph.decomposition.startswith("inductor"):
        return "offload memory is used by the runner python alone"
    if update is None:
        return "there is no optimizer in the plan"
    if update.undivided:
        return update.undivided
    if owners(update.graph) is None:
        return (
            "the optimizer's operators work on several parameters at once (foreach=False and "
            "fused=False?)"
        )
    return ""


def _trained(program: Program) -> list[str]:
    """The parameters that the update changes, in its order."""
    assert program.update is not None
    names = (node.name for node in program.update.graph.inputs())
    return [name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)]


def movable(program: Program, what: str, *, least_bytes: int = _LEAST_BYTES) -> dict[str, int]:
    """The parameters of which this could be moved, in the order of the step, and its bytes."""
    reason = _why_not(program)
    if what == WEIGHTS:
        found = _weights(program, is_updated=not reason)
    elif reason:
        found = {}
    else:
        found = _gradients(program) if what == GRADIENTS else _kept(program)
    return {parameter: nbytes for parameter, nbytes in found.items() if nbytes >= least_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceLimits:
    """Into how many each of these may be taken apart, and why what is large is whole."""

    of: Mapping[str, Mapping[str, tuple[int, ...]]]
    whole: Mapping[str, str]


def _possible(program: Program, able: Mapping[str, Mapping[str, int]]) -> _SliceLimits:
    """Of large weights that only products read; of one that is trained, all that its update needs.
    Parameters of one rule are taken apart together or not at all."""
    found: dict[str, dict[str, tuple[int, ...]]] = {what: {} for what in MOVABLE}
    whole: dict[str, str] = {}
    kept = {} if program.update is None else states(program.update.graph)
    named: dict[str, set[str]] = {}
    for parameter in dict.fromkeys(p for given in able.values() for p in given):
        named.setdefault(pattern_of(parameter, program.graph.runs), set()).add(parameter)
    large = [p for p, nbytes in able[WEIGHTS].items() if nbytes >= _LEAST_SLICED_BYTES]
    read = sliceable(program, large)
    made = made_by_products(program, [p for p in large if p in able[GRADIENTS]])
    for pattern, parameters in named.items():
        sizes = {p: able[WEIGHTS].get(p, 0) for p in parameters}
        if min(sizes.values()) < _LEAST_SLICED_BYTES:
            continue
        reasons = (
            _why_whole(program, p, able)
            if p in read
            else "not only products read it of which it is the right side, or the left one turned"
            for p in sorted(parameters)
        )
        if reason := next(filter(None, reasons), ""):
            whole[pattern] = reason
            continue
        for parameter, nbytes in sizes.items():
            found[WEIGHTS][parameter] = _parts(nbytes, is_trained=_is_updated(program, parameter))
            if kept.get(parameter):
                found[OPTIMIZER][parameter] = (nbytes // _UPDATE_SLICE_BYTES,)
            if parameter in made:
                found[GRADIENTS][parameter] = (nbytes // _TRAINED_SLICE_BYTES,)
            elif parameter in able[GRADIENTS]:
                whole[f"gradient of {pattern}"] = "no single product makes it"
    return _SliceLimits(of=found, whole=whole)


def _parts(nbytes: int, *, is_trained: bool) -> tuple[int, ...]:
    """Slices of a weight; of one that is only read in several numbers, powers of two."""
    if is_trained:
        return (nbytes // _TRAINED_SLICE_BYTES,)
    powers = (1 << (nbytes // each).bit_length() - 1 for each in _SLICE_BYTES)
    return tuple(sorted({max(_FEWEST_SLICES, power) for power in powers}))


def _why_whole(program: Program, parameter: str, able: Mapping[str, Mapping[str, int]]) -> str:
    """Why a weight that only products read is not taken apart; empty where it can be."""
    if not _is_updated(program, parameter):
        return ""
    assert program.update is not None
    if parameter not in able[GRADIENTS]:
        return "its gradient cannot be moved"
    if _left_near(program.update.graph, parameter, is_moved=parameter in able[OPTIMIZER]):
        return "what the optimizer keeps for it cannot be moved"
    return program.update.uncut.get(parameter, "")


def _left_near(update: Graph, parameter: str, *, is_moved: bool) -> list[str]:
    """What the optimizer keeps for it, besides numbers, that stays where it is."""
    kept = states(update).get(parameter, ())
    gone = _large(update, kept) if is_moved else ()
    return [n for n in kept if n not in gone and update.by_name[n].outputs[0].numel > 1]


def _is_updated(program: Program, parameter: str) -> bool:
    return any(
        o.target == WEIGHT + parameter and o.kind is OutputKind.GRADIENT
        for o in program.graph.outputs
    )


def _degrees(parameters: Iterable[str], rules: Sequence[Rule]) -> dict[str, int]:
    """Of each that moves in slices, how many."""
    found = {p: r.degree for r in rules for p in parameters if path_matches(p, r.module)}
    return {parameter: count for parameter, count in found.items() if count > 1}


def _updated_in_slices(
    program: Program,
    leads: Mapping[str, Mapping[str, int]],
    slices: Mapping[str, Mapping[str, int]],
) -> dict[str, int]:
    """Of each trained weight that moves in slices, those of its update: the most that a rule names.
    All that the update needs has to come in slices then."""
    cut = [p for p in slices[WEIGHTS] if _is_updated(program, p)]
    for parameter in (*cut, *slices[OPTIMIZER]):
        assert program.update is not None
        reason = program.update.uncut.get(parameter, "")
        if parameter not in slices[WEIGHTS]:
            reason = "its weight does not move in slices"
        elif parameter not in leads[GRADIENTS]:
            reason = "its gradient does not move"
        elif _left_near(program.update.graph, parameter, is_moved=parameter in slices[OPTIMIZER]):
            reason = "what the optimizer keeps for it does not move in slices"
        if reason:
            raise Mismatch(
                f"the plan updates {parameter} in slices, and {reason}",
                expected="slices for weight and optimizer alike, and the gradient moved",
                remedy="set slices of its rules to 0, or plan again",
            )
    return {p: max(given.get(p, 0) for given in slices.values()) for p in cut}


def _weights(program: Program, *, is_updated: bool) -> dict[str, int]:
    """Those that lie alone, are only read, and of which nothing leaves the step."""
    graph = program.graph
    if graph.decomposition.startswith("inductor"):
        return {}
    changing = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    if not is_updated:
        changing |= {o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT}
        changing |= {WEIGHT + parameter for parameter in graph.unused}
    stay = graph.written | {s for o in graph.outputs for s in graph.storages_of(o.node)}
    return {
        node.name.removeprefix(WEIGHT): node.outputs[0].nbytes
        for node in _alone(graph)
        if node.name.startswith(WEIGHT)
        and node.name not in changing
        and node.outputs[0].storage not in stay
    }


def _gradients(program: Program) -> dict[str, int]:
    """Those that are made whole, and leave the step as nothing else."""
    graph, trained = program.graph, set(_trained(program))
    leaving = Counter(s for o in graph.outputs for s in graph.storages_of(o.node))
    found = {}
    for output in graph.outputs:
        parameter = output.target.removeprefix(WEIGHT)
        (tensor, *others) = graph.by_name[output.node].outputs
        storage = graph.storages[tensor.storage]
        is_whole = tensor.nbytes == storage.nbytes and not tensor.pending and not others
        if (
            output.kind is OutputKind.GRADIENT
            and parameter in trained
            and is_whole
            and storage.role is Role.ACTIVATION
            and leaving[tensor.storage] == 1
        ):
            found[parameter] = tensor.nbytes
    return found


def _kept(program: Program) -> dict[str, int]:
    """What the optimizer keeps, where each large tensor lies alone."""
    assert program.update is not None
    update = program.update.graph
    alone = {node.name for node in _alone(update)}
    return {
        parameter: sum(_nbytes(update, name) for name in _large(update, names))
        for parameter, names in states(update).items()
        if alone.issuperset(_large(update, names))
    }


def _large(update: Graph, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(n for n in names if _nbytes(update, n) >= _LEAST_TENSOR_BYTES)


def _nbytes(graph: Graph, name: str) -> int:
    return graph.by_name[name].outputs[0].nbytes


def _alone(graph: Graph) -> Iterator[Node]:
    """Inputs that fill their storage, and are all that lies there."""
    on = Counter(t.storage for node in graph.inputs() for t in node.outputs)
    for node in graph.inputs():
        if len(node.outputs) == 1:
            (tensor,) = node.outputs
            if on[tensor.storage] == 1 and tensor.nbytes == graph.storages[tensor.storage].nbytes:
                yield node


def _leads(able: Mapping[str, int], rules: Sequence[Rule], program: Program) -> dict[str, int]:
    """Each parameter that the rules name, in the order of the step, and its lead."""
    leads: dict[str, int] = {}
    for rule in rules:
        named = [p for p in able if path_matches(p, rule.module)]
        if len(named) != rule.count:
            reason = _why_not(program)
            raise Mismatch(
                f"offload_state rule for {rule.op} of {rule.module} matches {len(named)} "
                f"parameters of which it can be moved{f': {reason}' if reason else ''}",
                expected=f"{rule.count}, as the plan says",
                remedy="plan again for this model, or edit parameter or count of that rule",
            )
        if twice := next((p for p in named if p in leads), None):
            raise Mismatch(
                f"two offload_state rules name {rule.op} of {twice}",
                expected="each parameter in one rule",
                remedy="take one of them out of the plan, or plan again",
            )
        leads |= dict.fromkeys(named, rule.lead)
    return {parameter: leads[parameter] for parameter in able if parameter in leads}
