"""The plan file: decisions only, as TOML that a person can read, edit, diff and check.

Written by hand, not by tomli_w: that puts each number of a shape on a line of its own, and picks
inline or headed tables by their length, so that one digit more would reflow the file.
Not for predictions, which stand in generated JSON beside it: see prediction_file.py.
"""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import OFFLOAD_TRADES, Rule
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
from steelyard.units import (
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_share,
    spell_bytes,
    spell_rate,
    spell_seconds,
    spell_share,
)

# 2: tables and trades were renamed (see CHANGELOG.md).
FORMAT = 2
MOST_BYTES = 4 * 2**20
_MOST_RULES = 50_000
# A value that is recomputed: more often than a chain of a thousand blocks could use.
_MOST_TIMES = 16
MOST_RANKS = 1_000_000
# Enough to see what is wrong; a hostile file has a million.
_MOST_FOUND = 100
_LARGEST = 2**62
_Whole = Annotated[int, Field(ge=0, le=_LARGEST)]


def _written(parse: Callable[..., float], what: str) -> BeforeValidator:
    """Texts are amounts as people write them; a number keeps every digit it has."""
    return BeforeValidator(lambda given: parse(given, what=what) if type(given) is str else given)


_Bytes = Annotated[int, _written(parse_bytes, "memory"), Field(ge=1, le=_LARGEST)]
_BytesOrNone = Annotated[int, _written(parse_bytes, "memory"), Field(ge=0, le=_LARGEST)]


_Share = Annotated[int, Field(ge=1, le=_LARGEST)]


def _as_tuple(given: object) -> object:
    """TOML has lists, and what is told apart and remembered has none."""
    return tuple(given) if isinstance(given, list) else given


class _QuantizeActivations(BaseModel):
    """The keys of one ``[[quantize_activations]]`` table are fields of Rule."""

    model_config = STRICT
    most: ClassVar[int] = _MOST_RULES

    module: str
    op: str
    nth: _Whole = 0
    count: Annotated[int, Field(ge=1, le=_LARGEST)] = 1


class _Recompute(_QuantizeActivations):
    times: Annotated[int, Field(ge=1, le=_MOST_TIMES)] = 1


