"""Compares predicted peaks and step times with measured ones, on models that we did not write.

For each model there are three budgets between the least it can run in and what it takes unplanned.
Each plan is applied and run. Memory: the predicted peak against the allocator's, metered from a
clean level. Time: the predicted against the measured ratio of the plan to the unplanned graph, in
CPU seconds of interleaved pairs. Each model has a process of its own.

    python benchmarks/truth.py [--runner inductor] [--models gpt,hf_t5] [--pairs 12] [--threads 2]

With several threads wall time is measured, and other load on the machine counts.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

MODELS = (
    *("gpt", "gpt_sdpa", "resnet_bn", "moe", "hf_gpt2", "hf_llama"),
    *("hf_bert", "hf_t5", "hf_vit", "hf_resnet"),
)
PLACES = (0.15, 0.45, 0.75)


def main() -> int:
    arguments = _arguments()
    if arguments.child:
        for line in _one_model(
            arguments.child, arguments.runner, arguments.pairs, arguments.threads
        ):
            print("CASE " + json.dumps(line), flush=True)
        return 0
    cases: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        command = [sys.executable, __file__, "--child", name, "--runner", arguments.runner]
        command += ["--pairs", str(arguments.pairs), "--threads", str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [json.loads(x[5:]) for x in done.stdout.splitlines() if x.startswith("CASE ")]
        cases += found
        for case in found:
            print(json.dumps(case))
        if done.returncode != 0:
            cases.append({"model": name, "error": done.stderr.strip().splitlines()[-1:]})
            print(f"{name} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
    figures = _verdicts(cases, arguments.runner)
    ok = all(figure["ok"] for figure in figures)
    print(json.dumps({**figures[1], "ok": ok, "figures": figures, "cases": len(cases)}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--runner", default="python", choices=("python", "inductor"))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", default="")
    return parser.parse_args()


def _one_model(name: str, runner: Any, pairs: int, threads: int) -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    warnings.simplefilter("ignore")
    import torch

    import steelyard as sy
    from tests.zoo import case

    torch.set_num_threads(threads)
    model, loss, batch = case(name).make(0, "small")
    make = partial(torch.optim.AdamW, lr=1e-4)
    now = time.process_time if threads == 1 else time.perf_counter
    session = sy.plan(model, loss, batch, optimizer=make, runner=runner)
    plain = session.apply()
    low, high = session.plan.least_bytes, session.plan.unplanned.peak.nbytes
    for place in PLACES:
        budget = int(low + place * (high - low))
        begin = time.perf_counter()
        try:
            planned = session.what_if(memory=budget)
        except sy.SteelyardError as refusal:
            yield {"model": name, "budget": budget, "refused": str(refusal)}
            continue
        seconds = time.perf_counter() - begin
        step = planned.apply()
        for _ in range(3):
            step(batch)
        measured = step.receipt().measured.memory_bytes
        assert measured is not None
        predicted = planned.plan.predicted
        ratio = planned.plan.slowdown
        assert ratio is not None
        found = _paired(plain, step, batch, pairs, now)
        yield {
            "model": name,
            "budget": budget,
            "predicted_bytes": predicted.peak.nbytes,
            "measured_bytes": measured,
            "memory_miss": predicted.peak.nbytes / measured - 1,
            "exceeds": measured > budget,
            "trades": sorted({t.trade for t in planned.plan.taken}),
            "predicted_ratio": ratio.value,
            "ratio_interval": [ratio.low, ratio.high],
            "measured_ratio": found[0],
            "measured_interval": found[1:],
            "ratio_miss": ratio.value / found[0] - 1,
            "plan_seconds": seconds,
        }


def _paired(
    plain: Any, step: Any, batch: Any, pairs: int, now: Callable[[], float]
) -> tuple[float, float, float]:
    def seconds(live: Any) -> float:
        begin = now()
        live.backward(batch)
        live.zero_grad()
        return now() - begin

    ratios = []
    for _ in range(pairs):
        before = seconds(plain.live)
        ratios.append(seconds(step.live) / before)
    ratios.sort()
    return median(ratios), ratios[pairs // 10], ratios[-1 - pairs // 10]


def _verdicts(cases: list[dict[str, Any]], runner: str) -> list[dict[str, Any]]:
    good = [c for c in cases if "measured_bytes" in c]
    refused = sum("refused" in c for c in cases)
    misses = sorted(abs(c["memory_miss"]) for c in good)
    worst_target = 0.03 if runner == "python" else 0.05
    times = sorted(abs(c["ratio_miss"]) for c in good)
    inside = [c["ratio_interval"][0] <= c["measured_ratio"] <= c["ratio_interval"][1] for c in good]
    exceeding = sum(c["exceeds"] for c in good)
    failed = len(cases) - len(good) - refused
    figures = [
        _figure(f"memory miss, median of {len(good)}, {runner}", misses, median(misses), 0.01),
        _figure(f"memory miss, worst of {len(good)}, {runner}", misses, misses[-1], worst_target),
        _figure(f"plans over their budget, {runner}", None, exceeding, 0),
        _figure(f"plans that failed, {runner}", None, failed, 0),
        _figure(f"budgets refused, {runner}", None, refused / len(cases), 0.1),
    ]
    if runner == "python":
        outside = 1 - sum(inside) / len(inside)
        figures += [
            _figure(f"time ratio miss, median of {len(good)}", times, median(times), 0.05),
            _figure(f"time ratio outside its interval, of {len(good)}", None, outside, 0.1),
        ]
    return figures


def _figure(name: str, all_of: list[float] | None, value: float, target: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "interval": all_of and [all_of[0], all_of[-1]],
        "target": target,
        "ok": value <= target,
    }


if __name__ == "__main__":
    sys.exit(main())
