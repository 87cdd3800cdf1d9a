"""The few levels of micro-batches, chunks and offloaded state that the search explores.

Each level is explored as a step of its own. Not for choosing among the levels: see search.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import path_matches
from steelyard.ir.optimizer_update import WEIGHT, parameter_of, states
from steelyard.ir.program import Program
from steelyard.ir.rule_kinds import SlicedComputation, StateOffload

# Each number of micro-batches needs another capture, which takes seconds. If a step fits with few
# micro-batches, it is fastest with the fewest. So all coarse splits are explored, and only some
# finer ones.
_COARSEST, _FINER = 5, 3
_OPTIMIZER, _GRADIENT, _WEIGHT = "optimizer", "gradient", "weight"
# The shares of the bytes of each kind that are tried between none and all.
_SHARES: Mapping[str, tuple[float, ...]] = {
    _OPTIMIZER: (0.25, 0.5, 0.75), _GRADIENT: (), _WEIGHT: (0.5,)
}  # fmt: skip
_ALONE = (_GRADIENT, _WEIGHT)


def micro_batch_counts(degrees: Sequence[int]) -> tuple[int, ...]:
    """Return a few of the possible numbers of micro-batches, with the coarsest and the finest."""
    ordered = sorted(set(degrees))
    coarsest, finer = ordered[:_COARSEST], ordered[_COARSEST:]
    if len(finer) > _FINER:
        finer = [finer[(len(finer) - 1) * (i + 1) // _FINER] for i in range(_FINER)]
    return (*coarsest, *finer)


def chunk_levels(
    rules: Sequence[SlicedComputation],
) -> tuple[tuple[SlicedComputation, ...], ...]:
    """Return three levels: no chunks, all chunks in the fewest slices, all in the most."""
    by_spot: dict[SlicedComputation, list[SlicedComputation]] = {}
    for rule in rules:
        by_spot.setdefault(replace(rule, slices=0), []).append(rule)
    fewest = tuple(sorted(min(same) for same in by_spot.values()))
    most = tuple(sorted(max(same) for same in by_spot.values()))
    return tuple(dict.fromkeys(((), fewest, most)))


def slice_counts(rules: Sequence[StateOffload]) -> dict[StateOffload, tuple[int, ...]]:
    """Map each rule, without its number of slices, to the numbers that are offered."""
    found: dict[StateOffload, list[int]] = {}
    for rule in rules:
        found.setdefault(replace(rule, slices=0), []).append(rule.slices)
    return {rule: tuple(sorted(degrees)) for rule, degrees in found.items()}


def offload_levels(
    program: Program,
    rules: Sequence[StateOffload],
    finer: Sequence[Mapping[StateOffload, int]] = (),
) -> tuple[tuple[StateOffload, ...], ...]:
    """Return the levels of offloaded optimizer state, gradients and parameters, from none to all.

    Optimizer state comes first, in parts, the largest first, because it is needed only once per
    step. Then come gradients, then parameters, which each pass needs; each of these two is also
    offloaded alone. The last levels keep the data of only one parameter on the device. They offload
    all optimizer state, optimizer state with all gradients, and all three.

    ``rules`` contain each parameter once. Each level is repeated with each of the ``finer``
    numbers of slices. A parameter is sliced only where all its data is offloaded.
    """
    nbytes = offloaded_bytes(program, rules)
    by_op: dict[str, list[StateOffload]] = {}
    for rule in sorted(rules, key=lambda rule: (-nbytes[rule], rule)):
        by_op.setdefault(rule.what, []).append(rule)
    levels: list[Sequence[StateOffload]] = [()]
    full: list[Sequence[StateOffload]] = []
    for op, shares in _SHARES.items():
        before = levels[-1]
        rules_of_op = by_op.get(op, ())
        levels += [(*before, *_largest_share(rules_of_op, share, nbytes)) for share in shares]
        levels.append((*before, *rules_of_op))
        full.append(levels[-1])
    levels += [by_op.get(op, ()) for op in _ALONE]
    # If parameters are few and large, prefetching takes back most of the memory that was just
    # freed.
    levels += [[replace(rule, lead=0) for rule in level] for level in full]
    coarse = tuple(levels)
    for slices in finer:
        by_name = {(rule.parameter, rule.what): degree for rule, degree in slices.items()}
        levels += [
            [replace(r, slices=by_name.get((r.parameter, r.what), r.slices)) for r in level]
            for level in coarse
        ]
    ops_by_module = _ops_by_module(rules)
    return tuple(
        dict.fromkeys(tuple(sorted(_drop_partial_slices(level, ops_by_module))) for level in levels)
    )


def _ops_by_module(rules: Iterable[StateOffload]) -> dict[str, set[str]]:
    """Map each parameter pattern to the kinds of data that rules offload for it."""
    found: dict[str, set[str]] = {}
    for rule in rules:
        found.setdefault(rule.parameter, set()).add(rule.what)
    return found


def _drop_partial_slices(
    level: Sequence[StateOffload], all_ops: Mapping[str, set[str]]
) -> Iterator[StateOffload]:
    """Yield the rules, unsliced for parameters whose data is not all offloaded."""
    ops = _ops_by_module(level)
    for rule in level:
        yield rule if ops[rule.parameter] == all_ops[rule.parameter] else replace(rule, slices=0)


def _largest_share(
    largest_first: Sequence[StateOffload], share: float, nbytes: Mapping[StateOffload, int]
) -> list[StateOffload]:
    enough, nbytes_chosen, chosen = share * sum(nbytes[rule] for rule in largest_first), 0, []
    for rule in largest_first:
        if nbytes_chosen < enough:
            chosen.append(rule)
            nbytes_chosen += nbytes[rule]
    return chosen


def offloaded_bytes(program: Program, rules: Sequence[StateOffload]) -> dict[StateOffload, int]:
    """Map each rule to the bytes it offloads."""
    graph, update = program.graph, program.update
    bytes_by_op: dict[str, dict[str, int]] = {_OPTIMIZER: {}, _GRADIENT: {}, _WEIGHT: {}}
    for node in graph.inputs():
        if node.name.startswith(WEIGHT):
            nbytes = node.outputs[0].nbytes
            bytes_by_op[_WEIGHT][parameter_of(node.name)] = bytes_by_op[_GRADIENT][
                parameter_of(node.name)
            ] = nbytes
    if update is not None:
        for parameter, names in states(update.graph).items():
            sizes = (update.graph.by_name[name].outputs[0].nbytes for name in names)
            bytes_by_op[_OPTIMIZER][parameter] = sum(sizes)
    return {
        rule: sum(n for p, n in bytes_by_op[rule.what].items() if path_matches(p, rule.parameter))
        for rule in rules
    }
