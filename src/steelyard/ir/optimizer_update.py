"""Assigns the instructions of an optimizer step to parameters, based on their inputs.

This makes it possible to run the update of one parameter, or offload its state, separately from the
others. Not for tracing the step: see capture/tracing/optimizer.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, Role, path_matches
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule_kinds import ParameterRule

# Name prefixes of weights and of their gradients.
WEIGHT, GRADIENT = "parameter:", "gradient:"
_OWNED = frozenset({Role.PARAMETER, Role.GRADIENT, Role.STATE})


def update_digest(update: Program | None) -> str:
    """Return a digest of the optimizer's operators and state, independent of the learning rate.

    Empty if there is no update.
    """
    if update is None:
        return ""
    digest = sha256()
    for node in update.graph.nodes:
        shapes = [(tensor.shape, tensor.dtype) for tensor in node.outputs]
        # Calls are numbered in order, and input names identify the input tensors, so names suffice
        # here.
        digest.update(f"{node.name}|{node.op}|{shapes}\n".encode())
    return digest.hexdigest()[:16]


def parameters_of(graph: Graph, pattern: str) -> list[str]:
    """Return the input names of the parameters that match ``pattern``."""
    names = (node.name for node in graph.inputs() if node.name.startswith(WEIGHT))
    return [name for name in names if path_matches(name.removeprefix(WEIGHT), pattern)]


def parameters_named(graph: Graph, rule: ParameterRule) -> list[str]:
    """Return the parameters that a rule names; raise Mismatch if their number is not ``count``."""
    found = parameters_of(graph, rule.parameter)
    if len(found) != rule.count:
        raise Mismatch(
            f"{rule.trade} rule for {rule.parameter or 'nothing'} matches {len(found)} parameters "
            "of this model",
            expected=f"{rule.count}, as in the plan",
            remedy="plan again for this model, or edit parameter or count of that rule",
        )
    return found


def owners(graph: Graph) -> Mapping[str, str] | None:
    """Return the owning parameter of every value, "" for constants.

    None if a value depends on several parameters (as with ``foreach`` operators), if a value
    without an owner is not read by exactly one parameter, or if a constant is overwritten.
    """
    owner: dict[str, str] = {}
    for node in graph.nodes:
        if node.is_input:
            (tensor,) = node.outputs
            is_owned = graph.storages[tensor.storage].role in _OWNED
            owner[node.name] = parameter_of(node.name) if is_owned else ""
            continue
        if node.is_transfer:
            owner[node.name] = parameter_of(offloaded_name(node))
            continue
        parameters = {owner[name] for name in node.inputs} - {""}
        if len(parameters) > 1 or any(not owner[name] for name in node.mutates):
            return None
        owner[node.name] = next(iter(parameters), "")
    # A constant that was made into a tensor belongs to the parameter that reads it.
    for node in reversed(graph.nodes):
        if not owner[node.name] and not node.is_input:
            parameters = {owner[name] for name in graph.users[node.name]}
            if len(parameters) != 1:
                return None
            (owner[node.name],) = parameters
    return owner


def parameter_of(name: str) -> str:
    """Return the parameter of an input: ``state:blocks.0.weight:exp_avg`` belongs to
    ``blocks.0.weight``.
    """
    kind, _, rest = name.partition(":")
    return rest.rpartition(":")[0] if kind == "state" else rest


def offloaded_name(node: Node) -> str:
    """Return the name of the parameter's tensor that this call transfers."""
    name = node.args[0]
    assert isinstance(name, str)
    return name


def key_of(name: str) -> str:
    """Return the key of this tensor in the optimizer's state."""
    return name.rpartition(":")[2]


def states(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Return the names of each parameter's optimizer state, in the order of the step."""
    found: dict[str, list[str]] = {}
    for node in graph.inputs():
        if graph.storages[node.outputs[0].storage].role is Role.STATE:
            found.setdefault(parameter_of(node.name), []).append(node.name)
    return {parameter: tuple(names) for parameter, names in found.items()}


def portions(
    update: Program, owner: Mapping[str, str], alone: Collection[str]
) -> Iterator[tuple[str, list[Instruction]]]:
    """Yield the update of each parameter in ``alone``, then the update of all others under the name
    "".

    In the whole step, the lifetime of a value in one portion may end at a line of another portion.
    Here it ends at the next line of its own portion, or at the last one: each portion is one call,
    after which nothing is alive.
    """
    order = dict.fromkeys(o for i in update.instructions if (o := owner[i.node]) in alone)
    for portion in (*order, ""):
        lines = _lines_of(update, owner, portion, alone)
        if lines:
            yield portion, lines


def update_of(update: Program, parameters: Collection[str]) -> Program | None:
    """Return the optimizer step of these parameters alone; None if owners are unknown."""
    owner = owners(update.graph)
    if owner is None:
        return None
    others = {parameter for parameter in owner.values() if parameter} - set(parameters)
    lines: list[Instruction] = []
    # Values whose lifetime ends at a removed line, by the number of that line within the
    # consecutive lines of its parameter. The same line of the next parameter now ends their
    # lifetimes.
    inputs_at: dict[int, list[str]] = {}
    index, parameter = 0, ""
    for line in update.instructions:
        index = index + 1 if owner[line.node] == parameter else 0
        parameter = owner[line.node]
        own = [name for name in line.inputs if owner[name] not in others]
        if parameter in others:
            inputs_at.setdefault(index, []).extend(own)
        else:
            lines.append(_with_inputs(line, [*own, *inputs_at.pop(index, ())]))
    if lines:
        remaining = (name for names in inputs_at.values() for name in names)
        lines[-1] = _with_inputs(lines[-1], [*lines[-1].inputs, *remaining])
    made = {line.node for line in lines}
    nodes = [
        node
        for node in update.graph.nodes
        if node.name in made
        or (node.is_input and (node.name.startswith(WEIGHT) or owner[node.name] not in others))
    ]
    return replace(
        update, graph=replace(update.graph, nodes=tuple(nodes)), instructions=tuple(lines)
    )


def _lines_of(
    update: Program, owner: Mapping[str, str], portion: str, alone: Collection[str]
) -> list[Instruction]:
    def is_own(name: str) -> bool:
        parameter = owner[name]
        return parameter == portion or (not portion and parameter not in alone)

    made: set[str] = set()
    lines: list[Instruction] = []
    pending: list[str] = []
    for line in update.instructions:
        own = [name for name in line.inputs if is_own(name) or not owner[name]]
        if is_own(line.node):
            lines.append(_with_inputs(line, [*own, *pending]))
            made.add(line.value)
            pending = []
        else:
            pending += [name for name in own if name in made]
    if lines and pending:
        lines[-1] = _with_inputs(lines[-1], [*lines[-1].inputs, *pending])
    return lines


def _with_inputs(line: Instruction, names: Sequence[str]) -> Instruction:
    return replace(line, inputs=tuple(dict.fromkeys(names)))
