"""Compares the FLOPs of our plans with those of torch's own tools at the peaks that these reach.

The peers are torch.utils.checkpoint around every block, and torch's min-cut partitioner over a
sweep of activation_memory_budget, on plain aten and on Inductor's decompositions (as torch.compile
partitions). For each peer we plan for its metered peak, run the plan, meter it, and compare the
FLOPs that torch's FlopCounterMode counts, with attention on the CPU added, which it leaves out.
The models have no dropout: with dropout, the partitioner draws random masks a second time (torch
2.13) and saves memory by training wrongly. This is shown at one ratio. A model takes one to three
minutes.

    python benchmarks/frontier.py [gpt resnet_bn hf_t5]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import (
    aot_module_simplified,
    config,
    min_cut_rematerialization_partition,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steelyard.capture.tracing.decompositions import table
from steelyard.errors import Infeasible
from steelyard.hardware.cluster import Device
from steelyard.measure.operators.memory import meter_once
from steelyard.plans.budget import Budget
from steelyard.search import SearchResult
from steelyard.search.single.lower_bound import least_seconds
from steelyard.search.single.min_cut import MinCut
from steelyard.trades.recompute import Recompute
from tests import zoo
from tests.harness import UNCOUNTED, Trial, costs_of

MODELS = ("gpt", "resnet_bn", "hf_t5")
RATIOS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
RATIO_WITH_DROPOUT = 0.5
# The peers minimize FLOPs, so these prices do too; a call has a tiny cost.
FLOPS_ONLY = Device(
    kind="FLOPs only",
    flops_per_second=1e9,
    bytes_per_second=1e30,
    memory_bytes=1 << 40,
    call_seconds=1e-9,
)
_SEED = 11
Make = Callable[[], tuple[nn.Module, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The peak and the FLOPs of a step, and the error of its gradients.

    The error is relative to the gradients of the same side without a plan or budget.
    """

    who: str
    peak_bytes: int
    flops: int
    gradient_error: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = parser.parse_args().models
    figures = [figure for name in models for figure in measured(name)]
    with_dropout = {name: wrong_with_dropout(name) for name in models if has_dropout(name)}
    ratios = [f["flops_ratio"] for f in figures if f["flops_ratio"] is not None]
    wrong = max((f for f in figures), key=lambda f: f["peer_gradient_error"])
    summary = {
        "name": "FLOPs of our plan / of the peer, at the peak the peer reaches (worst of all)",
        "value": max(ratios, default=None),
        "interval": [min(ratios, default=None), max(ratios, default=None)],
        "target": 1.0,
        "ok": all(f["ok"] for f in figures),
        "planned": f"{sum(f['flops_ratio'] is not None for f in figures)} of {len(figures)}",
        "our_worst_gradient_error": max(f["our_gradient_error"] for f in figures),
        "peer_worst_gradient_error": [wrong["peer"], wrong["peer_gradient_error"]],
        "peer_gradient_error_with_dropout": with_dropout,
    }
    print(json.dumps(summary))


def measured(name: str) -> Iterator[dict[str, Any]]:
    make = partial(made, name)
    ours = Ours(make)
    print(
        f"{name}: unplanned {ours.base.peak_bytes / 1e6:.2f} MB above the resident, "
        f"{ours.base.flops / 1e9:.3f} GFLOP; eager {ours.eager.peak_bytes / 1e6:.2f} MB"
    )
    for peer in peers(make):
        plan = ours.at(peer.peak_bytes)
        yield figure(name, ours, peer, plan)
        gc.collect()


def figure(name: str, ours: Ours, peer: Reached, plan: Reached | None) -> dict[str, Any]:
    base = ours.base
    row: dict[str, Any] = {
        "peer": f"{name}, {peer.who}",
        "peer_peak": peer.peak_bytes / base.peak_bytes,
        "peer_flops": peer.flops / base.flops,
        "peer_gradient_error": peer.gradient_error,
        "our_peak": plan and plan.peak_bytes / base.peak_bytes,
        "our_flops": plan and plan.flops / base.flops,
        "our_gradient_error": plan.gradient_error if plan else 0.0,
        "flops_ratio": plan and plan.flops / peer.flops,
        "ok": plan is not None
        and plan.flops <= peer.flops
        and plan.peak_bytes <= peer.peak_bytes
        and plan.gradient_error == 0.0,
    }
    mark = "" if row["ok"] else "   <- missed"
    told = "no plan fits" if plan is None else f"{row['our_peak']:.3f} @ {row['our_flops']:.4f}"
    wrong = (
        f"   (its gradients are off by {peer.gradient_error:.1e})" if peer.gradient_error else ""
    )
    theirs = f"{row['peer_peak']:.3f} @ {row['peer_flops']:.4f}"
    print(f"  {peer.who:40s} {theirs}   ours {told}{wrong}{mark}", flush=True)
    return row


