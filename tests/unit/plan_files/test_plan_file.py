"""Plan files: written values are read back unchanged, and anything else gives one short error."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput, PlanFileError
from steelyard.ir.metrics import Estimate
from steelyard.plan_files.plan_file import (
    MOST_BYTES,
    decode_decisions,
    digest_of,
    encode_decisions,
    read_decisions,
)
from steelyard.plan_files.prediction_file import (
    _Body,
    decode_explanation,
    encode_explanation,
    read_plan,
    with_reasons,
    write_explanation,
    write_plan,
)
from steelyard.plans.budget import Budget
from steelyard.plans.plan import BatchEntry, Decisions, Plan, Target
from steelyard.plans.plan_on_file import explanation_path
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.recompute import RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_states import ShardStatesRule
from tests.support.sample import DECISIONS, MEASURED, MIB, PLAN, timeline

GOOD = encode_decisions(DECISIONS)

WORDS = st.text(max_size=30)
WHOLE = st.integers(0, 2**62)
LEAST_ONE = st.integers(1, 2**62)
MOST_RANKS = 1_000_000
POSITIVE = st.floats(0, 2.0**62, exclude_min=True)
ACCUMULATE = st.builds(AccumulateRule, micro_batches=LEAST_ONE)
RECOMPUTE = st.builds(
    RecomputeRule,
    module=WORDS,
    op=WORDS,
    nth=WHOLE,
    count=LEAST_ONE,
    times=st.integers(1, 16),
)
SHARD_BATCH = st.builds(ShardBatchRule, ranks=st.integers(2, MOST_RANKS), bucket=LEAST_ONE)
SHARD_STATES = st.builds(
    ShardStatesRule, ranks=st.integers(2, MOST_RANKS), parameter=WORDS,
    what=st.sampled_from(["", "optimizer", "gradient"]), gathers=st.integers(1, 2),
    count=LEAST_ONE, bucket=WHOLE,
)  # fmt: skip
OVERLAP = st.builds(
    OverlapRule, window=LEAST_ONE, ahead=WHOLE, within=st.sampled_from(["", "peak"])
)
RULES = st.tuples(
    *(st.sets(rules, max_size=1) for rules in (ACCUMULATE, SHARD_BATCH, OVERLAP)),
    *(st.sets(rules, max_size=5) for rules in (RECOMPUTE, SHARD_STATES)),
).map(lambda all_of_them: tuple(sorted(set().union(*all_of_them))))
BATCH = st.lists(
    st.builds(
        BatchEntry, name=WORDS, shape=st.lists(WHOLE, max_size=5).map(tuple), dtype=WORDS
    ),
    max_size=4,
).map(tuple)  # fmt: skip


def _on_hosts(target: Target) -> st.SearchStrategy[Target]:
    """Return a target with equal numbers of its ranks on each host."""
    divisors = [n for n in range(1, 13) if target.ranks % n == 0]
    return st.sampled_from(divisors).map(lambda hosts: replace(target, hosts=hosts))


ANY_DECISIONS = st.builds(
    Decisions,
    target=st.builds(
        Target,
        model=WORDS, graph=WORDS, decomposition=WORDS, runner=WORDS, cluster=WORDS, torch=WORDS,
        batch=BATCH, ranks=st.integers(1, MOST_RANKS),
    ).flatmap(_on_hosts),
    budget=st.builds(
        Budget,
        memory_bytes=st.none() | LEAST_ONE,
        step_seconds=st.none() | POSITIVE,
        communication_seconds=st.none() | POSITIVE,
        computation_seconds=st.none() | POSITIVE,
        accuracy_loss=st.floats(0, 1),
    ),
    rules=RULES,
)  # fmt: skip


def refused(raw: bytes | str, decode: Callable[[bytes | str], object] = decode_decisions) -> str:
    """Return the message of a file that must be refused; it is never long."""
    with pytest.raises(PlanFileError) as caught:
        decode(raw)
    said = str(caught.value)
    assert said.count("\n") < 9, said
    assert all(len(line) < 400 for line in said.split("\n")), said
    assert said.replace("\n", "").isprintable()
    return said


# --- round trip of a plan file --------------------------------------------------------------------


NAMES = (
    "'''",
    '"""',
    '""',
    "a" + ".a" * 99,
    "#",
    "\\",
    "\x7f\x00\x1b",
    "\u202e",
    "\u2028",
    "[[x]]",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_with_toml_syntax_are_written_and_read(name: str) -> None:
    rule = RecomputeRule(module=name, op=name)
    decisions = replace(DECISIONS, rules=(rule,))
    assert decode_decisions(encode_decisions(decisions)) == decisions


