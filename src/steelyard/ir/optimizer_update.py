"""Which lines of an optimizer's step belong to which parameter, told from what they read.

For whoever moves one parameter's update, or what it keeps, away from the others'. Not for how it is
traced: see capture/tracing/optimizer.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, Role, path_matches
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import Rule

# How the names of weights and of their gradients begin.
WEIGHT, GRADIENT = "parameter:", "gradient:"
_OWNED = frozenset({Role.PARAMETER, Role.GRADIENT, Role.STATE})


def update_digest(update: Program | None) -> str:
    """Names the operators of an optimizer's step and what it keeps, whatever its learning rate;
    empty where there is none."""
    if update is None:
        return ""
    digest = sha256()
    for node in update.graph.nodes:
        shapes = [(tensor.shape, tensor.dtype) for tensor in node.outputs]
        # Calls are numbered in their order, and inputs have names that tell.
        digest.update(f"{node.name}|{node.op}|{shapes}\n".encode())
    return digest.hexdigest()[:16]


def parameters_of(graph: Graph, pattern: str) -> list[str]:
    """The step's inputs that are parameters of this name."""
    names = (node.name for node in graph.inputs() if node.name.startswith(WEIGHT))
    return [name for name in names if path_matches(name.removeprefix(WEIGHT), pattern)]


def parameters_named(graph: Graph, rule: Rule) -> list[str]:
    """Those that a rule is of; as many as it says, or it is for another model."""
    found = parameters_of(graph, rule.module)
    if len(found) != rule.count:
        raise Mismatch(
            f"{rule.trade} rule for {rule.module or 'nothing'} matches {len(found)} parameters "
            "of this model",
            expected=f"{rule.count}, as the plan says",
            remedy="plan again for this model, or edit parameter or count of that rule",
        )
    return found


def owners(graph: Graph) -> Mapping[str, str] | None:
    """The parameter of every value, "" for constants; None where a value is made of several, as by
    ``foreach`` operators, or read by several, or a constant is written.
    """
    owner: dict[str, str] = {}
    for node in graph.nodes:
        if node.is_input:
            (tensor,) = node.outputs
            is_owned = graph.storages[tensor.storage].role in _OWNED
            owner[node.name] = parameter_of(node.name) if is_owned else ""
            continue
        if node.is_far:
            owner[node.name] = parameter_of(far_name(node))
            continue
        found = {owner[name] for name in node.inputs} - {""}
        if len(found) > 1 or any(not owner[name] for name in node.mutates):
            return None
        owner[node.name] = next(iter(found), "")
    # A number that was made into a tensor is theirs who read it.
    for node in reversed(graph.nodes):
        if not owner[node.name] and not node.is_input:
            found = {owner[name] for name in graph.users[node.name]}
            if len(found) != 1:
                return None
            (owner[node.name],) = found
    return owner


def parameter_of(name: str) -> str:
    """``state:blocks.0.weight:exp_avg`` is kept for ``blocks.0.weight``."""
    kind, _, rest = name.partition(":")
    return rest.rpartition(":")[0] if kind == "state" else rest


def far_name(node: Node) -> str:
    """Which of a parameter's tensors this call moves."""
    name = node.args[0]
    assert isinstance(name, str)
    return name


def key_of(name: str) -> str:
    """Under which the optimizer keeps it."""
    return name.rpartition(":")[2]


def states(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Of each parameter, in the order of the step, the names of what the optimizer keeps for it."""
    found: dict[str, list[str]] = {}
    for node in graph.inputs():
        if graph.storages[node.outputs[0].storage].role is Role.STATE:
            found.setdefault(parameter_of(node.name), []).append(node.name)
    return {parameter: tuple(names) for parameter, names in found.items()}


def portions(
    update: Program, owner: Mapping[str, str], alone: Collection[str]
) -> Iterator[tuple[str, list[Instruction]]]:
    """The update of each of these parameters by itself, in the order of the step; then of all
    others together, under the name "".

    What a line of another portion held until then dies with the next line of its own, or with the
    last: each portion is one call, which holds nothing when it is over.
    """
    order = dict.fromkeys(o for i in update.instructions if (o := owner[i.node]) in alone)
    for portion in (*order, ""):
        lines = _lines_of(update, owner, portion, alone)
        if lines:
            yield portion, lines


def update_of(update: Program, parameters: Collection[str]) -> Program | None:
    """As it is where only these have gradients; None where lines do not tell whose they are."""
    owner = owners(update.graph)
    if owner is None:
        return None
    others = {whose for whose in owner.values() if whose} - set(parameters)
    lines: list[Instruction] = []
    # What a parameter's lines hold until a certain line of the next one's, or to the end.
    late: dict[int, list[str]] = {}
    number, whose = 0, ""
    for line in update.instructions:
        number = number + 1 if owner[line.node] == whose else 0
        whose = owner[line.node]
        own = [name for name in line.inputs if owner[name] not in others]
        if whose in others:
            late.setdefault(number, []).extend(own)
        else:
            lines.append(_reading(line, [*own, *late.pop(number, ())]))
    if lines:
        left = (name for names in late.values() for name in names)
        lines[-1] = _reading(lines[-1], [*lines[-1].inputs, *left])
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
        theirs = owner[name]
        return theirs == portion or (not portion and theirs not in alone)

    made: set[str] = set()
    lines: list[Instruction] = []
    late: list[str] = []
    for line in update.instructions:
        own = [name for name in line.inputs if is_own(name) or not owner[name]]
        if is_own(line.node):
            lines.append(_reading(line, [*own, *late]))
            made.add(line.value)
            late = []
        else:
            late += [name for name in own if name in made]
    if lines and late:
        lines[-1] = _reading(lines[-1], [*lines[-1].inputs, *late])
    return lines


def _reading(line: Instruction, names: Sequence[str]) -> Instruction:
    return replace(line, inputs=tuple(dict.fromkeys(names)))
