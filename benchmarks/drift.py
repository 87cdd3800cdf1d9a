"""Measures the effect of compressed gradients on the loss on held-out text.

    python benchmarks/drift.py [sgd] [adamw]

Two ranks of gloo on this machine train a small transformer on the bytes of the standard library's
Python modules. For each of five seeds they train once with exact gradients and once with each
codec, by a plan file; weights, batches and steps are the same. The figure is the relative increase
of the mean loss over 4,096 held-out pieces of 64 bytes, paired by seed: the mean of five, and the
extremes. The target applies to the codecs that a plan would use where 2 % may be lost, that is,
whose probe drifts by no more; the others are printed only. A run that diverges misses the target.
Needs a C++ compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._looked import capture_and_price
from steelyard.ir.rule import Rule
from steelyard.plans.accuracy import Drift
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from tests.zoo.case import next_token_loss
from tests.zoo.own import GPT

RANKS, SEEDS, STEPS, TARGET = 2, range(5), 300, 0.02
BATCH, LENGTH, HELD_OUT = 32, 64, 4096
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
BUCKET = 1 << 20


def main() -> None:
    torch.set_num_threads(1)
    optimizers = [name for name in OPTIMIZERS if name in sys.argv[1:]] or list(OPTIMIZERS)
    figures = [figure for optimizer in optimizers for figure in measured(optimizer)]
    judged = [figure for figure in figures if figure["target"] is not None]
    # A figure with runs that diverge is the worst.
    worst = max(judged, key=lambda figure: (figure["diverged"], abs(figure["value"] or 0)))
    print(
        json.dumps(
            {
                "name": f"drift: the largest of the held-out loss, {worst['name']}",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": TARGET,
                "ok": all(figure["ok"] for figure in figures),
                "figures": figures,
            }
        )
    )


def measured(optimizer: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="steelyard-drift-") as name:
        folder = Path(name)
        probes = _prepared(optimizer, folder)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--rank", optimizer, name]
        ranks = [subprocess.Popen([*command, str(rank)], env=environ) for rank in range(RANKS)]
        codes_left = [rank.wait() for rank in ranks]
        if any(codes_left):
            raise SystemExit(f"{optimizer}: a rank failed")
        losses = json.loads((folder / "losses.json").read_text())
    plain = losses["0"]
    figures = []
    for number, (code, probe) in enumerate(probes.items(), start=1):
        found = _drift(losses[str(number)], plain, is_judged=probe <= TARGET)
        figures.append({"name": f"{code}, {optimizer}", **found, "probe": round(probe, 4)})
        print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
    return figures


def _drift(coded: list[float], plain: list[float], *, is_judged: bool) -> dict[str, Any]:
    """Compare the held-out losses of the runs that do not diverge.

    The target is met only if no run diverges.
    """
    assert all(map(isfinite, plain)), f"training without compression diverges: {plain}"
    pairs = [(own, other) for own, other in zip(coded, plain, strict=True) if isfinite(own)]
    drifts = [own / other - 1 for own, other in pairs]
    diverged = len(plain) - len(pairs)
    return {
        "value": round(mean(drifts), 4) if pairs else None,
        "interval": [round(min(drifts), 4), round(max(drifts), 4)] if pairs else None,
        "target": TARGET if is_judged else None,
        "diverged": diverged,
        "ok": not is_judged or (not diverged and abs(mean(drifts)) <= TARGET),
        "losses": [round(mean(side), 4) for side in zip(*pairs, strict=True)],
    }


# --- the plans ------------------------------------------------------------------------------------


def _prepared(optimizer: str, folder: Path) -> dict[str, float]:
    """Write a plan without compression, and one for each codec; return the drift of their probes.

    A codec is used for every gradient that it can compress.
    """
    from steelyard.plan_files.plan_file import write_decisions
    from steelyard.plans.budget import Budget
    from steelyard.plans.plan import Decisions
    from steelyard.plans.trade import codec_trades

    session = capture_and_price(partial(case, 0), OPTIMIZERS[optimizer], ranks=RANKS, title="drift")
    shared = (
        ShardBatchRule(ranks=RANKS, bucket=BUCKET), OverlapRule(window=2),
    )  # fmt: skip
    program, source = session.apply_rules(shared), session.source
    trades = codec_trades(session.request.trades)
    offers = [offer for trade in trades for offer in trade.offers(program, source)[0]]
    for number, codes in enumerate([(), *(offer.rules for offer in offers)]):
        made = Decisions(
            target=session.target(), budget=Budget(accuracy_loss=1.0), rules=(*shared, *codes)
        )
        write_decisions(folder / f"{number}.plan.toml", made)
    return {offer.label: _probed(session, (*shared, *offer.rules)) for offer in offers}


def _probed(session: Any, rules: Sequence[Rule]) -> float:
    from steelyard.planner.lossy import LossyPlanner

    seen = LossyPlanner(session=session).probe_drift(rules, session.apply_rules(rules), allowed=1.0)
    assert isinstance(seen, Drift), seen
    return seen.largest


# --- one rank -------------------------------------------------------------------------------------


def work(optimizer: str, folder: Path, rank: int) -> None:
    import steelyard as sy

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    losses: dict[str, list[float]] = {}
    plans = sorted(folder.glob("*.plan.toml"))
    for seed in SEEDS:
        for path in plans:
            model, loss, batch = case(seed)
            planned = sy.load(path, model, loss, batch, optimizer=OPTIMIZERS[optimizer])
            step = planned.apply()
            drawn = torch.Generator().manual_seed(seed)
            trained, _ = text()
            for _ in range(STEPS):
                step(_batch(trained, drawn))
            number = path.name.partition(".")[0]
            losses.setdefault(number, []).append(_held_out(model))
            if rank == 0:  # report progress: five seeds take long
                said = {"seed": seed, "plan": number, "held_out": losses[number][-1]}
                print(json.dumps(said), file=sys.stderr, flush=True)
            dist.barrier()
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def _held_out(model: nn.Module) -> float:
    _, held = text()
    pieces = held.unfold(0, LENGTH + 1, LENGTH)[:HELD_OUT].long()
    assert len(pieces) == HELD_OUT, "too little text"
    with torch.no_grad():
        found = [float(next_token_loss(model, _split(part))) for part in pieces.split(64)]
    return mean(found)


def _batch(trained: Tensor, drawn: torch.Generator) -> dict[str, Tensor]:
    starts = torch.randint(0, len(trained) - LENGTH, (BATCH,), generator=drawn)
    return _split(torch.stack([trained[s : s + LENGTH + 1] for s in starts]).long())


def _split(pieces: Tensor) -> dict[str, Tensor]:
    return {"x": pieces[:, :-1].contiguous(), "y": pieces[:, 1:].contiguous()}


@cache
def text() -> tuple[Tensor, Tensor]:
    """Return the bytes of Python modules: four fifths to train on, and every fifth held out."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held = b"".join(path.read_bytes() for path in modules[::5])
    trained = b"".join(path.read_bytes() for n, path in enumerate(modules) if n % 5)
    as_bytes = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (trained, held))
    return next(as_bytes), next(as_bytes)


def case(seed: int) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = GPT(
        layers=2, width=128, heads=4, vocabulary=256, length=LENGTH, dropout=0.0, fused=True
    )  # fmt: skip
    return model, next_token_loss, _batch(text()[0], torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
