"""Runs all candidate plans of two ranks over three link rates, and compares the chosen one.

    python benchmarks/live.py [model ...]

Each rank has a core and a host (see hosts.py). The candidates are those of the search: layouts,
sizes and times of messages, micro-batches, and less memory. They run in turns in the same
processes; a step takes as long as its slowest rank, and clearly slow candidates are dropped, half
of them at a time. The figure is the time of the chosen plan relative to the best one within the
same budget, minus one, with the 95 % interval of paired rounds. The link is measured between the
hosts before planning, as ``Cluster.here`` does. Needs root, and two idle cores.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._linked import know_link, run_on
from benchmarks._live_models import MODELS
from benchmarks._looked import capture_and_price
from benchmarks.hosts import hosts
from benchmarks.runner import interval

if TYPE_CHECKING:
    from steelyard.api.step import Step

RANKS = 2
LINKS = {"unshaped": None, "1 Gbit/s": 10**9, "100 Mbit/s": 10**8}
REGRET_TARGET, PEAK_TARGET, FEWEST_PLANS, RUNS_SHARE = 0.10, 0.05, 60, 1 / 20
MICRO_BATCHES, SHARES_OF_MEMORY = (2, 4, 8), (0.9, 0.8, 0.7)
FINER_SHARES = tuple(percent / 100 for percent in range(98, 40, -2))
# A plan is chosen without a budget, and for this share of the memory that the leanest layout takes.
TIGHT_SHARE = 0.85
# Each round: the number of turns of all remaining plans, and the share of them that remains.
Rounds = tuple[tuple[int, float], ...]
ROUNDS: Rounds = ((1, 0.6), (2, 0.4), (4, 0.4), (12, 0.0))
STEPS_IN_A_ROW, METERED = 2, 2
TAKE_APART = frozenset({"shard_tensor", "shard_states", "shard_pipeline"})
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The predicted seconds of each plan; by budget, the plans that fit and the chosen one."""

    predicted: tuple[float, ...]
    fitting: dict[str, list[int]]
    chosen: dict[str, int]


