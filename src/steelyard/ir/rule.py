"""Rules: the decisions of a plan, independent of one trace, with one type for each trade.

The fields of a rule are the keys of its trade's table in a plan file. Plan files store rules and
trades apply them. Not for the kinds of rules: see rule_kinds.py. Not for finding decisions: see
search/.
"""

import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from steelyard.errors import Mismatch
from steelyard.ir.graph import BlockRun, Graph, Node, path_matches
from steelyard.safe_files import STRICT
from steelyard.units import parse_bytes

MOST_RULES = 50_000
MOST_RANKS = 1_000_000
LARGEST = 2**62


class _Omitted:
    """Marks a key that is not written if it has its default value."""


OMITTED = _Omitted()

Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]


def with_units(parse: Callable[..., float], what: str) -> BeforeValidator:
    """Return a validator that parses amounts with units; numbers pass unchanged."""
    return BeforeValidator(lambda given: parse(given, what=what) if type(given) is str else given)


class _InBytes:
    """Marks a key that is written with a unit of bytes."""


IN_BYTES = _InBytes()
Bytes = Annotated[int, with_units(parse_bytes, "memory"), Field(ge=1, le=LARGEST), IN_BYTES]


class Stage(StrEnum):
    """The part of the search that decides about a trade.

    ``layout``: how ranks divide the step and exchange gradients; each layout has its own program.
    ``variant``: a change of one rank's graph; each variant is explored separately. ``value``: the
    treatment of one saved activation. ``order``: the timing of collectives and messages.
    """

    LAYOUT = "layout"
    VARIANT = "variant"
    VALUE = "value"
    ORDER = "order"


# The stages of trades that divide the step among ranks or change their communication.
BETWEEN_RANKS = frozenset({Stage.LAYOUT, Stage.ORDER})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One decision of a plan. Its fields are the keys of its table in a plan file.

    ``trade`` is the name of the table. ``most`` is the maximum number of its tables in a file.
    ``paid_in`` says whether the trade costs seconds of ``computation`` or of ``communication``.
    """

    trade: str = field(init=False)
    stage: ClassVar[Stage] = Stage.VARIANT
    most: ClassVar[int] = 1
    needs_offload_memory: ClassVar[bool] = False
    paid_in: ClassVar[str] = "computation"
    # True if the trade saves seconds of communication.
    buys_communication: ClassVar[bool] = False

    def describe(self) -> str:
        """Return the decision in a few words, for plans without explanations of their trades."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self)[1:])
        return ", ".join(f"{name} {value}" for name, value in values)

    @property
    def text(self) -> str:
        """The rule in one line, without the keys that have their default values.

        The text therefore stays the same if a later version adds a key with a default value.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.default is MISSING}
        values |= {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        return f"{self.trade}: {values}"

    @classmethod
    def problems(cls, rules: Sequence[Self]) -> list[str]:  # noqa: ARG003 - none by default
        """Return errors of rules that are valid one by one, but not together."""
        return []

    def __lt__(self, other: "Rule") -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_from_json)


RuleT = TypeVar("RuleT", bound=Rule)


@dataclass(frozen=True, kw_only=True)
class CallRule(Rule):
    """The forward values that one call makes, in each of ``count`` modules.

    ``op`` may end in ``#k``: result k of a multi-output operator. If the number of matching nodes
    is not ``count``, the plan is for another model.
    """

    most: ClassVar[int] = MOST_RULES
    stage: ClassVar[Stage] = Stage.VALUE

    module: str
    op: str
    nth: Whole = 0
    count: Positive = 1

    def describe(self) -> str:
        return f"{self.op} #{self.nth} in {self.module or 'the loss'} ({self.count})"


CallRuleT = TypeVar("CallRuleT", bound=CallRule)


def of_kind(rules: Iterable[Rule], kind: type[RuleT]) -> tuple[RuleT, ...]:
    """Return the rules of one kind, in the same order."""
    return tuple(rule for rule in rules if isinstance(rule, kind))


_TABLES: dict[type[Rule], type[BaseModel]] = {}


def table_of(rule: type[Rule]) -> type[BaseModel]:
    """Return the model of the trade's table in a plan file."""
    if rule in _TABLES:
        return _TABLES[rule]
    hints = typing.get_type_hints(rule, include_extras=True)
    keys: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is MISSING else f.default)
        for f in fields(rule)
        if f.init
    }
    _TABLES[rule] = create_model(rule.__name__, __config__=STRICT, **keys)
    return _TABLES[rule]


def _from_json(given: object) -> Rule:
    """Return the rule that an object of a JSON file describes."""
    if isinstance(given, Rule):
        return given
    values = dict(given) if isinstance(given, dict) else {}
    rule = rule_types().get(str(values.pop("trade", "")))
    if rule is None:
        raise PydanticCustomError("rule", "a rule of a known trade")
    try:
        return rule(**table_of(rule).model_validate(values).model_dump())
    except ValidationError:
        raise PydanticCustomError("rule", "a rule with the keys of its trade") from None


