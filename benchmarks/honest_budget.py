"""Checks that plans keep absolute memory budgets, by metered peaks on many models.

For each model the budgets go from slightly below the least it can run in to slightly below what it
takes unplanned, and include the least peaks of torch.utils.checkpoint around every block and of
torch's activation_memory_budget. Each plan runs three steps. Its peak is what the allocator holds
at the highest point of the second step, with weights, batch and optimizer state. Each model has a
process of its own. Not for the time of steps: see truth.py.

    python benchmarks/honest_budget.py [gpt unet hf_t5]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from functorch.compile import config
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import steelyard as sy
from benchmarks.frontier import blocks, checkpointing, error, partitioning
from steelyard.measure.operators.memory import meter
from tests import zoo
from tests.zoo.case import Sample, class_loss, images, next_token_loss, square_loss, tokens
from tests.zoo.own import GPT

MODELS = (
    *("gpt", "words", "mlp", "resnet_bn", "unet", "moe"),
    *("hf_bert", "hf_t5", "hf_llama"),
)
# Budgets as shares of the range from the least memory of any plan to the unplanned peak, and a
# share of the least memory, which must be refused.
PLACES = (0.0, 0.1, 0.25, 0.45, 0.7, 0.95)
TOO_LITTLE = 0.98
# Values of activation_memory_budget. The first saves no memory; its gradients are the reference.
RATIOS = (1.0, 0.5, 0.3)
FEWEST_CASES, FEWEST_RUN, LEAST_USED = 40, 0.9, 0.9
# A larger error of gradients means that other random numbers were drawn.
_ROUNDING = 1e-3
_SEED = 11
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--child", default="")
    arguments = parser.parse_args()
    if arguments.child:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        for row in one_model(arguments.child):
            print("CASE " + json.dumps(row), flush=True)
        return
    by_model = {name: in_its_own_process(name) for name in arguments.models}
    figures = verdicts(by_model)
    print(json.dumps({**figures[0], "ok": all(f["ok"] for f in figures), "figures": figures}))


def in_its_own_process(name: str) -> list[Row]:
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(x[5:]) for x in done.stdout.splitlines() if x.startswith("CASE ")]
    if done.returncode != 0:
        # A crash counts as a case that was neither run nor refused.
        rows.append({"budget": 0, "peers": ["all"], "failed": done.stderr.strip()[-1500:]})
    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    for row in rows:
        print(f"  {json.dumps(row)}", flush=True)
    return rows


def one_model(name: str) -> Iterator[Row]:
    peers = dict(peers_of(name))
    model, loss, batch = made(name)
    session = sy.plan(model, loss, batch, optimizer=OPTIMIZER)
    least, top = least_of(session), session.plan.unplanned.peak.nbytes
    budgets = {int(least + place * (top - least)) for place in PLACES} | {int(TOO_LITTLE * least)}
    budgets.add(min(peak for peak, _ in peers.values()))
    budgets.add(min(peak for peak, off in peers.values() if off <= _ROUNDING))
    for budget in sorted(budgets):
        fitting = [who for who, (peak, _) in peers.items() if peak <= budget]
        row: Row = {
            "budget": budget,
            "place": round((budget - least) / (top - least), 3),
            "peers": fitting,
            # Some peers save memory by drawing other masks in the backward pass, which is wrong.
            "exact_peers": [who for who in fitting if peers[who][1] <= _ROUNDING],
        }
        try:
            planned = session.what_if(memory=budget)
        except sy.SteelyardError as refusal:
            yield {**row, "refused": str(refusal), "least": getattr(refusal, "least_bytes", None)}
            continue
        tenth_less = seconds_within(session, int(LEAST_USED * budget))
        yield {**row, **taken_steps(planned, batch), "seconds_with_a_tenth_less": tenth_less}


def seconds_within(session: sy.Planned, budget: int) -> float | None:
    """Return the predicted seconds of the plan for a budget; None where no plan fits."""
    try:
        return float(session.what_if(memory=budget).predicted.step_seconds.value)
    except sy.SteelyardError:
        return None


def least_of(session: sy.Planned) -> int:
    """Return the least memory of all plans that were found."""
    return session.plan.least_bytes


def taken_steps(planned: sy.Planned, batch: Any) -> Row:
    step = planned.apply()
    losses = [float(step(batch)) for _ in range(3)]
    assert all(x == x for x in losses), losses
    plan = planned.plan
    return {
        "used": step.receipt().measured.memory_bytes,
        "predicted": plan.predicted.peak.nbytes,
        "seconds": plan.predicted.metrics.step_seconds.value,
        "taken": sorted({f"{r.trade} {r.describe()}".strip() for r in plan.decisions.rules}),
        "gap": next((n for n in plan.notes if n.startswith("within")), ""),
    }


# --- peers ----------------------------------------------------------------------------------------


def peers_of(name: str) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield each peer with the peak of a whole step and the error of its gradients.

    The error is relative to the peer's own gradients without saving memory.
    """
    model, loss, batch = made(name)
    peak, exact = peer(model, partial(loss, model, batch), batch)
    yield "eager", (peak, 0.0)
    model, loss, batch = made(name)
    if found := blocks(model):
        for block in found:
            block.forward = checkpointing(block.forward)  # type: ignore[method-assign]
        peak, gradients = peer(model, partial(loss, model, batch), batch)
        yield "checkpoint", (peak, error(gradients, exact))
    exact = {}
    for ratio in RATIOS:
        model, loss, batch = made(name)
        torch.compiler.reset()
        with config.patch(activation_memory_budget=ratio):
            forward = torch.compile(partial(loss, model, batch), backend=partitioning({}, []))
            try:
                peak, gradients = peer(model, forward, batch)
            except RuntimeError as failure:
                print(f"min-cut {ratio}: the peer fails: {str(failure).splitlines()[0]}")
                continue
        exact = exact or gradients
        yield f"min-cut {ratio}", (peak, error(gradients, exact))


