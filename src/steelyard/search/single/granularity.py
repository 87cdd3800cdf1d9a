"""How much of what could be cut, sliced or moved is looked at: few levels of each.

Each level is a step of its own to explore. Not for choosing among them: see search.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import path_matches
from steelyard.ir.optimizer_update import WEIGHT, parameter_of, states
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule

# Each number of micro-batches is another capture, which takes seconds. What fits in few parts is
# fastest in the fewest: those are all looked at, and of the others some.
_COARSEST, _FINER = 5, 3
_OPTIMIZER, _GRADIENT, _WEIGHT = "optimizer", "gradient", "weight"
# Of the bytes of each, those moved before all of them are.
_SHARES: Mapping[str, tuple[float, ...]] = {
    _OPTIMIZER: (0.25, 0.5, 0.75), _GRADIENT: (), _WEIGHT: (0.5,)
}  # fmt: skip
_ALONE = (_GRADIENT, _WEIGHT)


def splits(degrees: Sequence[int]) -> tuple[int, ...]:
    """Few numbers of parts from all that are possible, the coarsest and the finest among them."""
    ordered = sorted(set(degrees))
    coarsest, finer = ordered[:_COARSEST], ordered[_COARSEST:]
    if len(finer) > _FINER:
        finer = [finer[(len(finer) - 1) * (i + 1) // _FINER] for i in range(_FINER)]
    return (*coarsest, *finer)


def slices(rules: Sequence[Rule]) -> tuple[tuple[Rule, ...], ...]:
    """Nothing sliced; all that can be, in as few slices as are offered; in as many."""
    by_spot: dict[Rule, list[Rule]] = {}
    for rule in rules:
        by_spot.setdefault(replace(rule, degree=0), []).append(rule)
    fewest = tuple(sorted(min(same) for same in by_spot.values()))
    most = tuple(sorted(max(same) for same in by_spot.values()))
    return tuple(dict.fromkeys(((), fewest, most)))


def numbers_of_slices(rules: Sequence[Rule]) -> dict[Rule, tuple[int, ...]]:
    """Of each rule but for its number of slices, those that are offered."""
    found: dict[Rule, list[int]] = {}
    for rule in rules:
        found.setdefault(replace(rule, degree=0), []).append(rule.degree)
    return {rule: tuple(sorted(degrees)) for rule, degrees in found.items()}


def moved_states(
    program: Program,
    rules: Sequence[Rule],
    finer: Sequence[Mapping[Rule, int]] = (),
) -> tuple[tuple[Rule, ...], ...]:
    """What is moved of weights, gradients and what the optimizer keeps, from nothing to all.

    What the optimizer keeps first, some of it, the largest first: it is wanted once a step. Then
    gradients, then weights, which each pass wants again; each of the two alone as well. At last all
    of the first, of the first two and of all three with only one parameter's near. ``rules`` have
    each weight once; with each of the ``finer`` numbers of slices each level is looked at too. A
    parameter is in slices where all of it moves.
    """
    nbytes = moved_bytes(program, rules)
    by_what: dict[str, list[Rule]] = {}
    for rule in sorted(rules, key=lambda rule: (-nbytes[rule], rule)):
        by_what.setdefault(rule.op, []).append(rule)
    levels: list[Sequence[Rule]] = [()]
    whole: list[Sequence[Rule]] = []
    for what, shares in _SHARES.items():
        before = levels[-1]
        own = by_what.get(what, ())
        levels += [(*before, *_share_of(own, share, nbytes)) for share in shares]
        levels.append((*before, *own))
        whole.append(levels[-1])
    levels += [by_what.get(what, ()) for what in _ALONE]
    # Where parameters are few and large, what is fetched ahead is most of what was moved.
    levels += [[replace(rule, lead=0) for rule in level] for level in whole]
    first = tuple(levels)
    for slices in finer:
        by_name = {(rule.module, rule.op): degree for rule, degree in slices.items()}
        levels += [
            [replace(r, degree=by_name.get((r.module, r.op), r.degree)) for r in level]
            for level in first
        ]
    whats = _whats(rules)
    return tuple(dict.fromkeys(tuple(sorted(_whole(level, whats))) for level in levels))


def _whats(rules: Iterable[Rule]) -> dict[str, set[str]]:
    """What is moved of the parameters of each name."""
    found: dict[str, set[str]] = {}
    for rule in rules:
        found.setdefault(rule.module, set()).add(rule.op)
    return found


def _whole(level: Sequence[Rule], whats: Mapping[str, set[str]]) -> Iterator[Rule]:
    """Without slices of what does not move with all that belongs to it."""
    own = _whats(level)
    for rule in level:
        yield rule if own[rule.module] == whats[rule.module] else replace(rule, degree=0)


def _share_of(
    largest_first: Sequence[Rule], share: float, nbytes: Mapping[Rule, int]
) -> list[Rule]:
    enough, so_far, chosen = share * sum(nbytes[rule] for rule in largest_first), 0, []
    for rule in largest_first:
        if so_far < enough:
            chosen.append(rule)
            so_far += nbytes[rule]
    return chosen


def moved_bytes(program: Program, rules: Sequence[Rule]) -> dict[Rule, int]:
    """What lies far of the parameters that each rule names."""
    graph, update = program.graph, program.update
    of: dict[str, dict[str, int]] = {_OPTIMIZER: {}, _GRADIENT: {}, _WEIGHT: {}}
    for node in graph.inputs():
        if node.name.startswith(WEIGHT):
            nbytes = node.outputs[0].nbytes
            of[_WEIGHT][parameter_of(node.name)] = of[_GRADIENT][parameter_of(node.name)] = nbytes
    if update is not None:
        for parameter, names in states(update.graph).items():
            kept = (update.graph.by_name[name].outputs[0].nbytes for name in names)
            of[_OPTIMIZER][parameter] = sum(kept)
    return {
        rule: sum(n for p, n in of[rule.op].items() if path_matches(p, rule.module))
        for rule in rules
    }
