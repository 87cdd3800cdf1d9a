"""Offload state: weights, gradients and optimizer state in offload memory.

This is the idea of ZeRO-Offload and ZeRO-Infinity (Rajbhandari et al., SC 2021), decided for each
parameter. A weight is fetched for the operators that read it, and a gradient is sent once it is
complete. The update fetches the tensors of one parameter after another, and sends back those that
it changed. The trade is applied last, so that it counts the operators that really run. Not for
choosing parameters: see search/.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, OutputKind, Role, path_matches
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT, owners, states
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.rule_kinds import StateOffload, StatePart
from steelyard.ir.step_source import StepSource
from steelyard.passes.offload.sliced_gradients import made_by_products
from steelyard.passes.offload.sliced_weight_matmuls import sliceable
from steelyard.passes.offload.state_transfers import (
    with_offloaded_gradients,
    with_offloaded_states,
    with_offloaded_weights,
)
from steelyard.plans.trade import Offer, Rejection

# Minimum sizes of a parameter and of a tensor: smaller ones cost as many calls and save hardly
# anything. A smaller tensor, such as the step number, stays on the device.
_LEAST_BYTES, _LEAST_TENSOR_BYTES = 64 << 10, 1024
# The parts of a parameter's state that can be offloaded, each by its own rules.
OPTIMIZER: StatePart = "optimizer"
GRADIENTS: StatePart = "gradient"
WEIGHTS: StatePart = "weight"
MOVABLE = (OPTIMIZER, GRADIENTS, WEIGHTS)
_NOTHING_LARGE = {
    OPTIMIZER: "no optimizer state is large",
    GRADIENTS: "no gradient is large and unsharded",
    WEIGHTS: "no weight is large, unsharded and only read",
}
# Limits for fetching a weight in slices. With few slices, the transfers of the first and the last
# one stay exposed; with many, memory is smallest but products are slow. Two slices are resident at
# a time, so very few slices save nothing.
_LEAST_SLICED_BYTES, _FEWEST_SLICES = 16 << 20, 4
_SLICE_BYTES = (16 << 20, 8 << 20, 4 << 20, 1 << 20)
# Sizes of the slices of a trained weight with its gradient, and of its update. An update has slices
# of weight, gradient and state resident at the same time, and smaller slices make it no slower.
_TRAINED_SLICE_BYTES, _UPDATE_SLICE_BYTES = 8 << 20, 2 << 20
# A weight is read in the middle of a pass, so its fetch starts some operators earlier. With slices,
# one operator is enough, because most slices arrive while the weight is read.
_LEADS = {OPTIMIZER: 1, GRADIENTS: 2, WEIGHTS: 2}
_LEAD_OF_SLICES = 1

_NOT_ON_RANKS = "is not searched if ranks exchange gradients"


@dataclass(frozen=True, kw_only=True)
class OffloadStateRule(StateOffload):
    """``[[offload_state]]``: the part of a parameter's state that is offloaded, and its slices."""

    trade: str = field(init=False, default="offload_state")


