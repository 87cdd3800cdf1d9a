"""The plan file: decisions only, as TOML that a person can read, edit, diff and check.

Each trade declares its table (trades/). Twenty lines here write the file, instead of tomli_w: that
puts each number of a shape on a line of its own, and chooses between inline and headed tables by
their length, so that one more digit would reflow the file. Not for predictions: see
prediction_file.py.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import (
    IN_BYTES,
    LARGEST,
    MOST_RANKS,
    OMITTED,
    Bytes,
    Rule,
    Whole,
    table_of,
    with_units,
)
from steelyard.plans.budget import Budget
from steelyard.plans.plan import BatchEntry, Decisions, Target
from steelyard.safe_files import (
    STRICT,
    problems_of,
    read_bytes,
    refusal,
    toml_tables,
    write_whole,
)
from steelyard.safe_text import printable
from steelyard.trades import BY_NAME
from steelyard.units import (
    parse_rate,
    parse_seconds,
    parse_share,
    spell_bytes,
    spell_rate,
    spell_seconds,
    spell_share,
)

# Format 2 renamed tables and trades (see CHANGELOG.md).
FORMAT = 2
MOST_BYTES = 4 * 2**20
# Enough errors to see the mistake; a hostile file may have a million.
_MOST_PROBLEMS = 100
_RULES = {name: trade.rule for name, trade in BY_NAME.items()}


def read_decisions(path: Path) -> Decisions:
    return decode_decisions(read_bytes(path, most_bytes=MOST_BYTES), source=str(path))


def write_decisions(path: Path, decisions: Decisions, *, script: str = "") -> str:
    """Write the plan file; return the digest of its text, which reveals later edits."""
    # If the script is stored as it was typed, the plan's path is relative to the same folder.
    name = str(path) if script else path.name
    text = encode_decisions(decisions, name=name, script=script).encode()
    write_whole(path, text)
    return sha256(text).hexdigest()


def digest_of_text(path: Path) -> str:
    return sha256(read_bytes(path, most_bytes=MOST_BYTES)).hexdigest()


def digest_of(decisions: Decisions) -> str:
    """Return a digest of the decisions; files that refer to these decisions contain it."""
    return sha256("\n".join(_lines(decisions)).encode()).hexdigest()


def encode_decisions(
    decisions: Decisions, *, name: str = "train.plan.toml", script: str = ""
) -> str:
    script = script or name.removesuffix(".toml").removesuffix(".plan") + ".py"
    check = shlex.join(("steelyard", "plan", script, "--check", name))
    header = (
        "# The decisions of one Steelyard plan; their predicted costs are in the JSON",
        "# file next to this one. Edit them, then check the edit:",
        f"#   {printable(check, most=1000)}",
    )
    text = "\n".join([*header, *_lines(decisions)]) + "\n"
    # A file that cannot be read back must never be written, and a model may have unusual names.
    sorted_decisions = replace(decisions, rules=tuple(sorted(decisions.rules)))
    if decode_decisions(text, source=name) != sorted_decisions:
        raise AssertionError(f"{name} does not read back unchanged")
    return text


def decode_decisions(raw: bytes | str, *, source: str = "the plan file") -> Decisions:
    tables = toml_tables(raw, source=source, most_bytes=MOST_BYTES)
    _check_format(tables, source)
    rules, problems = _rules(tables)
    known = {key: value for key, value in tables.items() if key not in _RULES}
    try:
        head = _Head.model_validate(known)
    except ValidationError as error:
        raise refusal(source, [*problems_of(error, _Head, also=_RULES), *problems]) from None
    if problems:
        raise refusal(source, problems)
    target = head.target.value()
    if target.ranks % target.hosts:
        text = f"{target.ranks} ranks on {target.hosts} hosts"
        raise refusal(source, [f"is for {text}, which do not divide equally"])
    if problem := _used_ranks_problem(head.used_ranks, target, ParallelLayout.of(rules).num_ranks):
        raise refusal(source, [problem])
    offload_trade = next((rule.trade for rule in rules if rule.needs_offload_memory), "")
    if head.offload_memory is None and offload_trade:
        raise refusal(
            source,
            [f"offloads values ([[{offload_trade}]]) but has no [offload_memory]"],
        )
    return Decisions(
        target=target,
        budget=head.budget.value(),
        rules=rules,
        offload_memory=None if head.offload_memory is None else head.offload_memory.value(),
        used_ranks=tuple(head.used_ranks),
    )


def _used_ranks_problem(used: list[int], target: Target, num_ranks: int) -> str:
    """Return the error in ``used_ranks``; empty if it is valid.

    There must be as many as the rules need, and they must cover whole hosts.
    """
    if not used:
        return ""
    if used != sorted(set(used)) or used[-1] >= target.ranks:
        return f"used_ranks must be ascending numbers below {target.ranks} (target.ranks)"
    if len(used) != num_ranks:
        return f"used_ranks has {len(used)} ranks, but the shard rules need {num_ranks}"
    each = target.ranks_of_a_host
    whole = {rank // each * each + n for rank in used for n in range(each)}
    if target.hosts > 1 and num_ranks > 1 and whole != {*used}:
        return f"used_ranks has some but not all {each} ranks of a host"
    return ""


def _check_format(tables: dict[str, Any], source: str) -> None:
    found = tables.get("format")
    if type(found) is int and 0 < found < FORMAT:
        raise refusal(
            source,
            [f"was written in format {found}, whose tables and trades have other names"],
            remedy="plan again (steelyard plan train.py); CHANGELOG.md lists the new names",
        )
    if type(found) is int and found > FORMAT:
        raise refusal(
            source,
            ["was written by a later version of Steelyard"],
            remedy="update Steelyard, or plan again: steelyard plan train.py",
        )


def _rules(tables: dict[str, Any]) -> tuple[tuple[Rule, ...], list[str]]:
    rules: list[Rule] = []
    problems: list[str] = []
    for trade, kind in _RULES.items():
        table, of_trade = table_of(kind), list[Rule]()
        given = tables.get(trade, [])
        if not isinstance(given, list):
            problems.append(f"{trade} must be written as [[{trade}]], with two brackets")
            continue
        if len(given) > kind.most:
            problems.append(f"{trade} has {len(given)} tables; at most {kind.most} are allowed")
            continue
        for index, entry in enumerate(given):
            if len(problems) >= _MOST_PROBLEMS:
                break
            try:
                values = table.model_validate(entry).model_dump()
            except ValidationError as error:
                problems += problems_of(error, table, within=(trade, index))
                continue
            of_trade.append(kind(**values))
        problems += kind.problems(of_trade)
        rules += of_trade
    rules.sort()
    for rule, next_rule in pairwise(rules):
        if rule == next_rule:
            problems.append(f"{rule.trade}: the rule {printable(rule.describe())} is duplicated")
    return tuple(rules), problems[:_MOST_PROBLEMS]


class _BatchEntry(BaseModel):
    model_config = STRICT

    name: str
    shape: Annotated[list[Whole], Field(max_length=64)]
    dtype: str

    def value(self) -> BatchEntry:
        return BatchEntry(name=self.name, shape=tuple(self.shape), dtype=self.dtype)


_Speed = Annotated[float, Field(gt=0, le=1)]


class _Target(BaseModel):
    model_config = STRICT

    model: str
    graph: str
    decomposition: str
    runner: str
    cluster: str
    torch: str
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    hosts: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    speeds: Annotated[list[_Speed], Field(max_length=MOST_RANKS)] = []
    declared: Annotated[str, Field(max_length=200)] = ""
    batch: Annotated[list[_BatchEntry], Field(max_length=1024)] = []

    def value(self) -> Target:
        return Target(
            model=self.model,
            graph=self.graph,
            decomposition=self.decomposition,
            runner=self.runner,
            cluster=self.cluster,
            torch=self.torch,
            ranks=self.ranks,
            hosts=self.hosts,
            speeds=tuple(map(float, self.speeds)),
            declared=self.declared,
            batch=tuple(entry.value() for entry in self.batch),
        )


_POSITIVE = Field(gt=0, le=LARGEST)


class _Budget(BaseModel):
    model_config = STRICT

    memory: Bytes | None = None
    step_time: Annotated[float, with_units(parse_seconds, "step_time"), _POSITIVE] | None = None
    communication: (
        Annotated[float, with_units(parse_seconds, "communication"), _POSITIVE] | None
    ) = None
    computation: Annotated[float, with_units(parse_seconds, "computation"), _POSITIVE] | None = None
    accuracy_loss: Annotated[
        float, with_units(parse_share, "accuracy_loss"), Field(ge=0, le=LARGEST)
    ] = 0.0

    def value(self) -> Budget:
        return Budget(
            memory_bytes=self.memory,
            step_seconds=self.step_time,
            communication_seconds=self.communication,
            computation_seconds=self.computation,
            accuracy_loss=self.accuracy_loss,
        )


class _OffloadMemory(BaseModel):
    model_config = STRICT

    folder: str
    rate: Annotated[float, with_units(parse_rate, "rate"), _POSITIVE]
    size: Bytes

    def value(self) -> OffloadMemory:
        return OffloadMemory(self.folder, rate=self.rate, size=self.size)


class _Head(BaseModel):
    """The whole file, except the rules of trades."""

    model_config = STRICT

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    target: _Target
    budget: _Budget
    offload_memory: _OffloadMemory | None = None
    used_ranks: Annotated[list[Whole], Field(max_length=MOST_RANKS)] = []


def _lines(decisions: Decisions) -> Iterator[str]:
    target, budget = decisions.target, decisions.budget
    yield f"format = {FORMAT}"
    if decisions.used_ranks:
        yield f"used_ranks = {_toml(decisions.used_ranks)}"
    yield "\n[target]"
    for key in ("model", "graph", "decomposition", "runner", "cluster", "torch"):
        yield f"{key} = {_toml(getattr(target, key))}"
    if target.ranks > 1:
        yield f"ranks = {target.ranks}"
    if target.hosts > 1:
        yield f"hosts = {target.hosts}"
    if target.speeds:
        yield f"speeds = {_toml(target.speeds)}"
    if target.declared:
        yield f"declared = {_toml(target.declared)}"
    for entry in target.batch:
        yield "\n[[target.batch]]"
        yield f"name = {_toml(entry.name)}"
        yield f"shape = [{', '.join(map(str, entry.shape))}]"
        yield f"dtype = {_toml(entry.dtype)}"
    yield "\n[budget]"
    if budget.memory_bytes is not None:
        yield f"memory = {_toml(spell_bytes(budget.memory_bytes))}"
    for key, seconds in (
        ("step_time", budget.step_seconds),
        ("communication", budget.communication_seconds),
        ("computation", budget.computation_seconds),
    ):
        if seconds is not None:
            yield f"{key} = {_toml(spell_seconds(seconds))}"
    yield f"accuracy_loss = {_toml(spell_share(budget.accuracy_loss))}"
    if (offload_memory := decisions.offload_memory) is not None:
        yield "\n[offload_memory]"
        yield f"folder = {_toml(offload_memory.folder)}"
        yield f"rate = {_toml(spell_rate(offload_memory.bytes_per_second))}"
        yield f"size = {_toml(spell_bytes(offload_memory.size_bytes))}"
    for rule in sorted(decisions.rules):
        yield f"\n[[{rule.trade}]]"
        for key, info in table_of(type(rule)).model_fields.items():
            value = getattr(rule, key)
            if OMITTED in info.metadata and value == info.default:
                continue
            yield f"{key} = {_toml(spell_bytes(value) if IN_BYTES in info.metadata else value)}"


def _toml(value: str | int | float | tuple[int | float, ...]) -> str:
    if not isinstance(value, str):
        return repr(list(value) if isinstance(value, tuple) else value)
    return (
        f'"{"".join(c if c.isprintable() and c not in _SPECIAL else _escaped(c) for c in value)}"'
    )


_SPECIAL = {'"', "\\"}


def _escaped(character: str) -> str:
    if character in _SPECIAL:
        return f"\\{character}"
    code = ord(character)
    return f"\\u{code:04X}" if code < 2**16 else f"\\U{code:08X}"
