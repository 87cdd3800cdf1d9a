"""Offload state: weights, their gradients and what an optimizer keeps lie in farther memory.

ZeRO-Offload's and ZeRO-Infinity's trade (Rajbhandari et al., SC 2021), of each parameter apart: a
weight is fetched for the operators that read it, a gradient sent once it is complete; the update
fetches what it needs of one parameter after another and sends back what it changed. Struck last, so
that it counts the operators that really run. Not for which parameters: see search/.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from steelyard.core.errors import Mismatch
from steelyard.core.far_products import sliceable
from steelyard.core.graph import BlockRun, Graph, Node, OutputKind, Role, path_matches
from steelyard.core.program import Program
from steelyard.core.rules import Rule, starred
from steelyard.core.trade import Offer, Refusal, Source
from steelyard.core.trips import with_gradients_far, with_states_far, with_weights_far
from steelyard.core.updates import GRADIENT, WEIGHT, owners, states

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
# them exposed, many take the least memory and make products slow.
_LEAST_SLICED_BYTES = 16 << 20
_SLICE_BYTES = (16 << 20, 8 << 20, 4 << 20, 1 << 20)
# Two of them are near, so that of fewer nothing is gained.
_FEWEST_SLICES = 4
# A weight is read in the middle of a pass: fetching it begins some operators earlier. In slices one
# is enough: most of them come while it is read.
_LEADS = {OPTIMIZER: 1, GRADIENTS: 2, WEIGHTS: 2}
_LEAD_OF_SLICES = 1


class OffloadState:
    """Pays communication with far memory, buys memory for the whole step.

    To the bit, but for weights that are read in slices: there sums are added in another order.
    """

    name: ClassVar[str] = "offload_state"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False

    def offers(
        self,
        program: Program,
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        """One for each parameter, those of equal blocks together; of some in several numbers of
        slices, of which one can be taken."""
        offers = {what: self._offers(program, what) for what in MOVABLE}
        refusals = tuple(
            Refusal(trade=self.name, label=what, reason=_why_not(program) or _NOTHING_LARGE[what])
            for what, found in offers.items()
            if not found
        )
        return tuple(offer for found in offers.values() for offer in found), refusals

    def _offers(self, program: Program, what: str) -> list[Offer]:
        by_pattern: dict[str, list[tuple[int, ...]]] = {}
        for parameter, nbytes in movable(program, what).items():
            pattern = _pattern(parameter, program.graph.runs)
            by_pattern.setdefault(pattern, []).append(
                _parts(program, parameter, nbytes) if what == WEIGHTS else (0,)
            )
        found = []
        for pattern, parts in by_pattern.items():
            label = f"{what} of {pattern}{f' ({len(parts)})' if len(parts) > 1 else ''}"
            for degree in min(parts):
                rule = Rule(
                    trade=self.name,
                    module=pattern,
                    op=what,
                    count=len(parts),
                    degree=degree,
                    lead=_LEAD_OF_SLICES if degree else _LEADS[what],
                )
                sliced = f"{label}, {degree} slices" if degree else label
                found.append(Offer(trade=self.name, label=sliced, rules=(rule,)))
        return found

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: Source,
    ) -> Program:
        if not rules:
            return program
        from steelyard.operators import is_pointwise

        leads = {
            what: _leads(
                movable(program, what, least_bytes=1), [r for r in rules if r.op == what], program
            )
            for what in MOVABLE
        }
        slices = _slices(program, leads[WEIGHTS], [r for r in rules if r.op == WEIGHTS])
        program = _with_update(program, leads)
        program = with_weights_far(program, leads[WEIGHTS], slices, is_pointwise=is_pointwise)
        if slices:
            # So that what the new calls cost is known.
            source.rewritten(program.graph)
        return with_gradients_far(program, leads[GRADIENTS])


def _with_update(program: Program, leads: Mapping[str, Mapping[str, int]]) -> Program:
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
    return replace(program, update=with_states_far(update, moved, ahead))


def _why_not(program: Program) -> str:
    """Why nothing that is updated can be moved; empty where something may be."""
    update = program.update
    if program.graph.decomposition.startswith("inductor"):
        return "far memory is used by the runner python alone"
    if update is None:
        return "there is no optimizer in the plan"
    if update.undivided:
        return update.undivided
    if owners(update.graph) is None:
        return "the optimizer's operators work on several parameters at once (foreach=False?)"
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


def _parts(program: Program, parameter: str, nbytes: int) -> tuple[int, ...]:
    """Slices of a weight that is large and frozen, powers of two: the gradient of any other is as
    large as it is, and whole. 0 where it is fetched whole."""
    if nbytes < _LEAST_SLICED_BYTES or _is_updated(program, parameter):
        return (0,)
    if not sliceable(program, parameter):
        return (0,)
    powers = (1 << (nbytes // each).bit_length() - 1 for each in _SLICE_BYTES)
    return tuple(sorted({max(_FEWEST_SLICES, power) for power in powers}))


def _is_updated(program: Program, parameter: str) -> bool:
    return any(
        o.target == WEIGHT + parameter and o.kind is OutputKind.GRADIENT
        for o in program.graph.outputs
    )


def _slices(program: Program, weights: Mapping[str, int], rules: Sequence[Rule]) -> dict[str, int]:
    """Of each weight that is fetched in slices, how many; whole where something but products reads
    it now: another trade or another batch may have changed that."""
    found = {p: r.degree for r in rules for p in weights if path_matches(p, r.module) and r.degree}
    if updated := next((p for p in found if _is_updated(program, p)), None):
        raise Mismatch(
            f"the plan fetches {updated} in slices, and trains it",
            expected="slices of frozen weights: a gradient is whole",
            remedy="set slices of that rule to 0, or plan again",
        )
    return {parameter: n for parameter, n in found.items() if sliceable(program, parameter)}


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


def _pattern(parameter: str, runs: Sequence[BlockRun]) -> str:
    patterns = (starred(parameter, run) for run in sorted(runs, key=lambda r: -len(r.prefix)))
    return next((p for p in patterns if p is not None), parameter)


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
