"""Compares the FLOPs that a tight peak costs with each peer at its best.

The models have no dropout (with it torch's partitioner trains wrongly, see frontier.py): a GPT of
six blocks with fused attention, the same with attention in single operators, and a ResNet-18 of
half the width. The peers are torch.utils.checkpoint around every block, full and selective, and
torch's min-cut partitioner over activation_memory_budget in steps of 0.05, on plain aten and on
Inductor's decompositions. Peaks are metered above the resident bytes, gradients included.
Recomputation is the ratio of FLOPs to the unplanned ones, minus one. The unplanned peak is that of
eager PyTorch, or that of the captured graph if it is lower. A model takes five to ten minutes.

    python benchmarks/frontier_tight.py
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frontier import Make, Ours, Reached, checkpointed, swept
from steelyard.capture.tracing.decompositions import table
from tests.zoo.case import class_loss, images, next_token_loss, tokens
from tests.zoo.own import GPT, Residual

RATIOS = tuple(round(1 - step * 0.05, 2) for step in range(21))
TIGHT = 0.30
_SEED = 0
aten = torch.ops.aten
DEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
SELECTIVE = (
    ("selective, products and attention kept", DEAR, 1),
    ("selective, products of matrices kept", DEAR - {aten.bmm.default}, 1),
    ("selective, every second kept", DEAR, 2),
)
FUSED, SPELLED_OUT, RESNET = "GPT", "GPT, attention spelled out", "ResNet"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = {
        FUSED: partial(gpt, fused=True),
        SPELLED_OUT: partial(gpt, fused=False),
        RESNET: resnet,
    }
    met = {name: Met.all_peers(name, make) for name, make in models.items()}
    figures = [
        never_above(met),
        *peak_on_decomposed(met[FUSED], target=1 / 1.5),
        *peak_on_decomposed(met[SPELLED_OUT], target=1 / 1.5),
        *peak_on_decomposed(met[RESNET], target=1 / 1.3),
        beside_checkpoints(met[RESNET]),
        *(tight_on_aten(met[name]) for name in (FUSED, SPELLED_OUT)),
    ]
    first = figures[0]
    print(json.dumps({**first, "ok": all(f["ok"] for f in figures), "figures": figures}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A peer, and our plan that it is compared with; None if no plan fits its peak."""

    peer: Reached
    ours: Reached | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """One model with all its peers.

    ``pairs`` compare at equal peaks. ``decomposed`` compare at equal FLOPs: for each number of
    FLOPs in torch's sweep on Inductor's decompositions, the least peak that torch reaches with at
    most that many, and the least peak of our plans on the same graph. ``ours`` are the plans on
    Inductor's decompositions.
    """

    name: str
    eager: Reached
    base: Reached
    pairs: tuple[Pair, ...]
    decomposed: tuple[Pair, ...]
    ours: Ours

    @classmethod
    def all_peers(cls, name: str, make: Make) -> Met:
        ours = Ours(make)
        print(
            f"{name}: eager {ours.eager.peak_bytes / 1e6:.1f} MB, {ours.base.flops / 1e9:.3f} GFLOP"
        )
        on_decomposed = Ours(make, decomposition="inductor-1")
        decomposed = tuple(swept(make, "Inductor's decompositions", table("inductor-1"), RATIOS))
        eager = Reached(who="eager", peak_bytes=ours.eager.peak_bytes, flops=ours.base.flops)
        pairs = []
        for peer in itertools.chain(peers(make), decomposed):
            pairs.append(Pair(peer=peer, ours=ours.at(peer.peak_bytes)))
            tell(eager, pairs[-1])
            gc.collect()
        return cls(
            name=name,
            eager=eager,
            base=ours.base,
            pairs=tuple(pairs),
            decomposed=tuple(at_equal_flops(on_decomposed, eager, decomposed)),
            ours=on_decomposed,
        )

    def again(self, reached: Reached) -> float:
        return reached.flops / self.base.flops - 1


def at_equal_flops(ours: Ours, eager: Reached, torchs: Sequence[Reached]) -> Iterator[Pair]:
    for flops in sorted({t.flops for t in torchs}):
        best = min(t.peak_bytes for t in torchs if t.flops <= flops)
        peer = Reached(who="min-cut at its best", peak_bytes=best, flops=flops)
        pair = Pair(peer=peer, ours=ours.within(flops))
        tell(eager, pair)
        yield pair


def peers(make: Make) -> Iterator[Reached]:
    yield checkpointed(make)
    for who, kept, every in SELECTIVE:
        yield checkpointed(make, who=who, context_fn=keeping(kept, every=every))
    yield from swept(make, "aten", {}, RATIOS)


