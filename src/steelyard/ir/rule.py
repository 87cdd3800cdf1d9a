"""A decision in words that survive retracing: which trade, on which module, operator, call.

What a plan file holds and what a trade is told. Not for finding decisions: see search/.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from steelyard.errors import Mismatch
from steelyard.ir.graph import BlockRun, Graph, Node, path_matches

# Trades that need offload memory.
OFFLOAD_TRADES = frozenset({"offload", "offload_state"})
# Sent ahead only where what is there then is no more than at the peak without.
WITHIN_PEAK = "peak"
# Of a gradient, those rows of a table that were looked up.
ROWS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rule:
    """``count`` nodes must match, else the plan is for another model.

    ``op`` may end in ``#k``: result k of an operator that has several. ``degree`` is the trade's
    own number where it has one (how many micro-batches, how many slices). ``lag`` and ``lead`` say
    how many operators run while a transfer is under way: after a value is sent, before it is
    wanted back.
    Where a trade is on parameters and not on calls, ``op`` says what of them; where it is on
    exchanges, what bounds ``lead``; and of codes, ``lead`` is how many steps go without them first.
    ``times`` is how often at most a value is made again, or how often a weight is gathered.
    ``bucket_bytes`` is how much goes in one exchange, of what is sent together. ``dim`` and
    ``groups`` say along what a tensor is cut, ``shares`` how unequally the batch is.
    """

    trade: str
    module: str = ""
    op: str = ""
    nth: int = 0
    count: int = 1
    degree: int = 0
    lag: int = 0
    lead: int = 0
    times: int = 1
    bucket_bytes: int = 0
    dim: int = 0
    groups: int = 1
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where in a model a forward value is made; the same in every trace of it."""

    module: str
    op: str
    nth: int


def spots(graph: Graph) -> dict[CallSite, str]:
    """Each forward value that is made (not viewed) by its spot; values are node names."""
    found: dict[CallSite, str] = {}
    for node in graph.forward():
        spot = spot_of(graph, node)
        if spot is not None:
            found[spot] = node.name
    return found


def spot_of(graph: Graph, node: Node) -> CallSite | None:
    if node.is_getitem:
        source = graph.by_name[node.inputs[0]]
        return (
            None
            if source.is_free
            else CallSite(source.path, f"{source.op}#{node.args[1]}", source.nth)
        )
    if node.is_free or len(node.outputs) != 1:
        return None
    return CallSite(node.path, node.op, node.nth)


def to_rules(
    graph: Graph,
    values: Iterable[str],
    *,
    trade: str,
    lag: int = 0,
    lead: int = 0,
    times: int = 1,
    degree: int = 0,
) -> tuple[Rule, ...]:
    """The fewest sorted rules that name exactly these values.

    ``*`` stands only for the indices of a verified run of equal blocks, and only where every
    block of the run takes part.
    """
    chosen = {s for s in (spot_of(graph, graph.by_name[v]) for v in values) if s is not None}
    rules: list[Rule] = []
    for run in sorted(graph.runs, key=lambda r: -len(r.prefix)):
        by_pattern: dict[CallSite, set[CallSite]] = {}
        for spot in chosen:
            module = starred(spot.module, run)
            if module is not None:
                by_pattern.setdefault(CallSite(module, spot.op, spot.nth), set()).add(spot)
        for pattern, members in by_pattern.items():
            if len(members) == run.count == _matched(graph, pattern):
                chosen -= members
                rules.append(_rule(trade, pattern, len(members)))
    rules += [_rule(trade, spot, 1) for spot in chosen]
    return tuple(
        sorted(replace(rule, lag=lag, lead=lead, times=times, degree=degree) for rule in rules)
    )


def matching(graph: Graph, rules: Sequence[Rule]) -> frozenset[str]:
    """The values that the rules name; a rule that names more or fewer than it says is an error."""
    return frozenset(rule_of(graph, rules))


def rule_of(graph: Graph, rules: Sequence[Rule]) -> dict[str, Rule]:
    """Each value that the rules name, and the (last) rule that does."""
    by_call: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for spot, name in spots(graph).items():
        by_call.setdefault((spot.op, spot.nth), []).append((spot.module, name))
    named: dict[str, Rule] = {}
    for rule in rules:
        found = [
            name
            for module, name in by_call.get((rule.op, rule.nth), [])
            if path_matches(module, rule.module)
        ]
        if len(found) != rule.count:
            raise Mismatch(
                f"{rule.trade} rule for {rule.op} (call {rule.nth}) in {rule.module or 'the loss'} "
                f"matches {_operators(len(found))} of this model",
                expected=f"{_operators(rule.count)}, as the plan says",
                remedy="plan again for this model, or edit module, op, nth or count of that rule",
            )
        named.update(dict.fromkeys(found, rule))
    return named


def _matched(graph: Graph, pattern: CallSite) -> int:
    """How many calls the pattern names; another run of the same list may fit it too."""
    return sum(
        (node.op, node.nth) == (pattern.op.partition("#")[0], pattern.nth)
        and path_matches(node.path, pattern.module)
        for node in graph.forward()
        if not node.is_free
    )


def _rule(trade: str, spot: CallSite, count: int) -> Rule:
    return Rule(trade=trade, module=spot.module, op=spot.op, nth=spot.nth, count=count)


def starred(module: str, run: BlockRun) -> str | None:
    """``blocks.3.mlp`` as ``blocks.*.mlp``; None for a module outside the run."""
    parts = module.split(".")
    prefix = run.prefix.split(".") if run.prefix else []
    if len(parts) <= len(prefix) or not parts[len(prefix)].isdigit():
        return None
    if not path_matches(".".join(parts[: len(prefix)]), run.prefix):
        return None
    index = int(parts[len(prefix)])
    if not run.first <= index < run.first + run.count:
        return None
    return ".".join([*parts[: len(prefix)], "*", *parts[len(prefix) + 1 :]])


def pattern_of(name: str, runs: Iterable[BlockRun]) -> str:
    """Of what equal blocks hold alike the same."""
    patterns = (starred(name, run) for run in sorted(runs, key=lambda r: -len(r.prefix)))
    return next((p for p in patterns if p is not None), name)


def _operators(count: int) -> str:
    return f"{count} operator{'s' if count != 1 else ''}"
