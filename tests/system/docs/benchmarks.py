"""Writes the figures of docs/benchmarks.md and docs/benchmarks/ from the recorded results.

    python -m tests.system.docs.benchmarks

A file in benchmarks/results/ has a line about the run (date, command, hardware, commit), then the
line that the benchmark ended in (name, value, interval, target, ok, and where it has several, its
figures). A page marks where figures go: ``<!-- figures NAME -->`` for all of one file,
``<!-- answers NAME -->`` for the rows of ANSWERS. Not for running any benchmark.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "benchmarks.md"
DETAILS = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"
_SPACE = "\N{NO-BREAK SPACE}"

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row of the summary: all figures of a result file whose names match a pattern."""

    says: str
    result: str
    pattern: str
    unit: Literal["share", "times", "count", "CPU s", "s", "GB"]
    bound: Literal["at most", "at least"] = "at most"


def _answer(says: str, result: str, pattern: str, unit: Any, bound: Any = "at most") -> Answer:
    return Answer(says=says, result=result, pattern=pattern, unit=unit, bound=bound)


_MEGATRON = r"(sc21-[12]|korthikanti-5) from half of .*: "
_RUNS = r"(foundry-\w+|titan-\d|llama3-4|sailor|mist) from half of .*: "

ANSWERS = {
    "memory": (
        _answer(
            "error of the predicted peak, median of 30 plans: ten models, three budgets each",
            "truth", "memory miss, median of 30, python", "share",
        ),
        _answer("the worst of them", "truth", "memory miss, worst of 30, python", "share"),
        _answer(
            "on Inductor, the worst of 27 plans",
            "truth_inductor", "memory miss, worst of 27, inductor", "share",
        ),
        _answer(
            "two ranks, the worst plan of each model and link",
            "live", ".*, predicted peak of each plan on each rank", "share",
        ),
        _answer(
            "measured peaks over their budget, of 64 plans",
            "honest_budget", "peaks over their budget, of 64", "count",
        ),
        _answer(
            "planned runs that died under a memory limit held by the kernel, of 9",
            "hard_limit", "plans that died under the limit, of 9", "count",
        ),
        _answer(
            "plain PyTorch runs that survived the same limit, of 9",
            "hard_limit", "plain steps that lived under it, of 9", "count",
        ),
        _answer(
            "share of the budget in use where the next larger budget is faster, least of 51",
            "honest_budget", "least used of a budget, of 51 .*", "share", "at least",
        ),
    ),
    "time": (
        _answer(
            "error of the predicted time ratio (plan to graph without trades), median of 30 plans",
            "truth", "time ratio miss, median of 30", "share",
        ),
        _answer(
            "measured ratios outside the predicted interval",
            "truth", "time ratio outside its interval, of 30", "share",
        ),
        _answer(
            "error of the predicted step time with offload, worst",
            "joint", "step time measured over predicted, worst miss", "share",
        ),
        _answer(
            "two ranks, four speeds of link: measured step time / predicted",
            "peers", ".*: seconds / the prediction", "times",
        ),
    ),
    "peers": (
        _answer(
            "FLOPs / those of the best of per-block checkpointing, torch's min-cut and "
            "`activation_memory_budget`, at the peer's own peak",
            "frontier", "FLOPs of our plan .*", "times",
        ),
        _answer(
            "the same with selective checkpointing and tighter budgets, worst of 118",
            "frontier_tight", "FLOPs at equal peak / the best peer, worst of 118", "times",
        ),
        _answer(
            "peak / torch's best on decomposed graphs, at equal FLOPs",
            "frontier_tight", ".*decomposed: peak / torch's best, .*", "times",
        ),
        _answer(
            "budgets kept, of 38 that checkpointing or `activation_memory_budget` can keep",
            "honest_budget", "share run, of 38 a peer fits", "share", "at least",
        ),
        _answer(
            "step time / DistributedDataParallel with its best bucket size, two ranks",
            "ranks", ".*: seconds / DDP .*", "times",
        ),
        _answer(
            "step time / `torch.compile` of DistributedDataParallel, two ranks",
            "ranks", r".*: seconds / torch\.compile\(DDP\)", "times",
        ),
        _answer(
            "step time / FSDP2, two ranks, states in shares",
            "ranks", ".*: seconds / FSDP2", "times",
        ),
        _answer("peak memory / FSDP2, the same", "ranks", ".*: peak / FSDP2", "times"),
        _answer(
            "batch that fits 2 GiB / plain PyTorch's, 12-layer GPT",
            "largest", "4 times the batch, 8192 words", "times", "at least",
        ),
        _answer(
            "CPU time of a sample in that batch / plain PyTorch",
            "largest", "CPU time a sample, .*", "times",
        ),
    ),
    "planning": (
        _answer(
            "search on 950 nodes", "plan_time", "search of 950 nodes, CPU seconds", "CPU s",
        ),
        _answer(
            "search on 4,725 nodes", "plan_time", "search of 4725 nodes, CPU seconds", "CPU s",
        ),
        _answer(
            "search on 9,406 nodes", "plan_time", "search of 9406 nodes, CPU seconds", "CPU s",
        ),
        _answer(
            "Llama 70B on 1,024 H100", "deep_plan", "Llama 70B on 1,024 H100: CPU-s", "CPU s",
        ),
        _answer(
            "Llama 405B on 16,384 H100",
            "deep_plan", "Llama 405B on 16,384 H100: CPU-s", "CPU s",
        ),
        _answer(
            "capture of Llama 70B alone", "capture", "70B Llama, CPU seconds", "CPU s",
        ),
        _answer(
            "step time of the plan above the fastest that CP-SAT finds at the same peak, small "
            "models",
            "exact", ".*: seconds over CP-SAT's, less one", "share",
        ),
        _answer(
            "step time of the plan above the fastest measured one within the budget, two ranks",
            "live", r".*, (any memory|[\d.]+ MiB)", "share",
        ),
    ),
    "running": (
        _answer("generated Python / eager PyTorch, CPU time", "runner", ".*", "times"),
        _answer(
            "Inductor runner / `torch.compile`, CPU time", "inductor", ".*", "times",
        ),
        _answer(
            "loss head in slices / plain PyTorch: peak memory",
            "chunk", ".*: peak beside plain PyTorch", "times",
        ),
        _answer(
            "loss head in slices / plain PyTorch: CPU time",
            "chunk", ".*: CPU time beside plain PyTorch", "times",
        ),
        _answer(
            "overhead of recompute and offload / overhead of recompute alone, five budgets",
            "joint", "overhead beside recomputing alone, .*", "times",
        ),
        _answer(
            "rate with a weight four times the memory budget / all in memory",
            "far_product", "rate beside all in memory, .*", "times", "at least",
        ),
        _answer(
            "message through shared memory / gloo",
            "transfer", ".*, through slots / gloo", "times",
        ),
        _answer(
            "throughput with one rank at half speed / the ideal 1.5",
            "mixed", "mixed: .*", "times", "at least",
        ),
    ),
    "compression": (
        _answer(
            "bytes sent in 2 bits / float32 all-reduce, two to six hosts",
            "codes", r"ternary, \d hosts: bytes / fp32 all-reduce", "times",
        ),
        _answer(
            "bytes sent in 8 bits / float32 all-reduce",
            "codes", r"int8, \d hosts: bytes / fp32 all-reduce", "times",
        ),
        _answer(
            "step time / the best of DDP in float32 and bfloat16, 20 and 100 Mbit/s",
            "peers", "[^,]*, (20|100) Mbit/s[^:]*: seconds / the best peer", "times",
        ),
        _answer(
            "the same over 1 Gbit/s and unshaped links",
            "peers", "[^,]*, (1 Gbit/s|unshaped): seconds / the best peer", "times",
        ),
        _answer(
            "higher loss on held-out text, gradients in 16 or 8 bits",
            "drift", "gradients in (16|8) bits, .*", "share",
        ),
        _answer(
            "higher loss on held-out text, gradients in 2 bits",
            "drift", "gradients in 2 bits, .*", "share",
        ),
        _answer(
            "higher loss on held-out text, gradients of rank 4",
            "drift", "gradients of rank 4, .*", "share",
        ),
        _answer(
            "higher loss on held-out text, the largest 16 of 1,024 gradients",
            "drift", "the largest 16 of 1,024 gradients, .*", "share",
        ),
    ),
    "clusters": (
        _answer(
            "Megatron-LM on A100, three published tables: median error of step time",
            "published", f"{_MEGATRON}median time error", "share",
        ),
        _answer("the worst step of them", "published", f"{_MEGATRON}worst time error", "share"),
        _answer(
            "llm-foundry, torchtitan, Llama 3, Sailor, Mist: median error of step time",
            "published", f"{_RUNS}median time error", "share",
        ),
        _answer("the worst step of them", "published", f"{_RUNS}worst time error", "share"),
        _answer(
            "DeepSpeed ZeRO-3 on A100 (2021): median error of step time",
            "published", "sc21-2-zero3 .*: median time error", "share",
        ),
        _answer(
            "the worst step of them", "published", "sc21-2-zero3 .*: worst time error", "share",
        ),
        _answer(
            "published peak memory, mean error of each table",
            "published", "[^:]*: mean peak error", "share",
        ),
        _answer(
            "published plans ordered wrongly, share of 9 pairs",
            "published", "OPT-350M plans ordered wrongly, of 9 pairs", "share",
        ),
        _answer(
            "time until a broken rank is named, beyond the time that ranks wait, 17 faults",
            "faults", ".*", "s",
        ),
        _answer(
            "ranks that died on two devices of half the needed memory, of 2",
            "two_devices", "ranks that died under it", "count",
        ),
    ),
}  # fmt: skip

