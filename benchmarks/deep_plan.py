"""Measures planning for a cluster that is not here: Llama 70B on 1,024 H100, 405B on 16,384.

Each plan is made in a process of its own. The figures are the CPU seconds from the model to the
plan (with capture, without imports), the largest memory of the process (with imports), and the gap
that the plan prints.

    python benchmarks/deep_plan.py

Not for the accuracy of the plan: see published/.
"""

import json
import re
import resource
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from typing import Any

_MODELS = {
    # Touvron et al., 2023 (arXiv 2307.09288): Llama 2 70B, 4 M tokens a step; Dubey et al., 2024
    # (arXiv 2407.21783), tables 3 and 4: Llama 3 405B, 16 M tokens a step of 8,192 each. Sizes of
    # the model, length of a sample, samples of a step, devices.
    "70B": (
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "vocab_size": 32000,
        },
        4096,
        1024,
        1024,
    ),
    "405B": (
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "vocab_size": 128256,
        },
        8192,
        2048,
        16384,
    ),
}
_GOALS = {"70B": (10.0, 1.0), "405B": (20.0, 1.0)}


def planned(name: str) -> dict[str, Any]:
    import torch
    import transformers

    import steelyard as sy
    from steelyard import api
    from steelyard.hardware.cluster_file import decode_tree

    for imported_when_first_used in (
        "torch._dynamo", "torch._inductor.decomposition", "steelyard.planner.declared_cluster",
    ):  # fmt: skip
        import_module(imported_when_first_used)

    sizes, length, samples, devices = _MODELS[name]
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=8, max_position_embeddings=length, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch).logits[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    cluster = sy.Cluster(
        tree=decode_tree(f"[scope.cluster]\nmembers = {{ dgx-h100 = {devices // 8} }}\n")
    )
    batch = torch.zeros(samples, length, dtype=torch.long)
    started = time.process_time()
    plan = api.plan(
        model,
        loss,
        batch,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        cluster=cluster,
        title=f"Llama {name}",
    )
    taken = time.process_time() - started
    print(plan, file=sys.stderr)
    (bound,) = (note for note in plan.plan.notes if note.startswith("none of"))
    faster = re.search(r"more than ([0-9.]+) % faster", bound)
    return {
        "cpu": taken,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "gap": float(faster[1]) / 100 if faster else 0.0,
    }


def main() -> None:
    figures = []
    for name, (seconds, gib) in _GOALS.items():
        run = subprocess.run(
            [sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(run.stdout)
        devices = _MODELS[name][3]
        where = f"Llama {name} on {devices:,} H100"
        figures += [
            _figure(f"{where}: CPU-s", found["cpu"], seconds),
            _figure(f"{where}: GiB held", found["gib"], gib),
            _figure(f"{where}: printed gap", found["gap"], 0.02),
        ]
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))


def _figure(name: str, value: float, target: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "target": target, "ok": value <= target}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(planned(sys.argv[1])))
    else:
        main()