def main() -> None:
    torch.set_num_threads(1)
    figures = [figure for name in sys.argv[1:] or sorted(MODELS) for figure in measured(name)]
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(
        json.dumps(
            {
                "name": f"live: the worst of regrets and peaks, {worst['name']}",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": worst["target"],
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )


def measured(name: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, hosts(RANKS) as pair:
        # Measurements of this link must not be used by other runs.
        os.environ["STEELYARD_CACHE"] = f"{folder}/costs.sqlite"
        for link, bits_per_second in LINKS.items():
            pair.shape(bits_per_second)
            here = Path(folder) / link.partition(" ")[0]
            here.mkdir()
            know_link(pair, here, ranks=RANKS)
            contest = _prepared(name, here)
            given = [__file__, "--rank", name, str(here), str(RANKS)]
            run_on(pair, here, [[*given, str(rank)] for rank in range(RANKS)])
            for figure in _judged(contest, here, f"{name}, {link}"):
                print(json.dumps(figure), file=sys.stderr, flush=True)
                yield figure


# --- the candidates -------------------------------------------------------------------------------


def _look(name: str) -> Any:
    return capture_and_price(MODELS[name], OPTIMIZER, ranks=RANKS, title=name)


def _prepared(name: str, folder: Path) -> Contest:
    """Write the plans for the ranks to read, and return the contest."""
    from steelyard.api.planned import planned
    from steelyard.plan_files.plan_file import write_decisions
    from steelyard.planner.planner import Planner
    from steelyard.plans.budget import Budget
    from steelyard.plans.plan import Decisions
    from steelyard.predict import rank_peak_bytes, step_seconds

    session = _look(name)
    layouts = session.layouts
    fastest = [min(layouts.candidates.of(x), key=lambda way: way.seconds) for x in layouts.layouts]
    tight = round(TIGHT_SHARE * min(way.nbytes for way in fastest))
    limits = {"any memory": None, f"{tight / 2**20:.1f} MiB": tight}
    chosen = {
        budget: planned(Planner(session), Budget(memory_bytes=limit)).plan.decisions.rules
        for budget, limit in limits.items()
    }
    plans = {_key(session, rules): rules for rules in chosen.values()}
    for group in _space(session):
        if len(plans) < FEWEST_PLANS:
            plans = {_key(session, rules): rules for rules in group} | plans
    places = {key: number for number, key in enumerate(plans)}
    programs = [session.apply_rules(rules) for rules in plans.values()]
    peaks = [rank_peak_bytes(program, session.prices.costs) for program in programs]
    for number, rules in enumerate(plans.values()):
        made = Decisions(target=session.target(), budget=Budget(), rules=rules)
        write_decisions(folder / f"{number}.plan.toml", made)
    contest = Contest(
        predicted=tuple(step_seconds(each, session.prices.costs).value for each in programs),
        fitting={
            budget: [n for n, own in enumerate(peaks) if limit is None or max(own) <= limit]
            for budget, limit in limits.items()
        },
        chosen={budget: places[_key(session, rules)] for budget, rules in chosen.items()},
    )
    kept = {"fitting": contest.fitting, "chosen": contest.chosen, "peaks": peaks}
    (folder / "contest.json").write_text(json.dumps(kept))
    return contest


def _space(session: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Yield groups of the rules of all plans that the search could find, some more than once.

    The groups with micro-batches and with more memory limits come last.
    """
    from steelyard.errors import Infeasible
    from steelyard.plans.budget import Budget
    from steelyard.trades.accumulate import AccumulateRule

    layouts = session.layouts
    by_layout = [layouts.candidates.of(layout) for layout in layouts.layouts]
    fastest = [min(ways, key=lambda way: (way.seconds, way.nbytes)) for ways in by_layout]

    def leaner(shares: Sequence[float]) -> Iterator[tuple[Any, ...]]:
        for way, share in product(fastest, shares):
            with contextlib.suppress(Infeasible):  # no plan fits this limit
                limit = Budget(memory_bytes=round(share * way.nbytes))
                yield layouts.search_by(way.rules).find(limit).rules

    found = [way.rules for ways in by_layout for way in ways]
    found += leaner(SHARES_OF_MEMORY)
    for pipelines in layouts.pipelines.values():
        found += (way.rules for way in pipelines.candidates)
        pipelines.explore_all()
        found += (point.rules for point in pipelines.frontier())
    yield found
    for degree in MICRO_BATCHES if session.source.why_not_split() is None else ():
        cut = AccumulateRule(micro_batches=degree)
        yield [(*way.rules, cut) for ways in by_layout for way in ways]
    yield [*leaner(FINER_SHARES)]


def _key(session: Any, rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a key that equal programs share, however their rules are written."""
    program = session.apply_rules(rules)
    staged: tuple[Any, ...] = ()
    if program.pipeline is not None:
        stages = program.pipeline.stages.stages
        staged = program.pipeline.order, tuple(stage.held for stage in stages)
    key = program.graph.fingerprint, program.instructions, program.exchanges, program.repeats
    return *key, *staged


# --- one rank -------------------------------------------------------------------------------------


def work(name: str, folder: Path, rank: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    contest = json.loads((folder / "contest.json").read_text())
    session, count = _look(name), len([*folder.glob("*.plan.toml")])
    source = session.source.whole()
    steps = [_applied(session, source, folder / f"{number}.plan.toml") for number in range(count)]
    batch = session.request.batch
    # A plan for one rank is metered on each rank.
    own = [predicted[rank % len(predicted)] for predicted in contest["peaks"]]
    peaks = [(_peak(step, batch), predicted) for step, predicted in zip(steps, own, strict=True)]
    seconds = _contested(steps, batch, rank, contest)
    said = {"peaks": peaks, "seconds": seconds, "plans": [_words(step) for step in steps]}
    (folder / f"found-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def _applied(session: Any, source: Any, path: Path) -> Step:
    """Apply a plan like ``steelyard.load(path, ...).apply()``, but with one capture for all plans.

    The plans share one model, except those that take it apart. The metrics of the plan are
    placeholders, because the predictions are in the contest.
    """
    from steelyard.api.step import Step
    from steelyard.ir.parallel_layout import ParallelLayout
    from steelyard.plan_files.plan_file import read_decisions
    from steelyard.plans.plan import Plan

    decisions = read_decisions(path)
    plan = Plan(
        title=path.name,
        decisions=decisions,
        before=session.unplanned,
        unplanned=session.unplanned,
        predicted=session.unplanned,
    )
    is_apart = any(rule.trade in TAKE_APART for rule in decisions.rules)
    return Step(
        plan=plan,
        source=copy.deepcopy(source) if is_apart else source,
        pricing=session.pricing,
        optimizer=OPTIMIZER,
        update=session.base.update,
        # A plan for one rank runs on each rank by itself, and the ranks need not train alike.
        sums_gradients=ParallelLayout.of(decisions.rules).num_ranks == 1,
    )


def _peak(step: Step, batch: Any) -> int:
    """Return the peak memory of a step on this rank, the least of a few steps.

    On a busy machine, gloo's threads may free late the memory of a finished exchange, which is not
    part of the plan.
    """
    step.live(batch)
    metered = []
    for _ in range(METERED):
        dist.barrier()
        step.live.zero_grad()
        metered.append(int(step.memory_meter.peak_bytes(lambda: step.live(batch))))
    return min(metered)


def _contested(
    steps: Sequence[Any],
    batch: Any,
    rank: int,
    contest: dict[str, Any],
    rounds: Rounds = ROUNDS,
) -> list[list[float]]:
    """Return the step times of each plan, one for each turn that it took part in."""
    seconds: list[list[float]] = [[] for _ in steps]
    left = [*range(len(steps))]
    for turns, share in rounds:
        for turn in range(turns):
            for place in range(len(left)):
                number = left[(place + turn) % len(left)]
                seconds[number].append(_slowest(steps[number], batch, rank))
        kept = set(contest["chosen"].values())
        for fitting in contest["fitting"].values():
            running = sorted(set(left) & set(fitting), key=lambda n: median(seconds[n]))
            kept |= set(running[: ceil(share * len(running))])
        left = sorted(kept)
    return seconds


def _slowest(step: Any, batch: Any, rank: int) -> float:
    """Return the seconds of a step on the slowest rank; a plan for one rank runs on rank 0 only.

    In training, steps follow each other. So one step runs before the timed ones, and the
    connections, caches and memory are in the state that the plan itself leaves.
    """
    is_at_work = rank == 0 or step.ranks.layout.num_ranks > 1
    if is_at_work:
        step.live(batch)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS_IN_A_ROW if is_at_work else 0):
        step.live(batch)
    took = torch.tensor((time.perf_counter() - begin) / STEPS_IN_A_ROW, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _words(step: Any) -> str:
    """Return a short description of a plan: each trade with its choice, or their number."""
    found: dict[str, list[str]] = {}
    for rule in step.plan.decisions.rules:
        found.setdefault(rule.trade, []).append(rule.describe())
    return (
        "; ".join(f"{t} ({w[0] if len(w) == 1 else len(w)})" for t, w in found.items())
        or "as it is"
    )


# --- the figures ----------------------------------------------------------------------------------


def _judged(contest: Contest, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    ranks = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]
    seconds, plans = ranks[0]["seconds"], ranks[0]["plans"]
    off_by = [[abs(m / p - 1) for m, p in rank["peaks"]] for rank in ranks]
    errors = [max(each) for each in off_by]
    worst = [each.index(error) for each, error in zip(off_by, errors, strict=True)]
    took = [median(each) for each in seconds]
    off = median(t / p for t, p in zip(took, contest.predicted, strict=True))
    turns = ROUNDS[-1][0]
    last = {n: each[-turns:] for n, each in enumerate(seconds) if len(each) == _all_turns()}
    for budget, chosen in contest.chosen.items():
        best = min((n for n in contest.fitting[budget] if n in last), key=lambda n: median(last[n]))
        ratios = [a / b for a, b in zip(last[chosen], last[best], strict=True)]
        low, value, high = (x - 1 for x in interval(ratios))
        # With 0 in the interval, the plan cannot be told apart from the best one.
        is_best = value <= REGRET_TARGET or low <= 0
        is_cheap = len(plans) >= FEWEST_PLANS and RUNS_SHARE * len(plans) >= 1
        yield {
            "name": f"{name}, {budget}",
            "value": round(value, 3),
            "interval": [round(low, 3), round(high, 3)],
            "target": REGRET_TARGET,
            "ok": is_best and is_cheap,
            "runs": [1, len(plans)],
            "chosen": [plans[chosen], round(median(last[chosen]), 4)],
            "best": [plans[best], round(median(last[best]), 4)],
            "predicted": [round(contest.predicted[n], 4) for n in (chosen, best)],
            "rank_correlation": round(_correlation(contest.predicted, took), 3),
            "measured_over_predicted": round(off, 3),
        }
    yield {
        "name": f"{name}, predicted peak of each plan on each rank",
        "value": round(max(errors), 4),
        "interval": None,
        "target": PEAK_TARGET,
        "ok": max(errors) <= PEAK_TARGET,
        "ranks": [round(error, 4) for error in errors],
        "worst": [plans[number] for number in worst],
        "measured_and_predicted": [
            rank["peaks"][number] for rank, number in zip(ranks, worst, strict=True)
        ],
    }


def _all_turns(rounds: Rounds = ROUNDS) -> int:
    return sum(turns for turns, _ in rounds)


def _correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    orders = [torch.tensor(x).argsort().argsort().double() for x in (left, right)]
    return float(torch.corrcoef(torch.stack(orders))[0, 1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[5]))
    else:
        main()