class OffloadState:
    """Pays communication with offload memory, buys memory for the whole step.

    Results are bitwise equal, except with weights that are read in slices, whose products are
    summed in another order. A trained weight in slices is also updated in slices, with its gradient
    and its state.
    """

    name: ClassVar[str] = OffloadStateRule.trade
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = OffloadStateRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Offer each part of each parameter's state; parameters of equal blocks share an offer.

        A weight may have offers for several numbers of slices, of which one can be taken.
        """
        if program.layout.num_ranks > 1:
            refusal = Rejection(trade=self.name, label=", ".join(MOVABLE), reason=_NOT_ON_RANKS)
            return (), (refusal,)
        offloadable = {what: movable(program, what) for what in MOVABLE}
        limits = _slice_limits(program, offloadable)
        offers = {what: self._offers(program, what, offloadable, limits) for what in MOVABLE}
        refusals = [
            Rejection(trade=self.name, label=what, reason=_why_not(program) or _NOTHING_LARGE[what])
            for what, found in offers.items()
            if not found
        ]
        refusals += [
            Rejection(trade=self.name, label=f"{part} in slices", reason=reason)
            for part, reason in limits.whole.items()
        ]
        return tuple(offer for found in offers.values() for offer in found), tuple(refusals)

    def _offers(
        self,
        program: Program,
        what: StatePart,
        offloadable: Mapping[StatePart, Mapping[str, int]],
        limits: "_SliceLimits",
    ) -> list[Offer]:
        by_pattern: dict[str, list[tuple[int, ...]]] = {}
        for parameter in offloadable[what]:
            pattern = pattern_of(parameter, program.graph.runs)
            by_pattern.setdefault(pattern, []).append(limits.of[what].get(parameter, (0,)))
        found = []
        for pattern, parts in by_pattern.items():
            label = f"{what} of {pattern}{f' ({len(parts)})' if len(parts) > 1 else ''}"
            for degree in min(parts):
                reads_slices = what == WEIGHTS and degree
                rule = OffloadStateRule(
                    parameter=pattern,
                    what=what,
                    count=len(parts),
                    slices=degree,
                    lead=_LEAD_OF_SLICES if reads_slices else _LEADS[what],
                )
                sliced = f"{label}, {degree} slices" if len(min(parts)) > 1 else label
                found.append(Offer(trade=self.name, label=sliced, rules=(rule,)))
        return found

    def rewrite(
        self,
        program: Program,
        rules: Sequence[OffloadStateRule],
        source: StepSource,
    ) -> Program:
        if not rules:
            return program
        if program.layout.num_ranks > 1:
            raise Mismatch(
                f"the plan needs {program.layout.num_ranks} ranks and offloads weights, gradients "
                "or optimizer state",
                expected="a plan with one rank, or without offload_state rules",
                remedy="remove the offload_state rules from the plan, or plan again",
            )
        from steelyard.operators import is_pointwise

        leads = {
            what: _leads(
                movable(program, what, least_bytes=1), [r for r in rules if r.what == what], program
            )
            for what in MOVABLE
        }
        slices = {
            what: _degrees(leads[what], [r for r in rules if r.what == what]) for what in leads
        }
        program = _with_update(program, leads, _updated_in_slices(program, leads, slices))
        # Slices are dropped if another trade or another batch size made the pass unsliceable.
        sliced_reads = _restricted_to(slices[WEIGHTS], sliceable(program, slices[WEIGHTS]))
        program = with_offloaded_weights(
            program, leads[WEIGHTS], sliced_reads, is_pointwise=is_pointwise
        )
        if sliced_reads:
            # This registers the new graph, so that the costs of its new calls are known.
            source.rewritten(program.graph)
        sliced_gradients = made_by_products(program, slices[GRADIENTS])
        return with_offloaded_gradients(
            program, leads[GRADIENTS], _restricted_to(slices[GRADIENTS], sliced_gradients)
        )


def _restricted_to(slices: Mapping[str, int], allowed: Collection[str]) -> dict[str, int]:
    return {parameter: count for parameter, count in slices.items() if parameter in allowed}


def _with_update(
    program: Program, leads: Mapping[StatePart, Mapping[str, int]], slices: Mapping[str, int]
) -> Program:
    """Return the program whose update fetches the offloaded tensors and sends them back."""
    update = program.update
    if update is None:
        return program
    state_names = states(update.graph)
    offloaded: dict[str, tuple[str, ...]] = {}
    for parameter in _trained(program):
        names = (
            *([WEIGHT + parameter] if parameter in leads[WEIGHTS] else ()),
            *([GRADIENT + parameter] if parameter in leads[GRADIENTS] else ()),
            *(
                _large_tensors(update.graph, state_names[parameter])
                if parameter in leads[OPTIMIZER]
                else ()
            ),
        )
        if names:
            offloaded[parameter] = names
    if not offloaded:
        return program
    lead_of = {p: max(given.get(p, 0) for given in leads.values()) for p in offloaded}
    return replace(program, update=with_offloaded_states(update, offloaded, lead_of, slices))


def _why_not(program: Program) -> str:
    """Return the reason why no updated tensor can be offloaded; empty if some can."""
    update = program.update
    if program.graph.decomposition.startswith("inductor"):
        return "only the python runner uses offload memory"
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
    """Return the parameters that the update changes, in its order."""
    assert program.update is not None
    names = (node.name for node in program.update.graph.inputs())
    return [name.removeprefix(GRADIENT) for name in names if name.startswith(GRADIENT)]


def movable(program: Program, what: str, *, least_bytes: int = _LEAST_BYTES) -> dict[str, int]:
    """Return the parameters whose part ``what`` can be offloaded, with the bytes of that part, in
    step order.
    """
    reason = _why_not(program)
    if what == WEIGHTS:
        found = _weights(program, is_updated=not reason)
    elif reason:
        found = {}
    else:
        found = _gradients(program) if what == GRADIENTS else _states(program)
    return {parameter: nbytes for parameter, nbytes in found.items() if nbytes >= least_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceLimits:
    """The possible numbers of slices for each part of a parameter, and why large parts have
    none.
    """

    of: Mapping[str, Mapping[str, tuple[int, ...]]]
    whole: Mapping[str, str]


def _slice_limits(
    program: Program, offloadable: Mapping[StatePart, Mapping[str, int]]
) -> _SliceLimits:
    """Return the possible numbers of slices of large weights that are only read by matrix products.

    For a trained weight, all tensors of its update must be sliceable too. The parameters of one
    rule are either all sliced or not at all.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {what: {} for what in MOVABLE}
    whole: dict[str, str] = {}
    states_of = {} if program.update is None else states(program.update.graph)
    named: dict[str, set[str]] = {}
    for parameter in dict.fromkeys(p for given in offloadable.values() for p in given):
        named.setdefault(pattern_of(parameter, program.graph.runs), set()).add(parameter)
    large = [p for p, nbytes in offloadable[WEIGHTS].items() if nbytes >= _LEAST_SLICED_BYTES]
    read = sliceable(program, large)
    made = made_by_products(program, [p for p in large if p in offloadable[GRADIENTS]])
    for pattern, parameters in named.items():
        sizes = {p: offloadable[WEIGHTS].get(p, 0) for p in parameters}
        if min(sizes.values()) < _LEAST_SLICED_BYTES:
            continue
        reasons = (
            _why_not_sliceable(program, p, offloadable)
            if p in read
            else "not every use is as the right or the transposed left operand of a product"
            for p in sorted(parameters)
        )
        if reason := next(filter(None, reasons), ""):
            whole[pattern] = reason
            continue
        for parameter, nbytes in sizes.items():
            found[WEIGHTS][parameter] = _slice_counts(
                nbytes, is_trained=_is_updated(program, parameter)
            )
            if states_of.get(parameter):
                found[OPTIMIZER][parameter] = (nbytes // _UPDATE_SLICE_BYTES,)
            if parameter in made:
                found[GRADIENTS][parameter] = (nbytes // _TRAINED_SLICE_BYTES,)
            elif parameter in offloadable[GRADIENTS]:
                whole[f"gradient of {pattern}"] = "it is not the result of a single product"
    return _SliceLimits(of=found, whole=whole)


def _slice_counts(nbytes: int, *, is_trained: bool) -> tuple[int, ...]:
    """Return the possible numbers of slices of a weight: several powers of two if it is not
    trained.
    """
    if is_trained:
        return (nbytes // _TRAINED_SLICE_BYTES,)
    powers = (1 << (nbytes // each).bit_length() - 1 for each in _SLICE_BYTES)
    return tuple(sorted({max(_FEWEST_SLICES, power) for power in powers}))


def _why_not_sliceable(
    program: Program, parameter: str, offloadable: Mapping[StatePart, Mapping[str, int]]
) -> str:
    """Return why a weight that products read cannot be sliced; empty if it can."""
    if not _is_updated(program, parameter):
        return ""
    assert program.update is not None
    if parameter not in offloadable[GRADIENTS]:
        return "its gradient cannot be offloaded"
    if _resident_states(
        program.update.graph, parameter, is_offloaded=parameter in offloadable[OPTIMIZER]
    ):
        return "its optimizer state cannot be offloaded"
    return program.update.unsliceable.get(parameter, "")


def _resident_states(update: Graph, parameter: str, *, is_offloaded: bool) -> list[str]:
    """Return the optimizer state of a parameter, without scalars, that stays on the device."""
    state_names = states(update).get(parameter, ())
    offloaded = _large_tensors(update, state_names) if is_offloaded else ()
    return [n for n in state_names if n not in offloaded and update.by_name[n].outputs[0].numel > 1]


def _is_updated(program: Program, parameter: str) -> bool:
    return any(
        o.target == WEIGHT + parameter and o.kind is OutputKind.GRADIENT
        for o in program.graph.outputs
    )


def _degrees(parameters: Iterable[str], rules: Sequence[OffloadStateRule]) -> dict[str, int]:
    """Return the number of slices of each parameter that is transferred in slices."""
    found = {p: r.slices for r in rules for p in parameters if path_matches(p, r.parameter)}
    return {parameter: count for parameter, count in found.items() if count > 1}


def _updated_in_slices(
    program: Program,
    leads: Mapping[StatePart, Mapping[str, int]],
    slices: Mapping[StatePart, Mapping[str, int]],
) -> dict[str, int]:
    """Return the number of slices in the update of each trained weight in slices: the largest of
    any rule.

    Raise Mismatch unless every tensor of that update is transferred in slices.
    """
    sliced = [p for p in slices[WEIGHTS] if _is_updated(program, p)]
    for parameter in (*sliced, *slices[OPTIMIZER]):
        assert program.update is not None
        reason = program.update.unsliceable.get(parameter, "")
        if parameter not in slices[WEIGHTS]:
            reason = "its weight is not offloaded in slices"
        elif parameter not in leads[GRADIENTS]:
            reason = "its gradient is not offloaded"
        elif _resident_states(
            program.update.graph, parameter, is_offloaded=parameter in slices[OPTIMIZER]
        ):
            reason = "its optimizer state is not offloaded in slices"
        if reason:
            raise Mismatch(
                f"the plan updates {parameter} in slices, but {reason}",
                expected="weight and optimizer state in slices, and an offloaded gradient",
                remedy="set slices of its rules to 0, or plan again",
            )
    return {p: max(given.get(p, 0) for given in slices.values()) for p in sliced}


def _weights(program: Program, *, is_updated: bool) -> dict[str, int]:
    """Return the weights that own their storage, are only read, and do not leave the step."""
    graph = program.graph
    if graph.decomposition.startswith("inductor"):
        return {}
    changed = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    if not is_updated:
        changed |= {o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT}
        changed |= {WEIGHT + parameter for parameter in graph.unused}
    resident = graph.written | {s for o in graph.outputs for s in graph.storages_of(o.node)}
    return {
        node.name.removeprefix(WEIGHT): node.outputs[0].nbytes
        for node in _sole_tensors(graph)
        if node.name.startswith(WEIGHT)
        and node.name not in changed
        and node.outputs[0].storage not in resident
    }


def _gradients(program: Program) -> dict[str, int]:
    """Return the gradients that are computed whole and are exactly one output of the step."""
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


def _states(program: Program) -> dict[str, int]:
    """Return the parameters whose large optimizer state tensors all own their storage."""
    assert program.update is not None
    update = program.update.graph
    sole = {node.name for node in _sole_tensors(update)}
    return {
        parameter: sum(_nbytes(update, name) for name in _large_tensors(update, names))
        for parameter, names in states(update).items()
        if sole.issuperset(_large_tensors(update, names))
    }


def _large_tensors(update: Graph, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(n for n in names if _nbytes(update, n) >= _LEAST_TENSOR_BYTES)


def _nbytes(graph: Graph, name: str) -> int:
    return graph.by_name[name].outputs[0].nbytes


def _sole_tensors(graph: Graph) -> Iterator[Node]:
    """Yield the inputs that fill their storage and do not share it."""
    on = Counter(t.storage for node in graph.inputs() for t in node.outputs)
    for node in graph.inputs():
        if len(node.outputs) == 1:
            (tensor,) = node.outputs
            if on[tensor.storage] == 1 and tensor.nbytes == graph.storages[tensor.storage].nbytes:
                yield node


def _leads(
    offloadable: Mapping[str, int], rules: Sequence[OffloadStateRule], program: Program
) -> dict[str, int]:
    """Return the lead of each parameter that the rules name, in step order."""
    leads: dict[str, int] = {}
    for rule in rules:
        named = [p for p in offloadable if path_matches(p, rule.parameter)]
        if len(named) != rule.count:
            reason = _why_not(program)
            raise Mismatch(
                f"offload_state rule for {rule.what} of {rule.parameter} matches {len(named)} "
                f"parameters for which it can be offloaded{f': {reason}' if reason else ''}",
                expected=f"{rule.count}, as in the plan",
                remedy="plan again for this model, or edit parameter or count of that rule",
            )
        if twice := next((p for p in named if p in leads), None):
            raise Mismatch(
                f"two offload_state rules name {rule.what} of {twice}",
                expected="each parameter in one rule",
                remedy="remove one of them from the plan, or plan again",
            )
        leads |= dict.fromkeys(named, rule.lead)
    return {parameter: leads[parameter] for parameter in offloadable if parameter in leads}