@settings(deadline=None)
@given(ANY_DECISIONS)
def test_decisions_are_written_and_read(decisions: Decisions) -> None:
    assert decode_decisions(encode_decisions(decisions)) == decisions


@settings(deadline=None)
@given(ANY_DECISIONS, ANY_DECISIONS)
def test_the_digest_names_the_decisions(one: Decisions, other: Decisions) -> None:
    assert (digest_of(one) == digest_of(other)) == (one == other)


def test_the_plan_file_is_readable_toml() -> None:
    assert (
        GOOD
        == """\
# The decisions of one Steelyard plan; their predicted costs are in the JSON
# file next to this one. Edit them, then check the edit:
#   steelyard plan train.py --check train.plan.toml
format = 2

[target]
model = "3f21a0c45b7e9d10"
graph = "9c44d1b2a7f03e58"
decomposition = "python-1"
runner = "python"
cluster = "51d0c2f3a4b59687"
torch = "2.13.0+cpu"

[[target.batch]]
name = "[0]"
shape = [8, 256]
dtype = "int64"

[[target.batch]]
name = "[1]"
shape = [8, 256]
dtype = "int64"

[budget]
memory = "300 MiB"
accuracy_loss = "0 %"

[[accumulate]]
micro_batches = 2

[[recompute]]
module = "blocks.*.attn"
op = "aten.bmm.default"
nth = 1
count = 4

[[recompute]]
module = "blocks.*.mlp"
op = "aten.gelu.default"
nth = 0
count = 4
"""
    )


def test_times_is_written_only_if_above_one() -> None:
    first, *rest = (rule for rule in DECISIONS.rules if rule.trade == "recompute")
    twice = replace(DECISIONS, rules=(replace(first, times=2), *rest))
    assert encode_decisions(twice) == GOOD.replace(
        "count = 4\n", "count = 4\ntimes = 2\n", 1
    ).replace("[[accumulate]]\nmicro_batches = 2\n\n", "")
    assert decode_decisions(encode_decisions(twice)) == twice
    assert twice.name != replace(DECISIONS, rules=(first, *rest)).name


def test_comments_order_and_layout_do_not_matter() -> None:
    tables = tomllib.loads(GOOD)
    first, second = tables["recompute"]
    moved = GOOD.split("[[recompute]]")[0].replace("[budget]", "[budget] # mine") + "".join(
        "[[recompute]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in reversed(t.items()))
        for t in (second, first)
    )
    assert decode_decisions(moved) == DECISIONS
    assert decode_decisions(b"\xef\xbb\xbf" + moved.replace("\n", "\r\n").encode()) == DECISIONS


# --- files that are refused -----------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text() | st.binary())
def test_anything_else_is_a_plan_file_error(raw: str | bytes) -> None:
    refused(raw)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_gives_other_decisions_or_a_plan_file_error(data: st.DataObject) -> None:
    raw = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        length = data.draw(st.integers(0, 3))
        raw[place : place + length] = data.draw(st.binary(max_size=3))
    try:
        assert isinstance(decode_decisions(bytes(raw)), Decisions)
    except PlanFileError:
        refused(bytes(raw))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
)  # fmt: skip
TREES = st.recursive(
    SCALARS, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=8), t, max_size=3)
)


def toml_of(value: object) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value).replace("\x7f", "")
        case dict():
            return (
                "{" + ", ".join(f"{json.dumps(k)} = {toml_of(v)}" for k, v in value.items()) + "}"
            )
        case list():
            return "[" + ", ".join(map(toml_of, value)) + "]"
        case _:
            return repr(value)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["format", "target", "budget", "accumulate", "recompute"]), TREES)