# The question of each section, and its answer, composed from the rows above.
HEADLINES = {
    "memory": (
        "Is the predicted peak memory right?",
        "worst error of 30 plans {1}; on Inductor {2}; two ranks {3}; {4} of 64 over budget",
    ),
    "time": (
        "Is the predicted step time right?",
        "median error of 30 plans {0}; two ranks: measured / predicted {3}",
    ),
    "peers": (
        "How does it compare with checkpointing, DDP and FSDP2 set by hand?",
        (
            "at equal peak, FLOPs at worst {1} times the best peer's; step time {4} of DDP's, "
            "{6} of FSDP2's"
        ),
    ),
    "planning": (
        "How long does planning take, and how good is the plan?",
        "{0} for 950 nodes, {3} for Llama 70B on 1,024 H100; step time above CP-SAT's: {6}",
    ),
    "running": (
        "What does a plan cost while it runs?",
        "{0} of eager PyTorch's CPU time, {1} of `torch.compile`'s",
    ),
    "compression": (
        "What do compressed gradients save and cost?",
        "in 2 bits {0} of the bytes; over 20 and 100 Mbit/s {2} of the best DDP's step time",
    ),
    "clusters": (
        "Do predictions hold on clusters?",
        "median error: Megatron-LM {0}, five other sources {2}, DeepSpeed ZeRO-3 {4}",
    ),
}


