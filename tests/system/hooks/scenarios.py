"""Runs ranks of gloo under ``steelyard.hooks``, and the same without hooks.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steelyard.comm.gloo import direct_collectives as directly
from steelyard.comm.json_gather import gathered
from steelyard.errors import SteelyardError
from steelyard.hooks import compress
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

CODES = ("int8", "ternary", "bfloat16", "rank 4")
STEPS = 6
# Two gradients are compressed and fill a bucket each; the others have one dimension or are small.
SHAPES = {"first": (96, 128), "second": (64, 160), "bias": (128,), "small": (3, 5)}


class Given(nn.Module):
    """A model whose gradients are the given ones, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum(
            ((p * gradients[name]).sum() for name, p in self.named_parameters()), torch.zeros(())
        )


def _drawn(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = {n: torch.randn(s, generator=generator, device="cpu") for n, s in SHAPES.items()}
    return {name: x.to(torch.get_default_device()) for name, x in drawn.items()}


def _wrapped(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.03, **settings)


def every(rank: int) -> dict[str, Any]:
    """Run everything in one start of the ranks; some of it only with two ranks."""
    asked: list[Callable[[int], Any]] = [added_up, resumes, resumes_factors, shards]
    if dist.get_world_size() == 2:
        asked += [trains, scaled, unused, refusals, breaks]
    return {scenario.__name__: scenario(rank) for scenario in asked}


def added_up(rank: int) -> dict[str, Any]:
    """Return, for each codec, the error of the received means and the remaining residual."""
    return {code: _added_up(code, rank) for code in CODES}


def _added_up(code: str, rank: int) -> dict[str, Any]:
    count = dist.get_world_size()
    ddp = _wrapped(Given())
    lost = compress(ddp, code)
    came: list[dict[str, Tensor]] = []
    with _counted() as sent:
        for step in range(STEPS):
            ddp.zero_grad()
            ddp(_drawn(rank, step)).backward()
            came.append({n: p.grad.clone() for n, p in _gradients(ddp.module)})
    meant = [
        {n: sum(_drawn(r, step)[n] for r in range(count)) / count for n in SHAPES}
        for step in range(STEPS)
    ]
    off = {
        name: max(float((a[name] - b[name]).abs().max()) for a, b in zip(came, meant, strict=True))
        for name in SHAPES
    }
    state = lost.state_dict()
    left = {
        name: float(
            (
                sum(a[name] for a in came) + state.get(name, torch.zeros(())) / count
                - sum(b[name] for b in meant)
            ).abs().max()
        )
        for name in SHAPES
    }  # fmt: skip
    values = [came[s][n] for s in range(STEPS) for n in SHAPES]
    large = 4 * STEPS * sum(torch.Size(SHAPES[n]).numel() for n in ("first", "second"))
    return {
        "off": off, "left": left, "digest": _digest(values), "state": sorted(state),
        "share": sent["coded"] / (2 * (count - 1) / count * large),
    }  # fmt: skip


def _gradients(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((n, p) for n, p in module.named_parameters() if p.grad is not None)


def _digest(values: list[Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _counted() -> Iterator[dict[str, float]]:
    """Return the bytes that this rank sends in compressed form."""
    sent = {"coded": 0.0}
    count = dist.get_world_size()
    kept = dist.all_gather_single, dist.all_to_all_single, dist.all_reduce
    hand_over = directly.hand_over

    def counting(call: Callable[..., Any], of: Callable[..., float]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            sent["coded"] += of(*args)
            return call(*args, **kwargs)

        return run

    def handed_over(kind: Any, parts: Sequence[Tensor], *rest: Any) -> Any:
        sent["coded"] += (count - 1) * parts[0].nbytes
        return hand_over(kind, parts, *rest)

    gather, hand_out, reduce = kept
    directly.hand_over = handed_over  # this counts gloo's exchanges
    dist.all_gather_single = counting(gather, lambda _, x: (count - 1) * x.nbytes)
    dist.all_to_all_single = counting(hand_out, lambda _, x: (count - 1) / count * x.nbytes)
    dist.all_reduce = counting(reduce, lambda x: 2 * (count - 1) / count * x.nbytes * _is_coded(x))
    try:
        yield sent
    finally:
        dist.all_gather_single, dist.all_to_all_single, dist.all_reduce = kept
        directly.hand_over = hand_over


def _is_coded(x: Tensor) -> bool:
    """Return whether a message is compressed.

    Factors have four numbers for each row and column; uncompressed messages have an odd number
    here.
    """
    return x.dtype == torch.bfloat16 or x.numel() % 4 == 0


def trains(rank: int) -> dict[str, Any]:
    """Return a model's losses without a codec and with each one, with whole batches and with
    gradients accumulated over two."""
    found = {}
    for code in ("", *CODES):
        for parts in (1, 2):
            found[f"{code} {parts}".strip()] = _losses(code, parts, rank)
    return found


def _losses(code: str, parts: int, rank: int) -> list[float]:
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
    ddp = _wrapped(model)
    if code:
        compress(ddp, code)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    batch = {name: x.chunk(dist.get_world_size())[rank] for name, x in _batch().items()}
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        for part in range(parts):
            own = {name: x.chunk(parts)[part] for name, x in batch.items()}
            with ddp.no_sync() if part < parts - 1 else nullcontext():
                loss = next_token_loss(ddp, own) / parts
                loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    assert _is_alike(model), "ranks drifted apart"
    return losses


def _batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    batch = tokens(12, 16, 96)
    return batch if isinstance(batch, dict) else {"tokens": batch}


def _is_alike(model: nn.Module) -> bool:
    own = gathered(_digest([*model.parameters()]), str)
    return len(set(own)) == 1


def scaled(rank: int) -> dict[str, Any]:
    """Use a scaler whose scale falls after a step with an infinite gradient on one rank."""
    ddp = _wrapped(Given())
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=1024.0, growth_interval=1000
    )
    lost = compress(ddp, "ternary", scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    count, skipped, scales = dist.get_world_size(), [], []
    for step in range(STEPS):
        gradients = _drawn(rank, step)
        if step == 2 and rank == 0:
            gradients["first"][0, 0] = float("inf")
        before = ddp.module.second.detach().clone()
        optimizer.zero_grad()
        scaler.scale(ddp(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, ddp.module.second))
        scales.append(scaler.get_scale())
    state = lost.state_dict()
    # The compressed gradient of the skipped step was never applied, and is lost.
    applied = -ddp.module.second.detach()
    meant = (
        sum(_drawn(r, s)["second"] for r in range(count) for s in range(STEPS) if s != 2) / count
    )
    return {
        "skipped": skipped, "scales": scales, "alike": _is_alike(ddp.module),
        "finite": all(bool(x.isfinite().all()) for x in state.values()),
        "rest": float((meant - applied).norm() / meant.norm()),
    }  # fmt: skip


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, *, goes_left: bool) -> Tensor:
        result: Tensor = (self.left if goes_left else self.right)(x)
        return result


def unused(rank: int) -> dict[str, Any]:
    """Leave parameters unused on some ranks, or on all."""
    torch.manual_seed(0)
    model = Branching()
    ddp = _wrapped(model, find_unused_parameters=True)
    lost = compress(ddp, "ternary")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(4, 64), goes_left=step % 2 == 0 or rank == 0).square().mean().backward()
        optimizer.step()
    before = {name: x.clone() for name, x in lost.state_dict().items()}
    optimizer.zero_grad()
    ddp(torch.randn(4, 64), goes_left=True).square().mean().backward()
    after = lost.state_dict()
    return {
        "alike": _is_alike(model),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "moved": sorted(n for n in before if not torch.equal(before[n], after[n])),
        "without": sorted(n for n, p in model.named_parameters() if p.grad is None),
        "kept": sorted(n for n in before if bool(before[n].any())),
    }


def resumes(rank: int) -> dict[str, Any]:
    return _resumed("ternary", rank)


def resumes_factors(rank: int) -> dict[str, Any]:
    return _resumed("rank 4", rank)


def _resumed(code: str, rank: int) -> dict[str, Any]:
    """Load saved residuals into another model's hook, with buckets of another size."""
    ddp = _wrapped(Given())
    lost = compress(ddp, code)
    for step in range(3):
        ddp.zero_grad()
        ddp(_drawn(rank, step)).backward()
    saved = lost.state_dict()
    with io.BytesIO() as file:
        torch.save(saved, file)
    other = DistributedDataParallel(Given())
    again = compress(other, code)
    again.load_state_dict(saved)
    loaded = again.state_dict()
    apart = max(float((saved[n] - loaded[n]).abs().max()) for n in saved)
    # Zero gradients send only the residual, which arrives in the next steps.
    zeros = {n: torch.zeros(s) for n, s in SHAPES.items()}
    came = {n: torch.zeros(s) for n, s in SHAPES.items()}
    for _ in range(3):
        other.zero_grad()
        other(zeros).backward()
        for name, p in _gradients(other.module):
            came[name] += p.grad
    left = again.state_dict()
    count = dist.get_world_size()
    lost_of = [n for n in saved if n in SHAPES]
    kept = max(float((came[n] + left[n] / count - saved[n] / count).abs().max()) for n in lost_of)
    with_wrong = {**saved, "first": torch.zeros(2, 2)}
    return {
        "saved": sorted(saved), "norm": float(saved["first"].norm()), "apart": apart, "kept": kept,
        "came": float(came["first"].norm()),
        "refused": _refusal(lambda: again.load_state_dict(with_wrong)),
    }  # fmt: skip


def refusals(rank: int) -> dict[str, str]:
    ddp = _wrapped(Given())
    shards = nn.Linear(64, 64)
    fully_shard(shards)
    return {
        "another code": _refusal(lambda: compress(ddp, "int8" if rank else "ternary")),
        "no code": _refusal(lambda: compress(ddp, "int9")),
        "no exchange": _refusal(lambda: compress(Given())),
        "ternary shards": _refusal(lambda: compress(shards, "ternary")),
        "sparse": _refusal(lambda: compress(nn.Sequential(nn.Embedding(9, 9, sparse=True)))),
    }


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except SteelyardError as error:
        return str(error)
    return ""


def breaks(rank: int) -> str:
    """Return the error of the backward pass if an exchange fails on the hook's own thread."""
    ddp = _wrapped(Given())
    compress(ddp, "int8")
    gather, hand_over = dist.all_gather_single, directly.hand_over

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed by peer")

    dist.all_gather_single = directly.hand_over = gone
    try:
        ddp(_drawn(rank, 0)).backward()
    except (RuntimeError, SteelyardError) as error:
        return str(error)
    finally:
        dist.all_gather_single, directly.hand_over = gather, hand_over
    return ""


def shards(rank: int) -> dict[str, Any]:
    """Return FSDP2's gradients and trained parameters, with and without compression."""
    torch.manual_seed(0)
    layers = [nn.Linear(63, 130), nn.ReLU(), nn.Linear(130, 17)]
    model = nn.Sequential(*layers)
    plain, coded = copy.deepcopy(model), model
    for one in (plain, coded):
        for layer in (one[0], one[2], one):
            fully_shard(layer)
    compress(coded, "int8")
    x, y = torch.randn(12, 63), torch.randint(0, 17, (12,))
    own = slice(rank, None, dist.get_world_size())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2) for one in (plain, coded)]
    losses: list[list[float]] = [[], []]
    first: list[list[Tensor]] = []
    for step in range(10):
        for number, one in enumerate((plain, coded)):
            optimizers[number].zero_grad()
            loss = nn.functional.cross_entropy(one(x[own]), y[own])
            loss.backward()
            if not step:
                first.append([p.grad.full_tensor() for p in one.parameters()])
            optimizers[number].step()
            losses[number].append(float(loss))
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(*first, strict=True)]
    return {"losses": losses, "apart": apart}
