"""Safe reading and writing of untrusted files: bounded reads, short error messages, atomic writes.

Every defect of such a file raises PlanFileError. Not for the meaning of a file: see
plan_files/plan_file.py and plan_files/prediction_file.py.
"""

import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Never, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from steelyard.errors import PlanFileError, SteelyardError
from steelyard.safe_text import printable

STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, frozen=True, str_max_length=16_384
)
# Five problems are enough to show the defect. Together with the expectation and the remedy, they
# fit into the eight lines that people read.
_MOST_PROBLEMS = 5
# For each dotted key, tomllib walks once per prefix. A single line of a million dots would
# therefore take hours.
_MOST_DOTS = 32
# Valid files stay far below these limits. Beyond them, reporting the problems would need gigabytes.
_MOST_KEYS = 64
_MOST_VALUES = 2_000_000
_NAME = "check the name, or write one with steelyard plan"
_RESTORE = "restore the file, or plan again: steelyard plan train.py"
_TOML_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|#.*|[^"\'#]+|["\']')

_Model = TypeVar("_Model", bound=BaseModel)


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    try:
        is_file, exists = path.is_file(), path.exists()
        raw = b""
        if is_file:
            with path.open("rb") as file:
                raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _refuse(path, f"cannot be read: {reason}", remedy=_NAME)
    if not is_file:
        _refuse(path, "is not a file" if exists else "does not exist", remedy=_NAME)
    return raw


def toml_tables(raw: bytes | str, *, source: str, most_bytes: int) -> dict[str, Any]:
    text = _text(raw, source=source, most_bytes=most_bytes)
    _check_toml_cost(text, source)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        _refuse(source, "is nested too deeply")
    except ValueError as error:
        _refuse(source, f"is not TOML: {printable(str(error), most=160)}")
    _check_size(tables, source)
    return tables


def json_model(raw: bytes | str, model: type[_Model], *, source: str, most_bytes: int) -> _Model:
    """Return the model in ``raw``; the standard parser catches defects that pydantic's parser
    accepts.
    """
    text = _text(raw, source=source, most_bytes=most_bytes)
    try:
        found = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        _check_size(found, source)
        return model.model_validate_json(text)
    except RecursionError:
        _refuse(source, "is nested too deeply")
    except ValidationError as error:
        raise refusal(source, problems_of(error, model)) from None
    except PlanFileError:
        raise
    except ValueError as error:
        _refuse(source, f"is not JSON: {printable(str(error), most=160)}")


def refusal(source: str, problems: Sequence[str], *, remedy: str = "") -> PlanFileError:
    """Return one error for all problems, with the first few in full."""
    name = printable(str(source))
    if len(problems) == 1:
        happened = f"{name}: {problems[0]}"
    else:
        shown = [*problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            shown.append(f"and {len(problems) - _MOST_PROBLEMS} more")
        happened = "\n  ".join([f"{name} has {len(problems)} problems", *shown])
    return PlanFileError(
        happened,
        expected="a plan file in Steelyard's format",
        remedy=remedy or "correct the entries named above, or plan again: steelyard plan train.py",
    )


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    *,
    within: tuple[str | int, ...] = (),
    also: Iterable[str] = (),
) -> list[str]:
    """Return one line for each problem; ``within`` locates ``model``, ``also`` lists more allowed
    keys.
    """
    return [
        f"{where((*within, *e['loc']))} {_problem(dict(e), model, also)}"
        for e in error.errors(include_url=False)
    ]