def written(text: str, results: Path = RESULTS) -> str:
    """Return a page's text with the figures that the results hold now."""

    def fill(found: re.Match[str]) -> str:
        kind, name = found["kind"], found["name"]
        made = table(results / f"{name}.json") if kind == "figures" else answers(name)
        return f"<!-- {kind} {name} -->\n\n{made}\n<!-- end -->"

    mark = r"<!-- (?P<kind>figures|answers) (?P<name>\w+) -->.*?<!-- end -->"
    return re.sub(mark, fill, text, flags=re.DOTALL)


def pages() -> list[Path]:
    return [PAGE, *sorted(DETAILS.glob("*.md"))]


# --- all figures of a run -------------------------------------------------------------------------


def table(file: Path) -> str:
    about, figures = _read(file)
    said = ", ".join(str(about[key]) for key in ("date", "hardware", "commit") if key in about)
    lines = [
        f"`{about['command']}`: {said}\n",
        "| figure | measured | interval | target | result |",
        "|---|---|---|---|---|",
    ]
    for figure in figures:
        interval = figure.get("interval")
        shown = f"{_number(interval[0])} to {_number(interval[1])}" if interval else ""
        target = "" if figure["target"] is None else _number(figure["target"])
        value = _number(figure["value"])
        lines.append(f"| {figure['name']} | {value} | {shown} | {target} | {_verdict([figure])} |")
    return "\n".join(lines) + "\n"