def kind_named(trade: str) -> type[Rule]:
    """Return the rule type of the trade of this name, or Rule if there is no such trade."""
    return rule_types().get(trade, Rule)


def trade_name(kind: type[Rule]) -> str:
    """Return the name of the first trade of this kind; the kind in words if none is imported."""
    names = (name for name, rule in rule_types().items() if issubclass(rule, kind))
    return next(names, re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower())


def rule_types() -> dict[str, type[Rule]]:
    """Return the rule type of each trade that is imported."""
    found, pending = {}, [Rule]
    while pending:
        rule = pending.pop(0)
        pending += rule.__subclasses__()
        if isinstance(name := getattr(rule, "trade", None), str):
            found[name] = rule
    return found


@dataclass(frozen=True, slots=True)
class CallSite:
    """The module, operator and call number that make a forward value; the same in every trace."""

    module: str
    op: str
    nth: int


class _CallIndex:
    """The forward values of one graph that are computed (not viewed), by call site.

    ``paths`` are the modules of the operators themselves, by operator and call number.
    """

    def __init__(self, graph: Graph) -> None:
        self.names: dict[CallSite, str] = {}
        self.by_call: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for node in graph.forward():
            site = spot_of(graph, node)
            if site is not None:
                self.names[site] = node.name
        self.paths: dict[tuple[str, int], list[str]] = {}
        for node in graph.forward():
            if not node.is_free:
                self.paths.setdefault((node.op, node.nth), []).append(node.path)
        for site, name in self.names.items():
            self.by_call.setdefault((site.op, site.nth), []).append((site.module, name))
        self._matching: dict[CallSite, tuple[str, ...]] = {}

    def matching(self, pattern: CallSite) -> tuple[str, ...]:
        """Return the names of the values that a call site names, whose module may have stars."""
        if "*" not in pattern.module:
            return (self.names[pattern],) if pattern in self.names else ()
        if pattern not in self._matching:
            self._matching[pattern] = tuple(
                name
                for module, name in self.by_call.get((pattern.op, pattern.nth), [])
                if path_matches(module, pattern.module)
            )
        return self._matching[pattern]


_CALLS: WeakKeyDictionary[Graph, _CallIndex] = WeakKeyDictionary()


def _calls(graph: Graph) -> _CallIndex:
    """Return the calls of a graph, which is immutable, and keep them as long as the graph."""
    if graph not in _CALLS:
        _CALLS[graph] = _CallIndex(graph)
    return _CALLS[graph]


def spots(graph: Graph) -> Mapping[CallSite, str]:
    """Return the node name of each forward value that is computed (not viewed), by call site."""
    return _calls(graph).names


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
    graph: Graph, values: Iterable[str], rule: type[CallRuleT], **parameters: int
) -> tuple[CallRuleT, ...]:
    """Return the fewest sorted rules of this type that name exactly these values.

    ``*`` replaces only the indices of a verified run of equal blocks, and only if every block of
    the run is included.
    """
    chosen = {s for s in (spot_of(graph, graph.by_name[v]) for v in values) if s is not None}
    rules: list[CallRuleT] = []
    for run in sorted(graph.runs, key=lambda r: -len(r.prefix)):
        by_pattern: dict[CallSite, set[CallSite]] = {}
        for site in chosen:
            module = starred(site.module, run)
            if module is not None:
                by_pattern.setdefault(CallSite(module, site.op, site.nth), set()).add(site)
        for pattern, members in by_pattern.items():
            if len(members) == run.count == _count_matches(graph, pattern):
                chosen -= members
                rules.append(rule_for(rule, pattern, count=len(members), **parameters))
    rules += [rule_for(rule, site, **parameters) for site in chosen]
    return tuple(sorted(rules))


def matching(graph: Graph, rules: Sequence[CallRule]) -> frozenset[str]:
    """Return the values that the rules name; raise Mismatch if a rule's ``count`` differs."""
    return frozenset(rule_of(graph, rules))


def rule_of(graph: Graph, rules: Sequence[CallRuleT]) -> dict[str, CallRuleT]:
    """Return each value that the rules name, with the last rule that names it."""
    calls = _calls(graph)
    named: dict[str, CallRuleT] = {}
    for rule in rules:
        found = calls.matching(CallSite(rule.module, rule.op, rule.nth))
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
    paths = _calls(graph).paths.get((pattern.op.partition("#")[0], pattern.nth), [])
    return sum(path_matches(path, pattern.module) for path in paths)


def rule_for(
    rule: type[CallRuleT], site: CallSite, *, count: int = 1, **parameters: int
) -> CallRuleT:
    """Return a rule of this type for the values of one call."""
    values: dict[str, Any] = {"module": site.module, "op": site.op, "nth": site.nth, **parameters}
    return rule(count=count, **values)


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