class _Accumulate(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 1

    degree: Annotated[int, Field(ge=1, le=_LARGEST, alias="micro_batches")]


class _ShardTensor(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 100_000

    degree: Annotated[int, Field(ge=2, le=MOST_RANKS, alias="ranks")]
    module: Annotated[str, Field(alias="parameter")]
    dim: Annotated[int, Field(ge=0, le=63)]
    groups: Annotated[int, Field(ge=1, le=_LARGEST)] = 1
    count: Annotated[int, Field(ge=1, le=_LARGEST)] = 1


class _ShardStates(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 100_000

    degree: Annotated[int, Field(ge=2, le=MOST_RANKS, alias="ranks")]
    module: Annotated[str, Field(alias="parameter")]
    # Where it is not said, all of them: the weight itself, its gradient, its optimizer state.
    op: Annotated[Literal["optimizer", "gradient", ""], Field(alias="what")] = ""
    times: Annotated[int, Field(ge=1, le=2, alias="gathers")] = 1
    # Each by itself, where it is not said.
    bucket_bytes: Annotated[_BytesOrNone, Field(alias="bucket")] = 0
    count: Annotated[int, Field(ge=1, le=_LARGEST)] = 1


class _ShardBatch(BaseModel):
    """``shares``: of as many samples as they add up to, how many each rank takes."""

    model_config = STRICT
    most: ClassVar[int] = 1

    degree: Annotated[int, Field(ge=2, le=MOST_RANKS, alias="ranks")]
    shares: Annotated[
        tuple[_Share, ...], BeforeValidator(_as_tuple), Field(max_length=MOST_RANKS)
    ] = ()
    bucket_bytes: Annotated[_Bytes, Field(alias="bucket")]


class _CodedGradients(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 100_000

    module: Annotated[str, Field(alias="parameter")]
    count: Annotated[int, Field(ge=1, le=_LARGEST)] = 1
    lead: Annotated[_Whole, Field(alias="warm_up")] = 0


class _QuantizedGradients(_CodedGradients):
    op: Annotated[Literal["bfloat16", "int8"], Field(alias="format")]


class _LowRankGradients(_CodedGradients):
    degree: Annotated[int, Field(ge=1, le=1024, alias="rank")]


class _SparseGradients(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 100_000

    module: Annotated[str, Field(alias="parameter")]
    count: Annotated[int, Field(ge=1, le=_LARGEST)] = 1
    op: Annotated[Literal["rows"], Field(alias="format")] = "rows"


class _ShardPipeline(BaseModel):
    """A stage ends behind each of these modules."""

    model_config = STRICT
    most: ClassVar[int] = 10_000

    degree: Annotated[int, Field(ge=2, le=MOST_RANKS, alias="ranks")]
    op: Annotated[str, Field(alias="schedule")]
    module: Annotated[str, Field(alias="behind")]


class _SharedMemoryTransfer(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 1

    op: Annotated[Literal["stages", "exchanges"], Field(alias="messages")] = "stages"


class _Overlap(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 1

    lag: Annotated[int, Field(ge=1, le=_LARGEST, alias="window")]
    lead: Annotated[_Whole, Field(alias="ahead")] = 0
    op: Annotated[Literal["", "peak"], Field(alias="within")] = ""


class _Chunk(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 100

    module: str
    op: str
    nth: _Whole = 0
    degree: Annotated[int, Field(ge=2, le=_LARGEST, alias="slices")]


class _Offload(_QuantizeActivations):
    degree: Annotated[int, Field(ge=0, le=_LARGEST, alias="slices")] = 0
    lag: _Whole = 0
    lead: _Whole = 0


class _OffloadState(BaseModel):
    model_config = STRICT
    most: ClassVar[int] = 100_000

    module: Annotated[str, Field(alias="parameter")]
    op: Annotated[Literal["optimizer", "gradient", "weight"], Field(alias="what")] = "optimizer"
    count: Annotated[int, Field(ge=1, le=_LARGEST)] = 1
    degree: Annotated[int, Field(ge=0, le=_LARGEST, alias="slices")] = 0
    lead: _Whole = 0


# Each trade that a plan file can hold, with the keys of its tables; in the order they are written.
_Table = (
    _QuantizeActivations | _Accumulate | _Chunk | _ShardTensor | _ShardStates | _ShardBatch
    | _Overlap | _OffloadState | _ShardPipeline | _SharedMemoryTransfer | _CodedGradients
    | _SparseGradients
)  # fmt: skip
_TABLES: dict[str, type[_Table]] = {
    "accumulate": _Accumulate,
    "shard_tensor": _ShardTensor,
    "shard_states": _ShardStates,
    "chunk": _Chunk,
    "shard_batch": _ShardBatch,
    "sparse_gradients": _SparseGradients,
    "quantized_gradients": _QuantizedGradients,
    "ternary_gradients": _CodedGradients,
    "low_rank_gradients": _LowRankGradients,
    "top_k_gradients": _CodedGradients,
    "shard_pipeline": _ShardPipeline,
    "shared_memory_transfer": _SharedMemoryTransfer,
    "overlap": _Overlap,
    "recompute": _Recompute,
    "quantize_activations": _QuantizeActivations,
    "offload": _Offload,
    "offload_state": _OffloadState,
}
# The names of all trades.
TRADES = tuple(_TABLES)


def read_decisions(path: Path) -> Decisions:
    return decode_decisions(read_bytes(path, most_bytes=MOST_BYTES), source=str(path))


def write_decisions(path: Path, decisions: Decisions, *, script: str = "") -> str:
    """The digest of the text, which tells whether anybody changed it since."""
    # With the script as it was typed, the plan is named from the same folder.
    name = str(path) if script else path.name
    text = encode_decisions(decisions, name=name, script=script).encode()
    write_whole(path, text)
    return sha256(text).hexdigest()


def digest_of_text(path: Path) -> str:
    return sha256(read_bytes(path, most_bytes=MOST_BYTES)).hexdigest()


def digest_of(decisions: Decisions) -> str:
    """Names the decisions; what is said about them elsewhere carries it."""
    return sha256("\n".join(_lines(decisions)).encode()).hexdigest()


def encode_decisions(
    decisions: Decisions, *, name: str = "train.plan.toml", script: str = ""
) -> str:
    script = script or name.removesuffix(".toml").removesuffix(".plan") + ".py"
    check = shlex.join(("steelyard", "plan", script, "--check", name))
    header = (
        "# The decisions of one Steelyard plan; what they are predicted to cost stands in the JSON",
        "# file beside this one. Edit them, then check the edit:",
        f"#   {printable(check, most=1000)}",
    )
    text = "\n".join([*header, *_lines(decisions)]) + "\n"
    # What cannot be read back must never be written; a model's names may be odd.
    sorted_decisions = replace(decisions, rules=tuple(sorted(decisions.rules)))
    if decode_decisions(text, source=name) != sorted_decisions:
        raise AssertionError(f"{name} does not read back as it was written")
    return text


def decode_decisions(raw: bytes | str, *, source: str = "the plan file") -> Decisions:
    tables = toml_tables(raw, source=source, most_bytes=MOST_BYTES)
    _check_format(tables, source)
    rules, problems = _rules(tables)
    known = {key: value for key, value in tables.items() if key not in _TABLES}
    try:
        head = _Head.model_validate(known)
    except ValidationError as error:
        raise refusal(source, [*problems_of(error, _Head, also=_TABLES), *problems]) from None
    if problems:
        raise refusal(source, problems)
    target = head.target.value()
    if target.ranks % target.hosts:
        said = f"{target.ranks} ranks on {target.hosts} hosts"
        raise refusal(source, [f"is made for {said}, which are not as many on each"])
    if problem := _ill_used(head.used_ranks, target, ParallelLayout.of(rules).num_ranks):
        raise refusal(source, [problem])
    moving = next((rule.trade for rule in rules if rule.trade in OFFLOAD_TRADES), "")
    if head.offload_memory is None and moving:
        raise refusal(
            source, [f"moves values to offload memory ([[{moving}]]) and has no [offload_memory]"]
        )
    return Decisions(
        target=target,
        budget=head.budget.value(),
        rules=rules,
        offload_memory=None if head.offload_memory is None else head.offload_memory.value(),
        used_ranks=tuple(head.used_ranks),
    )


def _ill_used(used: list[int], target: Target, num_ranks: int) -> str:
    """Empty where these are as many of the ranks as the rules lie on, of whole hosts."""
    if not used:
        return ""
    if used != sorted(set(used)) or used[-1] >= target.ranks:
        return f"used_ranks are not numbers below {target.ranks} (target.ranks), ascending"
    if len(used) != num_ranks:
        return f"used_ranks has {len(used)} ranks, and the shard rules lie on {num_ranks}"
    each = target.ranks_of_a_host
    whole = {rank // each * each + n for rank in used for n in range(each)}
    if target.hosts > 1 and num_ranks > 1 and whole != {*used}:
        return f"used_ranks has some ranks of a host and not all {each}"
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
            ["was written by a later steelyard"],
            remedy="update steelyard, or plan again: steelyard plan train.py",
        )


def _rules(tables: dict[str, Any]) -> tuple[tuple[Rule, ...], list[str]]:
    rules: list[Rule] = []
    problems: list[str] = []
    for trade, table in _TABLES.items():
        given = tables.get(trade, [])
        if not isinstance(given, list):
            problems.append(f"{trade} is written [[{trade}]], with two brackets")
            continue
        if len(given) > table.most:
            problems.append(f"{trade} has {len(given)} tables, and at most {table.most} may stand")
            continue
        for index, entry in enumerate(given):
            if len(problems) >= _MOST_FOUND:
                break
            try:
                values = table.model_validate(entry).model_dump()
            except ValidationError as error:
                problems += problems_of(error, table, within=(trade, index))
                continue
            rules.append(Rule(trade=trade, **values))
        problems += _ill_shared(rules) if trade == "shard_batch" else []
    rules.sort()
    for rule, next_rule in pairwise(rules):
        if rule == next_rule:
            problems.append(f"{rule.trade}: {printable(rule.module)} {printable(rule.op)} is twice")
    return tuple(rules), problems[:_MOST_FOUND]


def _ill_shared(rules: list[Rule]) -> list[str]:
    return [
        f"shard_batch is among {rule.degree} ranks and has {len(rule.shares)} shares"
        for rule in rules
        if rule.trade == "shard_batch" and rule.shares and len(rule.shares) != rule.degree
    ]


class _BatchEntry(BaseModel):
    model_config = STRICT

    name: str
    shape: Annotated[list[_Whole], Field(max_length=64)]
    dtype: str

    def value(self) -> BatchEntry:
        return BatchEntry(name=self.name, shape=tuple(self.shape), dtype=self.dtype)


_Speed = Annotated[float, Field(gt=0, le=1)]


class _MadeFor(BaseModel):
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


_Positive = Field(gt=0, le=_LARGEST)


class _Budget(BaseModel):
    model_config = STRICT

    memory: _Bytes | None = None
    step_time: Annotated[float, _written(parse_seconds, "step_time"), _Positive] | None = None
    communication: Annotated[float, _written(parse_seconds, "communication"), _Positive] | None = (
        None
    )
    computation: Annotated[float, _written(parse_seconds, "computation"), _Positive] | None = None
    accuracy_loss: Annotated[
        float, _written(parse_share, "accuracy_loss"), Field(ge=0, le=_LARGEST)
    ] = 0.0

    def value(self) -> Budget:
        return Budget(
            memory_bytes=self.memory,
            step_seconds=self.step_time,
            communication_seconds=self.communication,
            computation_seconds=self.computation,
            accuracy_loss=self.accuracy_loss,
        )


class _Far(BaseModel):
    model_config = STRICT

    folder: str
    rate: Annotated[float, _written(parse_rate, "rate"), _Positive]
    size: _Bytes

    def value(self) -> OffloadMemory:
        return OffloadMemory(self.folder, rate=self.rate, size=self.size)


class _Head(BaseModel):
    """All of the file but the trades."""

    model_config = STRICT

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    target: _MadeFor
    budget: _Budget
    offload_memory: _Far | None = None
    used_ranks: Annotated[list[_Whole], Field(max_length=MOST_RANKS)] = []


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
        for field, info in _TABLES[rule.trade].model_fields.items():
            if getattr(rule, field) == _UNSAID.get((rule.trade, field)):
                continue  # as nearly always, and in files from before there was more
            value = getattr(rule, field)
            written = spell_bytes(value) if field == "bucket_bytes" else value
            yield f"{info.alias or field} = {_toml(written)}"


_UNSAID = {
    ("recompute", "times"): 1,
    ("offload", "degree"): 0,
    ("shard_tensor", "groups"): 1,
    ("shard_states", "op"): "",
    ("shard_states", "times"): 1,
    ("shard_states", "bucket_bytes"): 0,
    ("overlap", "lead"): 0,
    ("overlap", "op"): "",
    ("shard_batch", "shares"): (),
    ("quantized_gradients", "lead"): 0,
    ("ternary_gradients", "lead"): 0,
    ("low_rank_gradients", "lead"): 0,
    ("top_k_gradients", "lead"): 0,
}


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
