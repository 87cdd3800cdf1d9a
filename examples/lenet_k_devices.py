"""LeNet on k processes of this machine, split four ways; each trains as one device does.

    python examples/lenet_k_devices.py [k]

By the batch, where every rank has all weights and gradients are added up; by the batch with shares
of the weights, where they are gathered and scattered too; by channel, where ranks compute parts of
the same images; by layer, where micro-batches go from rank to rank. Shows, of each, how far the
weights are from one device's after some steps, what the fullest rank holds, and who waits for whom.
"""

import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import steelyard as sy

STEPS, WIDTH = 10, 72
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


def lenet() -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(
        conv1=nn.Conv2d(1, 6, 5, padding=2), act1=nn.Tanh(), pool1=nn.AvgPool2d(2),
        conv2=nn.Conv2d(6, 16, 5), act2=nn.Tanh(), pool2=nn.AvgPool2d(2), flat=nn.Flatten(),
        full1=nn.Linear(400, 120), act3=nn.Tanh(),
        full2=nn.Linear(120, 84), act4=nn.Tanh(),
        head=nn.Linear(84, 10),
    )  # fmt: skip
    return nn.Sequential(layers).double()


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["images"]), batch["digits"])


def made_up_digits() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "images": torch.randn(48, 1, 28, 28, dtype=torch.float64),
        "digits": torch.randint(10, (48,)),
    }


def ways(k: int) -> dict[str, str]:
    """What a plan file says of each."""
    by_batch = f'[[overlap]]\nwindow = 1\n\n[[shard_batch]]\nranks = {k}\nbucket = "1 MiB"\n'
    shares = f'\n[[shard_states]]\nranks = {k}\nparameter = "full1.weight"\n'
    channels = "[[overlap]]\nwindow = 1\n" + "".join(
        f'\n[[shard_tensor]]\nranks = {k}\nparameter = "{name}"\ndim = {dim}\n'
        for name, dim in (
            ("conv1.bias", 0), ("conv1.weight", 0), ("conv2.weight", 1),
            ("full1.bias", 0), ("full1.weight", 0), ("full2.weight", 1),
        )
    )  # fmt: skip
    ends = ("pool1", "pool2")[: k - 1]
    layers = "[[accumulate]]\nmicro_batches = 8\n" + "".join(
        f'\n[[shard_pipeline]]\nranks = {k}\nschedule = "1F1B"\nbehind = "{end}"\n' for end in ends
    )
    return {
        "by batch": by_batch,
        "by batch, weights in shares": by_batch + shares,
        "by channel": channels,
        "by layer": layers,
    }


def main(k: int) -> None:
    if not 2 <= k <= 3:
        raise SystemExit("k is 2 or 3: six channels, and LeNet has few layers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "lenet.plan.toml"
        cluster = sy.Cluster.here(ranks=k)
        sy.plan(lenet(), loss, made_up_digits(), optimizer=OPTIMIZER, cluster=cluster).save(plan)
        text = plan.read_text()
        head = text[: text.index("accuracy_loss")] + 'accuracy_loss = "0%"\n\n'
        for way, rules in ways(k).items():
            planned_for(way, folder).write_text(head + rules)
        on_ranks(k, folder)


def planned_for(way: str, folder: Path) -> Path:
    return folder / f"{way}.plan.toml"


def on_ranks(k: int, folder: Path) -> None:
    """This script again, once for each rank; gloo listens on this machine alone."""
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(k), str(folder)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(k), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(k)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def one_rank(k: int, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=k)
    for way in ways(k):
        if rank == 0:
            print(f"\n{way}", flush=True)
        train(planned_for(way, folder), rank)
    dist.destroy_process_group()


def train(plan: Path, rank: int) -> None:
    model, alone, batch = lenet(), lenet(), made_up_digits()
    planned = sy.load(plan, model, loss, batch, optimizer=OPTIMIZER)
    step = planned.apply()
    optimizer = OPTIMIZER(alone.parameters())
    for _ in range(STEPS):
        step(batch)
        optimizer.zero_grad()
        loss(alone, batch).backward()
        optimizer.step()
    held = sum(p.numel() for p in model.parameters())
    with step.whole():
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    most = torch.tensor(held)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        whole = sum(p.numel() for p in alone.parameters())
        print(f"  weights within {apart:.0e} of one device's after {STEPS} steps")
        print(f"  a rank holds at most {int(most):,} of {whole:,} weights")
        draw(planned.simulated())


def draw(spans) -> None:
    """Predicted: # computes, . waits for others, blank has nothing left to do."""
    end = max(span.end_seconds for span in spans)
    for rank in sorted({span.rank for span in spans}):
        row = [" "] * WIDTH
        for span in (s for s in spans if s.rank == rank and s.stream in ("device", "waiting")):
            edges = span.begin_seconds, span.end_seconds
            first, last = (int(edge / end * (WIDTH - 1)) for edge in edges)
            for place in range(first, last + 1):
                row[place] = "#" if span.stream == "device" or row[place] == "#" else "."
        print(f"  rank {rank} |{''.join(row)}|")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if len(sys.argv) > 2:
        one_rank(count, Path(sys.argv[2]))
    else:
        main(count)