class Ours:
    """Our plans with one table of decompositions, run by generated Python."""

    def __init__(self, make: Make, *, decomposition: str = "python-2") -> None:
        self._trial = Trial(*make(), decomposition=decomposition)
        graph = self._trial.source.graph(micro_batches=1)
        # Micro-batches cost no FLOPs, but no peer here splits the batch, so our plans do not.
        self._searching = self._trial.searching(
            costs_of(graph, device=FLOPS_ONLY), trades=(Recompute(),)
        )
        explored = self._searching.explored()
        self._resident = explored.estimator.resident_bytes
        self.eager = self._trial.eager()
        self._unplanned = self._trial.run(self._trial.plain)
        self.base = Reached(
            who="unplanned",
            peak_bytes=self._unplanned.peak_bytes,
            flops=self._trial.flops(self._trial.plain),
        )

    def at(self, peak_bytes: int) -> Reached | None:
        try:
            found = self._searching.find(Budget(memory_bytes=peak_bytes + self._resident))
        except Infeasible:
            return None
        return self._run(found)

    def within(self, flops: int) -> Reached:
        """Run the plan with the least memory among those that take at most ``flops``."""
        explored = self._searching.explored()
        cheap = [p for p in explored.chain if explored.estimator.flops_of(p.choices) <= flops]
        return self._run(self._searching.find(Budget(memory_bytes=cheap[0].peak_bytes)))

    def least_flops(self, peak_bytes: int) -> float:
        """Return a lower bound on the FLOPs of all plans within a peak.

        It holds for this graph in its order of operators. Plans may recompute values any number of
        times.
        """
        tally = self._searching.explored().estimator
        least = least_seconds(
            tally,
            MinCut(tally),
            limit_bytes=peak_bytes + self._resident,
            within_seconds=2 * tally.plain_seconds,
            repeats=True,
        )
        return self.base.flops * least / tally.plain_seconds

    def _run(self, found: SearchResult) -> Reached:
        outcome = self._trial.run(found.program)
        return Reached(
            who="ours",
            peak_bytes=outcome.peak_bytes,
            flops=self._trial.flops(found.program),
            gradient_error=error(outcome.gradients, self._unplanned.gradients),
        )


def wrong_with_dropout(name: str) -> float:
    """Return the error of the partitioner's gradients with a budget and dropout.

    The error is relative to its own gradients without a budget, under the same seed.
    """
    make = partial(made, name, dropout=True)
    _, exact = partitioned(make, {}, 1.0)
    _, gradients = partitioned(make, {}, RATIO_WITH_DROPOUT)
    off = error(gradients, exact)
    print(f"{name} with dropout, min-cut at {RATIO_WITH_DROPOUT}: gradients off by {off:.2g}")
    return off


def has_dropout(name: str) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p for m in made(name, dropout=True)[0].modules())


def made(name: str, *, dropout: bool = False) -> tuple[nn.Module, Any, Any]:
    model, loss, batch = zoo.case(name).make(scale="small")
    for module in model.modules():
        drops = isinstance(module, nn.Dropout) or isinstance(
            getattr(module, "dropout", None), float
        )
        if drops and not dropout:
            # As in evaluation, dropout has no operator. (With a rate of zero, it would still copy.)
            module.training = False
    return model, loss, batch


def peers(make: Make) -> Iterator[Reached]:
    yield checkpointed(make)
    yield from swept(make, "aten", {})
    yield from swept(make, "Inductor's decompositions", table("inductor-1"))


