"""Measures the cost of capturing a Llama of 70 billion parameters and 80 layers for planning.

The capture runs in a process of its own. The figures are CPU seconds, and the growth of the
resident set, between the last import and the captured graph. A model of one layer is captured
first, because Dynamo and AOT Autograd import most of themselves at their first call. FLOPs are
compared with the published ones of AlexNet and ResNet-152.

    python benchmarks/capture.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 3
SECONDS, GIGABYTES = 5.0, 1.0
# A forward pass of one picture, a multiply-add counted as two operations: AlexNet in the form of
# Krizhevsky 2014; ResNet-152 has 11.3 G multiply-adds in He et al. 2015.
PUBLISHED = {"alexnet": 1.4e9, "resnet152": 22.6e9}
AGREES = 0.05
LAYERS, LENGTH = 80, 4096


def main() -> int:
    if "--child" in sys.argv:
        print("CHILD " + json.dumps(captured()))
        return 0
    rounds = [_child() for _ in range(ROUNDS)]
    seconds = sorted(r["cpu_seconds"] for r in rounds)
    nbytes = sorted(r["grown_bytes"] / 1e9 for r in rounds)
    figures = [
        _figure("70B Llama, CPU seconds", median(seconds), seconds, SECONDS),
        _figure("70B Llama, GB of resident set", median(nbytes), nbytes, GIGABYTES),
    ]
    for name, published in PUBLISHED.items():
        share = abs(forward_flops(name) / published - 1)
        figures.append(_figure(f"{name}, FLOPs off the published", share, [share], AGREES))
    print(f"{rounds[0]['nodes']} nodes, {rounds[0]['flops'] / 1e12:.0f} TFLOP a step")
    print(
        json.dumps(
            {
                **figures[0],
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )
    return 0


def _figure(name: str, value: float, all_of: list[float], target: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 4),
        "interval": [round(all_of[0], 4), round(all_of[-1], 4)],
        "target": target,
        "ok": all_of[-1] <= target,
    }


def _child() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child"], capture_output=True, text=True, check=True
    )
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("CHILD ")]
    found: dict[str, Any] = json.loads(line.removeprefix("CHILD "))
    return found


def captured() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from steelyard.capture.step import CapturedStep

    torch.set_num_threads(1)
    linear = torch.nn.Linear(4, 4)
    CapturedStep(model=linear, loss=lambda m, x: m(x).sum(), batch=torch.randn(2, 4)).captured()
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=LAYERS,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    source = CapturedStep(
        model=model,
        loss=lambda model, batch: model(**batch, use_cache=False).loss,
        batch=batch,
        for_planning=True,
    )
    graph = source.graph(micro_batches=1)
    seconds = time.process_time() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert {(run.prefix, run.count) for run in graph.runs} >= {("model.layers", LAYERS)}
    return {
        "cpu_seconds": seconds,
        "grown_bytes": (after - before) * 1024,
        "nodes": len(graph.nodes),
        "flops": graph.flops,
    }


def forward_flops(name: str) -> float:
    """Return the FLOPs of the forward pass of one picture, as the captured graph counts them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from steelyard.capture.step import CapturedStep
    from tests.zoo import case

    model, loss, batch = case(name).make(0, "small")
    graph = CapturedStep(model=model, loss=loss, batch=batch).graph(micro_batches=1)
    pictures = next(iter(batch.values())).shape[0] if isinstance(batch, dict) else len(batch)
    return sum(n.flops for n in graph.nodes if n.phase == "forward") / pictures


if __name__ == "__main__":
    sys.exit(main())