def peer(
    model: nn.Module, forward: Callable[[], Tensor], batch: dict[str, Tensor]
) -> tuple[int, dict[str, Tensor | None]]:
    optimizer = OPTIMIZER(model.parameters())
    torch.manual_seed(_SEED)
    forward().backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    optimizer.zero_grad()

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    metered = meter(step)
    assert metered.is_clean, metered
    state = [v for s in optimizer.state.values() for v in s.values()]
    held = [*model.parameters(), *model.buffers(), *batch.values(), *state]
    resident = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    return resident + metered.peak_bytes, gradients


# --- the figures ----------------------------------------------------------------------------------


def verdicts(by_model: dict[str, list[Row]]) -> list[Row]:
    rows = [row for found in by_model.values() for row in found]
    run = [row for row in rows if "used" in row]
    refused = [row for row in rows if "refused" in row]
    for_a_peer = [row for row in rows if row["peers"]]
    binding = [row for found in by_model.values() for row in binding_of(found)]
    needed = [row for row in binding if row["seconds_with_a_tenth_less"] != row["seconds"]]
    unnamed = [row for row in refused if not row["least"] or row["least"] <= row["budget"]]
    share = sum("used" in row for row in for_a_peer) / max(1, len(for_a_peer))
    over = sum(row["used"] > row["budget"] for row in run)
    falls = sum(fall for found in by_model.values() for fall in falls_of(found))
    missed = sum(is_missed for found in by_model.values() for is_missed in missed_of(found))
    failed = sum("failed" in row for row in rows)
    return [
        figure(f"peaks over their budget, of {len(run)}", over, 0),
        figure("cases that were run", len(run), FEWEST_CASES, at_least=True),
        figure("models that failed", failed, 0),
        figure(f"share run, of {len(for_a_peer)} a peer fits", share, FEWEST_RUN, at_least=True),
        figure(f"refusals without a least above the budget, of {len(refused)}", len(unnamed), 0),
        used_of("a tenth less would be slower", needed),
        used_of("the next larger is faster", binding),
        figure("budgets at which more memory is slower, or holds less", falls, 0),
        figure("budgets within which a larger one's plan fits and is faster", missed, 0),
    ]


def used_of(where: str, rows: list[Row]) -> Row:
    shares = sorted(row["used"] / row["budget"] for row in rows)
    name = f"least used of a budget, of {len(rows)} where {where}"
    interval = [shares[0], shares[-1]]
    return {**figure(name, shares[0], LEAST_USED, at_least=True), "interval": interval}


def binding_of(found: list[Row]) -> list[Row]:
    """Return the budgets of one model whose plans are slower than that of the next larger one."""
    ran = [row for row in found if "used" in row]
    return [row for row, larger in pairwise(ran) if row["seconds"] > larger["seconds"]]


def falls_of(found: list[Row]) -> Iterator[bool]:
    """Yield True where the peak falls or the time rises with the next larger budget of a model."""
    ran = [row for row in found if "used" in row]
    for row, larger in pairwise(ran):
        yield (
            row["seconds"] < larger["seconds"]
            or row["predicted"] > larger["predicted"]
            or row["used"] > larger["used"]
        )


def missed_of(found: list[Row]) -> Iterator[bool]:
    """Yield True for each budget of a model into which a faster plan of another budget fits."""
    ran = [row for row in found if "used" in row]
    for row in ran:
        yield any(
            other["predicted"] <= row["budget"] and other["seconds"] < row["seconds"]
            for other in ran
        )


def figure(name: str, value: float, target: float, *, at_least: bool = False) -> Row:
    ok = value >= target if at_least else value <= target
    return {"name": name, "value": value, "interval": None, "target": target, "ok": ok}


# --- the own models -------------------------------------------------------------------------------


class UNet(nn.Module):
    """A U-Net of three scales with skip connections: the first values are read last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = [width << scale for scale in range(3)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in pairwise([3, *wide]))
        self.up = nn.ModuleList(_twice(a + b, a) for a, b in reversed([*pairwise(wide)]))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.down:
            x = down(nn.functional.avg_pool2d(x, 2) if skips else x)
            skips.append(x)
        for up, skip in zip(self.up, reversed(skips[:-1])):
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        image: Tensor = self.out(x)
        return image


def _twice(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()),
        *(nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()),
    )


def _mlp() -> Sample:
    """Return an MLP with more activations than weights; the zoo's has as many of each."""
    parts = (m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)))
    batch = {"x": torch.randn(2048, 256), "y": torch.randint(0, 10, (2048,))}
    return nn.Sequential(*parts, nn.Linear(256, 10)), class_loss, batch


def _words() -> Sample:
    """Return a GPT whose memory is mostly the scores over its vocabulary."""
    model = GPT(layers=2, width=128, heads=4, vocabulary=8192, length=128)
    return model, next_token_loss, tokens(4, 128, 8192)


_OWN: dict[str, Callable[[], Sample]] = {
    "mlp": _mlp,
    "unet": lambda: (UNet(16), square_loss, images(8, 64, 10)),
    "words": _words,
}


def made(name: str) -> Sample:
    torch.manual_seed(0)
    if name in _OWN:
        model, loss, batch = _OWN[name]()
        return model.train(), loss, batch
    model, loss, batch = zoo.case(name).make(scale="small")
    # Half of the batch is enough for metering, and takes half of the time.
    return model, loss, {key: tensor.chunk(2)[0].clone() for key, tensor in batch.items()}


if __name__ == "__main__":
    main()