def keeping(kept: set[Any], *, every: int) -> Callable[[], Any]:
    """Return contexts for selective checkpointing that keep one in ``every`` of these calls."""

    def contexts() -> Any:
        seen = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if operator not in kept:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % every:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def tell(eager: Reached, pair: Pair) -> None:
    def point(reached: Reached) -> str:
        return f"{reached.peak_bytes / eager.peak_bytes:.3f} @ {reached.flops / eager.flops:.4f}"

    ours = "no plan fits" if pair.ours is None else point(pair.ours)
    print(f"  {pair.peer.who:40s} {point(pair.peer)}   ours {ours}", flush=True)


def undominated(reached: Sequence[Reached]) -> list[Reached]:
    """Return the points that no other beats in FLOPs and peak, ordered by rising FLOPs."""
    best: list[Reached] = []
    for point in sorted(reached, key=lambda r: (r.flops, r.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return best


def never_above(met: dict[str, Met]) -> dict[str, Any]:
    """Compare our FLOPs at each peer's peak with the fewest of any peer within that peak."""
    ratios = []
    for model in met.values():
        for pair in model.pairs:
            best = min(
                p.peer.flops for p in model.pairs if p.peer.peak_bytes <= pair.peer.peak_bytes
            )
            ratios.append(float("inf") if pair.ours is None else pair.ours.flops / best)
            assert pair.ours is None or pair.ours.gradient_error == 0.0
    return figure(
        f"FLOPs at equal peak / the best peer, worst of {len(ratios)}", max(ratios), ratios, 1.0
    )


def peak_on_decomposed(model: Met, *, target: float) -> Iterator[dict[str, Any]]:
    """Yield the ratio of peaks at equal FLOPs: where it is smallest, and at torch's least peak.

    The interval is over all numbers of FLOPs. ``no plan below`` is a lower bound on the FLOPs of
    all plans that meet the target, relative to the step without a plan. If it is above the peer's
    FLOPs, no plan can meet the target.
    """
    ratios = [p.ours.peak_bytes / p.peer.peak_bytes for p in model.decomposed if p.ours]
    least = min(p.peer.peak_bytes for p in model.decomposed)
    places = {
        "most apart": ratios.index(min(ratios)),
        "torch's least peak": [p.peer.peak_bytes for p in model.decomposed].index(least),
    }
    for said, place in places.items():
        peer = model.decomposed[place].peer
        flops = 1 + model.again(peer)
        name = f"{model.name}, decomposed: peak / torch's best, {said} ({flops:.4f} of the FLOPs)"
        least = model.ours.least_flops(round(target * peer.peak_bytes)) / model.base.flops
        yield figure(name, ratios[place], ratios, target) | {"no plan below": round(least, 4)}


def beside_checkpoints(model: Met) -> dict[str, Any]:
    pair = model.pairs[0]
    assert pair.peer.who == "checkpoint every block"
    assert pair.ours is not None
    ratio = model.again(pair.ours) / model.again(pair.peer)
    name = f"{model.name}: recomputation / checkpointing every block, at equal peak"
    return figure(name, ratio, [ratio], 0.25)


def tight_on_aten(model: Met) -> dict[str, Any]:
    """Return the worst ratio of recomputation at the tight peaks of torch's sweep on aten.

    Points that another point of the sweep beats are left out.
    """
    on_aten = undominated([p.peer for p in model.pairs if p.peer.who.startswith("min-cut, aten")])
    limit = TIGHT * min(model.eager.peak_bytes, model.base.peak_bytes)
    ratios = [
        model.again(pair.ours) / model.again(pair.peer)
        for pair in model.pairs
        if pair.ours and pair.peer in on_aten and pair.peer.peak_bytes <= limit
    ]
    name = f"{model.name}, aten: recomputation / torch's, worst of {len(ratios)} peaks <= {TIGHT}"
    return figure(name, max(ratios), ratios, 0.9)


def figure(name: str, value: float, values: Sequence[float], target: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "interval": [min(values), max(values)] if len(values) > 1 else None,
        "target": target,
        "ok": value <= target,
    }


def gpt(*, fused: bool) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(_SEED)
    model = GPT(layers=6, width=256, heads=4, vocabulary=1024, length=256, fused=fused)
    # In evaluation, dropout has no operator. With a rate of zero, it would still copy.
    return model.eval(), next_token_loss, tokens(8, 256, 1024)


def resnet() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(_SEED)
    stages = [(32, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        *(block for i, o, s in stages for block in (Residual(i, o, s), Residual(o, o, 1))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return model, class_loss, images(16, 64, 10)


if __name__ == "__main__":
    main()