def test_a_wrong_value_anywhere_is_a_plan_file_error(key: str, value: object) -> None:
    tables = tomllib.loads(GOOD) | {key: value}
    raw = "\n".join(f"{json.dumps(k)} = {toml_of(v)}" for k, v in tables.items())
    try:
        decode_decisions(raw)
    except PlanFileError:
        refused(raw)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory =", "memry =", "budget.memry is not a known key; did you mean memory?"),
        ("module =", "modle =", "recompute 1: modle is not a known key; did you mean module?"),
        ("cluster =", "clusters =", "target.clusters is not a known key; did you mean cluster?"),
        ("dtype =", "dtyp =", "target.batch 1: dtyp is not a known key; did you mean dtype?"),
        ("[[recompute]]", "[[recompte]]", "recompte is not a known key; did you mean recompute?"),
        ("[budget]", "[bugdet]", "bugdet is not a known key; did you mean budget?"),
        ("count = 4", "count = -4", "recompute 1: count is -4, not 1 or more"),
        ("count = 4", "count = 4.0", "recompute 1: count is 4.0, not a whole number"),
        ("count = 4", "count = true", "recompute 1: count is true, not a whole number"),
        ("count = 4", 'count = "4"', "recompute 1: count is '4', not a whole number"),
        ("count = 4", f"count = {'9' * 4000}", "more than 19 digits"),
        ("count = 4", f"count = {'9' * 9000}", "is not TOML"),
        ("count = 4", f"count = 0x{'f' * 9000}", "more than 19 digits"),
        ("count = 4", "count = 1979-05-27", "is a date, not a whole number"),
        ("nth = 1", "nth = nan", "is nan, not a whole number"),
        ("nth = 1", "times = 0", "recompute 1: times is 0, not 1 or more"),
        ("nth = 1", "times = 17", "recompute 1: times is 17, not 16 or less"),
        ("nth = 1", "times = 1.5", "recompute 1: times is 1.5, not a whole number"),
        ("nth = 1", "time = 2", "recompute 1: time is not a known key; did you mean times?"),
        ("nth = 1", "times = 2\ntimes = 3", "is not TOML"),
        (
            "[[recompute]]", "[[quantize_activations]]\ntimes = 2",
            "quantize_activations 1: times is not a known key",
        ),
        ("op =", "nth = 1\nop =", "is not TOML"),
        ('"300 MiB"', '"300 megs"', "memory = '300 megs' has the unknown unit 'megs'"),
        ('"300 MiB"', "-3", "budget.memory is -3, not 1 or more"),
        ('"300 MiB"', "inf", "budget.memory is inf, not a whole number"),
        ('"300 MiB"', "true", "budget.memory is true, not a whole number"),
        ('"0 %"', "nan", "budget.accuracy_loss is nan, not"),
        ('"0 %"', "-0.1", "budget.accuracy_loss is -0.1, not 0 or more"),
        ("format = 2", "format = 3", "written by a later version of Steelyard"),
        ("format = 2", "format = 1", "was written in format 1, whose tables"),
        ("format = 2", "format = true", "format is true, not a whole number"),
        ("format = 2\n", "", "format is missing"),
        ("micro_batches = 2", "micro_batches = 0", "accumulate 1: micro_batches is 0, not 1 or"),
        ("micro_batches = 2", "degree = 2", "accumulate 1: degree is not a known key"),
        (
            "[[accumulate]]\nmicro_batches = 2",
            '[[offload_state]]\nparameter = "x"\nwhat = "weights"\ncount = 1\nlead = 0',
            "offload_state 1: what is 'weights', not 'optimizer', 'gradient' or 'weight'",
        ),
        ("[[accumulate]]\nmicro_batches = 2", "accumulate = 2", "budget.accumulate is not a known"),
        ("[[accumulate]]", "[[accumulate]]\nmicro_batches=2\n[[accumulate]]", "2 tables; at m"),
        ("[8, 256]", '[8, "x"]', "target.batch 1: shape 2 is 'x', not a whole number"),
        ("[8, 256]", f"[{'1,' * 65}]", "an array of at most 64"),
        ('"int64"', '"\\u001b[31mred"', ""),
        ('"2.13.0+cpu"', f'"{"x" * 20_000}"', "a string of at most 16384 characters"),
        ("blocks.*.mlp", '"""x', "has a multi-line string"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_key(old: str, new: str, said: str) -> None:
    assert old in GOOD
    if said:
        assert said in refused(GOOD.replace(old, new, 1))
    else:
        decode_decisions(GOOD.replace(old, new, 1))


def test_at_most_five_problems_are_listed_at_once() -> None:
    bad = re.sub("nth = .", "nth = -1", GOOD).replace("memory", "memry").replace("count", "cont")
    said = refused(bad)
    assert "has 5 problems" in said
    bad = bad.replace("dtype", "dtyp")
    assert "has 9 problems" in refused(bad)
    assert "and 4 more" in refused(bad)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"format = 2\x00",
        "a = " + "[" * 1_000_000,
        "a = " + "{a=" * 300_000,
        "[" + "a." * 1_000_000 + "a]",
        "a." * 1_000_000 + "a = 1",
        ("a." * 31 + "a = 1\n") * 1_000,
        "a = '''" + "'" * 1_000,
        "recompute = [" + "1," * 1_000_000 + "]",
        "recompute = [" + "{a=1}," * 100_000 + "]",
        "\n".join(f"k{i} = 1" for i in range(100_000)),
        "#" * (MOST_BYTES + 1),
        "\ud800",
        '"' + "\\u0041" * 600_000,
        "target = {" + ", ".join(f"k{i} = 1" for i in range(60)) + "}",
    ],
    ids=lambda raw: str(raw[:12]),
)
def test_a_hostile_file_is_refused(raw: bytes | str) -> None:
    # Without a bound, the parser would need minutes to days for some of these.
    refused(raw)


