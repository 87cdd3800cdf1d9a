"""A decision in words that survive retracing: the trade, the module, the operator, the call.

Plan files store rules and trades apply them. Not for finding decisions: see search/.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from steelyard.errors import Mismatch
from steelyard.ir.graph import BlockRun, Graph, Node, path_matches

# Trades that need offload memory.
OFFLOAD_TRADES = frozenset({"offload", "offload_state"})
# Prefetch only while resident memory does not exceed the peak without prefetching.
WITHIN_PEAK = "peak"
# Exchange only the looked-up rows of an embedding's gradient.
ROWS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rule:
    """One decision of a plan. ``count`` nodes must match, else the plan is for another model.

    ``op`` may end in ``#k``: result k of a multi-output operator. ``degree`` is the trade's own
    number, if any (micro-batches, slices). ``lag`` and ``lead`` count the operators that run
    during a transfer: after a value is sent, and before it is needed again. If a trade applies to
    parameters instead of calls, ``op`` selects the tensors of the parameter; if it applies to
    collectives, ``op`` is the limit on ``lead``. For gradient codecs ``lead`` is the number of
    warm-up steps without compression. ``times`` is the maximum number of recomputations of a
    value, or the number of gathers of a weight. ``bucket_bytes`` is the size of one joint
    collective. ``dim`` and ``groups`` say along which dim a tensor is sharded, ``shares`` the
    unequal parts of the batch.
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
    """The module, operator and call number that make a forward value; stable across traces."""

    module: str
    op: str
    nth: int


def spots(graph: Graph) -> dict[CallSite, str]:
    """Return the node name of each forward value that is computed (not viewed), by call site."""
    found: dict[CallSite, str] = {}
    for node in graph.forward():
        site = spot_of(graph, node)
        if site is not None:
            found[site] = node.name
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
    """Return the fewest sorted rules that name exactly these values.

    ``*`` replaces only the indices of a verified run of equal blocks, and only if every block of
    the run is included.
    """
    chosen = {s for s in (spot_of(graph, graph.by_name[v]) for v in values) if s is not None}
    rules: list[Rule] = []
    for run in sorted(graph.runs, key=lambda r: -len(r.prefix)):
        by_pattern: dict[CallSite, set[CallSite]] = {}
        for site in chosen:
            module = starred(site.module, run)
            if module is not None:
                by_pattern.setdefault(CallSite(module, site.op, site.nth), set()).add(site)
        for pattern, members in by_pattern.items():
            if len(members) == run.count == _count_matches(graph, pattern):
                chosen -= members
                rules.append(_rule(trade, pattern, len(members)))
    rules += [_rule(trade, site, 1) for site in chosen]
    return tuple(
        sorted(replace(rule, lag=lag, lead=lead, times=times, degree=degree) for rule in rules)
    )


def matching(graph: Graph, rules: Sequence[Rule]) -> frozenset[str]:
    """Return the values that the rules name; raise Mismatch if a rule's ``count`` differs."""
    return frozenset(rule_of(graph, rules))


def rule_of(graph: Graph, rules: Sequence[Rule]) -> dict[str, Rule]:
    """Return each value that the rules name, with the last rule that names it."""
    by_call: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for site, name in spots(graph).items():
        by_call.setdefault((site.op, site.nth), []).append((site.module, name))
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
                f"matches {_count_text(len(found))} of this model",
                expected=f"{_count_text(rule.count)}, as in the plan",
                remedy="plan again for this model, or edit module, op, nth or count of that rule",
            )
        named.update(dict.fromkeys(found, rule))
    return named


def _count_matches(graph: Graph, pattern: CallSite) -> int:
    """Count the calls that the pattern names; another run in the same list may match too."""
    return sum(
        (node.op, node.nth) == (pattern.op.partition("#")[0], pattern.nth)
        and path_matches(node.path, pattern.module)
        for node in graph.forward()
        if not node.is_free
    )


def _rule(trade: str, site: CallSite, count: int) -> Rule:
    return Rule(trade=trade, module=site.module, op=site.op, nth=site.nth, count=count)


def starred(module: str, run: BlockRun) -> str | None:
    """Return ``blocks.3.mlp`` as ``blocks.*.mlp``; None for a module outside the run."""
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
    """Return the name with the index of an equal block replaced by ``*``."""
    patterns = (starred(name, run) for run in sorted(runs, key=lambda r: -len(r.prefix)))
    return next((p for p in patterns if p is not None), name)


def _count_text(count: int) -> str:
    return f"{count} operator{'s' if count != 1 else ''}"