def swept(
    make: Make, label: str, decompositions: dict[Any, Any], ratios: Sequence[float] = RATIOS
) -> Iterator[Reached]:
    """Run torch's partitioner at each memory ratio."""
    exact: dict[str, Tensor | None] | None = None
    for ratio in ratios:
        try:
            reached, gradients = partitioned(make, decompositions, ratio)
        except RuntimeError as failure:
            line = str(failure).splitlines()[0][:60]
            print(f"  min-cut, {label}, {ratio}: the peer fails: {line}", flush=True)
            continue
        exact = exact or gradients
        yield Reached(
            who=f"min-cut, {label}, {ratio}",
            peak_bytes=reached.peak_bytes,
            flops=reached.flops,
            gradient_error=error(gradients, exact),
        )


def checkpointed(
    make: Make, *, who: str = "checkpoint every block", context_fn: Callable[[], Any] | None = None
) -> Reached:
    """Run the model with torch.utils.checkpoint around every block.

    ``context_fn`` makes the checkpoints selective.
    """
    model, loss, batch = make()
    for block in blocks(model):
        block.forward = checkpointing(block.forward, context_fn)  # type: ignore[method-assign]
    step = Eager(model, lambda: loss(model, batch))
    peak = step.peak()
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        step.run()
    return Reached(who=who, peak_bytes=peak, flops=counter.get_total_flops())


def checkpointing(
    forward: Callable[..., Any], context_fn: Callable[[], Any] | None = None
) -> Callable[..., Any]:
    contexts = {} if context_fn is None else {"context_fn": context_fn}

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return run


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated modules: in a ModuleList or Sequential, with own children."""
    found: list[nn.Module] = []
    for module in model.modules():
        children = list(module.children())
        composite = [c for c in children if list(c.children())]
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(composite) > 1:
            found += [c for c in composite if not any(c in set(f.modules()) for f in found)]
    return found


def partitioned(
    make: Make, decompositions: dict[Any, Any], ratio: float
) -> tuple[Reached, dict[str, Tensor | None]]:
    """Run torch's partitioner as torch.compile calls it; its graphs run node by node."""
    model, loss, batch = make()
    flops: list[int] = []
    torch.compiler.reset()
    with config.patch(activation_memory_budget=ratio):
        backend = partitioning(decompositions, flops)
        step = Eager(model, torch.compile(lambda: loss(model, batch), backend=backend))
        peak = step.peak()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Reached(who="", peak_bytes=peak, flops=sum(flops)), gradients


def partitioning(decompositions: dict[Any, Any], flops: list[int]) -> Callable[..., Any]:
    """Return a backend of torch.compile that partitions by activation_memory_budget.

    It appends the FLOPs of each graph to ``flops``.
    """

    def counted(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        flops.append(sum(node_flops(node) for node in graph.graph.nodes))

        def run(arguments: list[Any]) -> Any:
            return torch.fx.Interpreter(graph).boxed_run(arguments)

        # The call may empty the list, so that saved values are freed at their last use, as with
        # Inductor.
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = aot_module_simplified(
            graph,
            inputs,
            fw_compiler=counted,
            bw_compiler=counted,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions,
        )
        return compiled

    return backend


def node_flops(node: torch.fx.Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    formula = shape_wrapper(UNCOUNTED[packet]) if packet in UNCOUNTED else flop_registry.get(packet)
    if formula is None:
        return 0

    def value(argument: torch.fx.Node) -> Any:
        return argument.meta.get("val")

    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    return int(formula(*args, **kwargs, out_val=value(node)))


class Eager:
    """A forward and backward pass of eager PyTorch."""

    def __init__(self, model: nn.Module, forward: Callable[[], Tensor]) -> None:
        self._model = model
        self._forward = forward
        self._start = copy.deepcopy(model.state_dict())

    def run(self) -> None:
        with self._fresh():
            self._forward().backward()

    def peak(self) -> int:
        self.run()
        with self._fresh():
            return meter_once(lambda: self._forward().backward()).peak_bytes

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        self._model.load_state_dict(self._start)
        self._model.zero_grad(set_to_none=True)
        torch.manual_seed(_SEED)
        gc.collect()
        yield


def error(ours: dict[str, Tensor | None], exact: dict[str, Tensor | None]) -> float:
    """Return the largest relative difference of any gradient, in norm."""
    worst = 0.0
    for name, right in exact.items():
        left = ours[name]
        if left is not None and right is not None:
            off = (left - right).norm() / (right.norm() + 1e-12)
            worst = max(worst, off.item())
    return worst


if __name__ == "__main__":
    main()