def test_control_characters_never_reach_the_terminal() -> None:
    # As raw characters they are invalid TOML; as escapes they are valid in keys and values.
    said = refused(GOOD.replace("memory =", '"\\u001b[2J\\u202e" ='))
    assert "\\x1b[2J\\u202e is not a known key" in said


# --- files ----------------------------------------------------------------------------------------


def test_a_plan_is_written_to_two_files_and_read(tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    found = read_plan(path)
    assert found.plan == PLAN
    assert found.measured is None
    write_explanation(path, PLAN, MEASURED)
    assert read_plan(path).measured == MEASURED
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.plan.json", "train.plan.toml"]


def test_an_edited_plan_does_not_match_its_predictions(tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    path.write_text("# a comment is no edit\n" + path.read_text())
    assert read_plan(path).plan == PLAN
    path.write_text(path.read_text().replace("micro_batches = 2", "micro_batches = 4"))
    found = read_plan(path)
    assert found.is_edited
    assert found.plan is None
    assert found.decisions.rules[0].micro_batches == 4


def test_decisions_are_read_without_predictions(tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    path.write_text(GOOD)
    found = read_plan(path)
    assert (found.decisions, found.plan, found.is_edited) == (DECISIONS, None, False)


def test_stored_reasons_are_marked_and_dropped_for_another_budget(tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    slower = replace(
        PLAN.predicted, metrics=replace(PLAN.predicted.metrics, step_seconds=Estimate.exactly(2.0))
    )
    anew = replace(
        PLAN, predicted=slower, taken=(), refused=(), num_offers=0, next_cent=None, least_bytes=0
    )
    for _ in range(2):  # reading and writing again keeps the reasons of the earlier plan
        found = with_reasons(anew, path)
        assert (found.refused, found.next_cent) == (PLAN.refused, PLAN.next_cent)
        assert found.planned_seconds == PLAN.predicted.metrics.step_seconds.value
        write_explanation(path, found)
    larger = replace(slower, peak=replace(slower.peak, nbytes=slower.peak.nbytes + 1))
    other = with_reasons(replace(anew, predicted=larger), path)
    assert (other.refused, other.next_cent, other.least_bytes) == ((), None, 0)
    assert "plan again" in other.notes[-1]


def test_a_file_that_cannot_be_read_is_a_plan_file_error(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    for path, reason in (
        (tmp_path / "none.toml", r"does not exist(.|\n)*check the name, or write one"),
        (tmp_path, "is not a file"),
        (fifo, "is not a file"),
        (tmp_path / "a\x00b.toml", "does not exist"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ):
        with pytest.raises(PlanFileError, match=reason):
            read_decisions(path)


def test_text_that_is_not_toml_names_no_entries_to_correct() -> None:
    with pytest.raises(PlanFileError) as refused:
        decode_decisions("[[[")
    assert refused.value.remedy.startswith("restore the file, or plan again: ")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(PlanFileError, match="cannot be written"):
        write_plan(tmp_path / "no such folder" / "x.toml", PLAN)
    scratch = tmp_path / f".{path.name}.{os.getpid()}.tmp"
    scratch.mkdir()
    with pytest.raises(PlanFileError, match="cannot be written"):
        write_plan(path, PLAN)
    assert path.read_bytes() == before


def test_the_json_can_never_replace_the_plan_file() -> None:
    assert explanation_path(Path("a/train.plan.toml")) == Path("a/train.plan.json")
    with pytest.raises(BadInput, match="not a valid name for a plan file"):
        explanation_path(Path("train.json"))


# --- the prediction file --------------------------------------------------------------------------

EXPLANATION = encode_explanation(PLAN, MEASURED)


def decode_json(raw: bytes | str) -> object:
    return decode_explanation(raw, DECISIONS)


def test_the_json_holds_every_field_of_a_plan_but_its_decisions() -> None:
    assert list(_Body.model_fields) == [f.name for f in fields(Plan) if f.name != "decisions"]


def test_a_long_timeline_is_thinned_and_keeps_its_peak() -> None:
    long = replace(PLAN.predicted, timeline=timeline(50_000, 296 * MIB))
    found = decode_explanation(encode_explanation(replace(PLAN, predicted=long)), DECISIONS)
    assert found.plan is not None
    thin = found.plan.predicted.timeline
    assert thin is not None
    assert len(thin.nbytes) == len(thin.seconds) == len(thin.phases) == 4096
    assert max(thin.nbytes) == 296 * MIB
    assert list(thin.seconds) == sorted(thin.seconds)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.binary() | TREES.map(json.dumps))
def test_any_other_json_is_a_plan_file_error(raw: str | bytes) -> None:
    refused(raw, decode_json)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_json_is_a_plan_file_error_or_harmless(data: st.DataObject) -> None:
    raw = bytearray(EXPLANATION)
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=3))
    try:
        decode_json(bytes(raw))
    except PlanFileError:
        refused(bytes(raw), decode_json)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"title"', '"titel"', "plan.titel is not a known key; did you mean title?"),
        ('"nbytes":', '"nbyte":', "is not a known key; did you mean nbytes?"),
        ('"flops":1000000000000', '"flops":NaN', "NaN is not a number"),
        ('"flops":1000000000000', '"flops":1e400', "plan.before.flops is inf, not"),
        ('"low":', '"low":1e30,"low":', "the key 'low' is duplicated in one object"),
        ('"low":', '"low":1e30,"lows":', "is not a known key; did you mean low?"),
        ('"phase":"forward"', '"phase":"sideways"', "not one of 'forward', 'backward' or 'update'"),
        ('"format":2', '"format":3', "format is 3, not 2 or less"),
        ('"memory_bytes":{', '"memory_bytes":[{', "is not JSON"),
    ],
)
def test_errors_in_the_json_are_named(old: str, new: str, said: str) -> None:
    text = EXPLANATION.decode()
    assert old in text
    assert said in refused(text.replace(old, new, 1), decode_json)


def test_an_interval_that_does_not_hold_its_value_is_refused() -> None:
    document = json.loads(EXPLANATION)
    document["plan"]["predicted"]["metrics"]["memory_bytes"]["low"] = 1e30
    assert "memory_bytes" in refused(json.dumps(document), decode_json)


@pytest.mark.parametrize(
    "raw",
    ["[" * 1_000_000, '{"a":' * 200_000, "[" + "[]," * 1_500_000 + "[]]", "9" * 100_000],
    ids=lambda raw: raw[:6],
)
def test_hostile_json_is_refused(raw: str) -> None:
    refused(raw, decode_json)


def test_a_missing_file_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError) as refused:
        read_decisions(tmp_path / "nope.plan.toml")
    assert str(refused.value).count("does not exist") == 1
    assert str(refused.value).count("next:") == 1