def close_to(given: str, known: Sequence[str]) -> str:
    """Return the closest known name, or all known names, as the end of a message."""
    close = difflib.get_close_matches(given[:80], known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def where(location: Sequence[str | int]) -> str:
    """Return a location such as ``("recompute", 1, "nth")`` as readable text: ``recompute 2:
    nth``.
    """
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f" {part + 1}:"
        else:
            separator = "" if not text else " " if text.endswith(":") else "."
            text += separator + printable(part, most=60)
    return text.rstrip(":") or "the file"


def write_whole(path: Path, content: bytes, *, option: str = "-o") -> None:
    """Write atomically: ``path`` has the new or the old content, even after a power cut."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with scratch.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise PlanFileError(
            f"{printable(str(path))} cannot be written: {error.strerror}",
            expected="a writable folder with enough free space",
            remedy=f"free space, or choose another place with {option}",
        ) from None


def write_where_other(path: Path, text: str) -> None:
    """Write the first host's text on another host, unless a shared folder already has it."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_whole(path, text.encode())


def _text(raw: bytes | str, *, source: str, most_bytes: int) -> str:
    try:
        content = raw.encode("utf-8") if isinstance(raw, str) else raw
        if len(content) > most_bytes:
            _refuse(source, f"is larger than {most_bytes // 2**20} MiB")
        return content.decode("utf-8-sig")
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        _refuse(source, f"is not UTF-8 text: {error.reason}")


def _check_toml_cost(text: str, source: str) -> None:
    """Refuse text that would take the parser too long; strings must end on the line where they
    begin.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        has_triple = '"""' in line or "'''" in line
        if not has_triple and line.count(".") <= _MOST_DOTS:
            continue
        tokens = _TOML_TOKEN.findall(line)
        for token, following in pairwise(tokens):
            if token in ('""', "''") and following[0] == token[0]:
                _refuse(source, f"has a multi-line string at line {number}")
        if sum(t.count(".") for t in tokens if t[0] not in "\"'#") > _MOST_DOTS:
            _refuse(source, f"holds a key of more than {_MOST_DOTS} parts at line {number}")


def _check_size(found: object, source: str) -> None:
    """Refuse content much larger than any plan; the check is iterative, so deep nesting is no
    danger.
    """
    values, pending = 0, [found]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict):
            if len(inner) > _MOST_KEYS:
                _refuse(source, f"holds a table of {len(inner)} keys")
            pending += inner.values()
        elif isinstance(inner, list):
            pending += inner
        values += 1
        if values + len(pending) > _MOST_VALUES:
            _refuse(source, f"holds more than {_MOST_VALUES} values")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {printable(twice, most=60)!r} is duplicated in one object")
    return found


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a number")


def _refuse(source: str | Path, what: str, *, remedy: str = _RESTORE) -> Never:
    raise refusal(str(source), [what], remedy=remedy) from None


def _problem(error: dict[str, Any], model: type[BaseModel], also: Iterable[str]) -> str:
    kind, given = error["type"], error.get("input")
    context = error.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        *parents, key = error["loc"]
        known = [*_keys_at(parents, model), *(() if parents else also)]
        return f"is not a known key{close_to(str(key), known)}"
    if kind == "missing":
        return "is missing"
    own = context.get("error")
    if isinstance(own, SteelyardError):
        return f"cannot be used: {own.happened}"
    spell = _EXPECTED_BY_KIND.get(kind)
    return f"is {_value_text(given)}, not {spell(context) if spell else printable(error['msg'])}"


_EXPECTED_BY_KIND: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "bool_type": lambda _: "true or false",
    "string_type": lambda _: "a string",
    "string_too_short": lambda _: "a string of at least one character",
    "string_too_long": lambda c: f"a string of at most {c['max_length']} characters",
    "greater_than_equal": lambda c: f"{c['ge']} or more",
    "greater_than": lambda c: f"more than {c['gt']:g}",
    "less_than_equal": lambda c: f"{c['le']} or less",
    "list_type": lambda _: "an array",
    "tuple_type": lambda _: "an array",
    "too_long": lambda c: f"an array of at most {c['max_length']}",
    "model_type": lambda _: "a table",
    "dict_type": lambda _: "a table",
    "dataclass_type": lambda _: "an object",
    "assertion_error": lambda _: "an interval that contains its value",
    "string_pattern_mismatch": lambda _: "64 hexadecimal digits",
    "enum": lambda c: f"one of {c['expected']}",
    "literal_error": lambda c: str(c["expected"]),
}


def _value_text(given: object) -> str:
    match given:
        case bool():
            return str(given).lower()
        case int():
            # Python refuses to convert a number of thousands of digits to text.
            return str(given) if abs(given) < 2**64 else "a number of more than 19 digits"
        case float():
            return f"{given!r}"
        case str():
            return repr(printable(given, most=40))
        case list() | tuple():
            return "an array"
        case dict():
            return "a table"
        case _:
            return printable(f"a {type(given).__name__}")


def _keys_at(location: Sequence[str | int], model: type[Any]) -> list[str]:
    for part in location:
        if isinstance(part, str):
            model = _model_of(_fields(model)[part])
    return list(_fields(model))


def _fields(model: type[Any]) -> dict[str, Any]:
    if issubclass(model, BaseModel):
        return {f.alias or name: f.annotation for name, f in model.model_fields.items()}
    return typing.get_type_hints(model)


def _model_of(annotation: Any) -> type[Any]:
    """Return the one model inside ``list[Model]``, ``Model | None`` and the like."""
    if isinstance(annotation, type) and (
        is_dataclass(annotation) or issubclass(annotation, BaseModel)
    ):
        return annotation
    found = [a for a in typing.get_args(annotation) if a not in (type(None), Ellipsis)]
    assert isinstance(annotation, UnionType) or typing.get_origin(annotation), annotation
    return _model_of(found[0])