def _read(file: Path) -> tuple[dict[str, Any], list[Figure]]:
    about, last = (json.loads(line) for line in file.read_text().splitlines() if line.strip())
    return about, last.get("figures", [last])


def _verdict(figures: list[Figure]) -> str:
    asked = [figure for figure in figures if figure["target"] is not None]
    missed = sum(not figure["ok"] for figure in asked)
    if not asked:
        return "no target"
    if missed:
        return "**missed**" if len(figures) == 1 else f"**{missed} of {len(asked)} missed**"
    return "met" if len(asked) == len(figures) else f"met by {len(asked)}, no target for the rest"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- the summary ----------------------------------------------------------------------------------


def answers(name: str) -> str:
    if name == "all":
        lines = ["| question | answer |", "|---|---|", *(_headline(part) for part in ANSWERS)]
    else:
        lines = ["| | measured | target | result | all figures |", "|---|---|---|---|---|"]
        lines += (_row(answer) for answer in ANSWERS[name])
    return "\n".join(lines) + "\n"


def _headline(name: str) -> str:
    question, template = HEADLINES[name]
    anchor = re.sub(r"[^\w\- ]", "", question.lower()).replace(" ", "-")
    cells = []
    for answer in ANSWERS[name]:
        found = figures_of(answer)
        missed = f" ({verdict})" if "missed" in (verdict := _verdict(found)) else ""
        cells.append(_range([figure["value"] for figure in found], answer.unit) + missed)
    return f"| [{question}](#{anchor}) | {template.format(*cells)} |"


def _row(answer: Answer) -> str:
    found = figures_of(answer)
    measured = _range([figure["value"] for figure in found], answer.unit)
    interval = found[0].get("interval")
    if len(found) > 1:
        measured += f", {len(found)} figures"
    elif interval and interval[0] != interval[1]:
        measured += f" ({_range(interval, answer.unit)})"
    targets = [figure["target"] for figure in found if figure["target"] is not None]
    bound = answer.bound.replace(" ", _SPACE)
    target = f"{bound}{_SPACE}{_range(targets, answer.unit)}" if any(targets) else "0"
    detail = f"[{answer.result}](benchmarks/{_detail_page(answer.result)}#{answer.result})"
    shown = target if targets else ""
    return f"| {answer.says} | {measured} | {shown} | {_verdict(found)} | {detail} |"


def figures_of(answer: Answer) -> list[Figure]:
    _, figures = _read(RESULTS / f"{answer.result}.json")
    return [figure for figure in figures if re.fullmatch(answer.pattern, figure["name"])]


def _range(values: list[float], unit: str) -> str:
    low, high = (_amount(value, unit) for value in (min(values), max(values)))
    return low if low == high else f"{low.removesuffix(_suffix(unit))} to {high}"


def _amount(value: float, unit: str) -> str:
    if unit == "share":
        value, digits = 100 * value, 2
        if 0 < value < 0.001:
            return f"under{_SPACE}0.001{_SPACE}%"
    else:
        digits = 3
    return f"{float(f'{value:.{digits}g}'):g}{_suffix(unit)}"


def _suffix(unit: str) -> str:
    return {"share": f"{_SPACE}%", "count": "", "times": ""}.get(unit, f"{_SPACE}{unit}")


def _detail_page(result: str) -> str:
    (found,) = (
        page.name
        for page in DETAILS.glob("*.md")
        if f"<!-- figures {result} -->" in page.read_text(encoding="utf-8")
    )
    return found


def first_lines() -> dict[str, str]:
    """Return the first sentence of each benchmark's docstring."""
    found = {}
    for file in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        found[file.stem] = " ".join(said.split("\n\n")[0].split())
    return found


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
