"""Compares our Inductor runner with torch.compile: forward and backward of a GPT, in CPU time.

The peer runs twice: with its own random numbers, and with eager's (fallback_random), which our
runner uses. Both sides run in turns in one process on one thread. The figure is the median of the
paired ratios to the faster peer, with its 95 % interval. With cold caches, compiling takes
minutes.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.runner import SETTINGS, Setting, paired
from steelyard.capture.tracing.decompositions import table
from steelyard.capture.tracing.joint_graph import trace
from steelyard.capture.tracing.to_ir import to_graph
from steelyard.ir.program import Program
from steelyard.run.compiled.inductor import compile_program
from steelyard.run.step import LiveStep
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

PAIRS = 40
TARGET = 1.0
PEERS = {"torch.compile": {}, "torch.compile, eager's random numbers": {"fallback_random": True}}


def main() -> None:
    torch.set_num_threads(1)
    figures = [figure for setting in SETTINGS for figure in measure(setting)]
    worst = max(figures, key=lambda f: f["interval"][1])
    print(
        json.dumps(
            {
                "name": "Inductor runner / torch.compile, CPU time",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": TARGET,
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )


def measure(setting: Setting) -> list[dict]:
    torch.manual_seed(0)
    model = GPT(
        layers=setting.layers,
        width=setting.width,
        heads=setting.heads,
        vocabulary=setting.vocabulary,
        length=setting.length,
    )
    batch = tokens(setting.batch, setting.length, setting.vocabulary)
    plain = copy.deepcopy(model)
    start = time.perf_counter()
    step = live(model, batch)
    seconds = {"ours": time.perf_counter() - start}

    def ours() -> None:
        model.zero_grad(set_to_none=True)
        step.backward(batch)

    same(model, plain, ours, batch)
    figures = []
    for name, options in PEERS.items():
        peer, compiled = copy.deepcopy(plain), torch.compile(next_token_loss, options=options)

        def theirs(peer: torch.nn.Module = peer, compiled: Callable = compiled) -> None:
            peer.zero_grad(set_to_none=True)
            compiled(peer, batch).backward()

        start = time.perf_counter()
        theirs()
        seconds[name] = time.perf_counter() - start
        low, value, high = paired(ours, theirs, PAIRS)
        print(f"{setting.name} / {name}: {value:.3f} [{low:.3f}, {high:.3f}]", flush=True)
        figures.append(
            {
                "name": f"{setting.name} / {name}",
                "value": round(value, 4),
                "interval": [round(low, 4), round(high, 4)],
                "target": TARGET,
                "ok": value <= TARGET,
            }
        )
    compile_times = ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items())
    print(f"{setting.name}: first call after {compile_times}", flush=True)
    return figures


def live(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> LiveStep:
    traced = trace(model, next_token_loss, batch, decompositions=table("inductor-1"))
    program = Program.plain(to_graph(traced, decomposition="inductor-1"))
    return LiveStep(model, program, constants=traced.constants, batch=batch, runner=compile_program)


def same(
    model: torch.nn.Module,
    plain: torch.nn.Module,
    ours: Callable[[], None],
    batch: dict[str, torch.Tensor],
) -> None:
    """Assert that both sides compute the same gradients."""
    torch.manual_seed(1)
    ours()
    torch.manual_seed(1)
    next_token_loss(plain, batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-3, atol=1e-6, msg=name)
    plain.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
