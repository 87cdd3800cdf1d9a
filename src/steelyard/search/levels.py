"""How much of what could be cut, sliced or moved is looked at: few levels of each.

Each level is a step of its own to explore. Not for choosing among them: see search.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard.core.graph import Graph, path_matches
from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.updates import states

# Each number of micro-batches is another capture, which takes seconds. What fits in few parts is
# fastest in the fewest: those are all looked at, and of the others some.
_COARSEST, _FINER = 5, 3
# Of the bytes that an optimizer keeps, those moved.
_SHARES = (0.25, 0.5, 0.75, 1.0)


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


def moved_states(update: Program | None, rules: Sequence[Rule]) -> tuple[tuple[Rule, ...], ...]:
    """Nothing moved; some of it, the largest first; all; all, with only one parameter's near."""
    if update is None or not rules:
        return ((),)
    nbytes = state_bytes(update.graph, rules)
    largest_first = sorted(rules, key=lambda rule: (-nbytes[rule], rule))
    levels: list[tuple[Rule, ...]] = [()]
    for share in _SHARES:
        enough, so_far, chosen = share * sum(nbytes.values()), 0, []
        for rule in largest_first:
            if so_far < enough:
                chosen.append(rule)
                so_far += nbytes[rule]
        levels.append(tuple(sorted(chosen)))
    levels.append(tuple(sorted(replace(rule, lead=0) for rule in rules)))
    return tuple(dict.fromkeys(levels))


def state_bytes(update: Graph, rules: Sequence[Rule]) -> dict[Rule, int]:
    """What the optimizer keeps for the parameters that each rule names."""
    kept = {
        parameter: sum(update.by_name[name].outputs[0].nbytes for name in names)
        for parameter, names in states(update).items()
    }
    return {
        rule: sum(n for parameter, n in kept.items() if path_matches(parameter, rule.module))
        for rule in rules
    }
