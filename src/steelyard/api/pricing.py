"""Costs of a step's operators on this machine: measured, remembered, checked against a step.

Not for measuring itself: see measure/.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.optimizer import OptimizerFactory
from steelyard.capture.source import StepSource
from steelyard.core.cluster import Cluster
from steelyard.core.costs import Costs, OperatorCost
from steelyard.core.graph import Graph
from steelyard.core.machine import available_bytes
from steelyard.core.program import Program
from steelyard.core.quad import Estimate
from steelyard.measure.cache import CostCache
from steelyard.measure.operators import measure_operators
from steelyard.measure.update import update_call_seconds
from steelyard.measure.whole_step import Runnable, whole_step
from steelyard.predict import peak_bytes
from steelyard.run.step import LiveStep

Progress = Callable[[str], None]

# A check against a whole step is worth this long; steps that take longer go unchecked.
_CHECK_SECONDS = 6.0
_FEWEST_ROUNDS = 3
_WARMUPS = 2
_SHARE_OF_FREE_MEMORY = 0.5


class Prices:
    """What operators cost here, one list that grows with every graph somebody asks about.

    A search that compared measured operators with declared ones would compare nothing.
    """

    def __init__(self, cluster: Cluster, *, on_progress: Progress) -> None:
        self._is_here = cluster.device.is_here
        self._device = cluster.device
        self._on_progress = on_progress
        self._operators: dict[str, OperatorCost] = {}
        self._known: set[str] = set()
        self.costs = Costs(device=cluster.device, operators=self._operators)
        self.notes: list[str] = []

    def know(self, *graphs: Graph) -> None:
        """Measure the operators of these graphs that are not on the list yet."""
        new = {n.signature for g in graphs for n in g.nodes if not n.is_free} - self._known
        if not new or not self._is_here:
            return
        self._on_progress("measuring operators")
        self._known |= new
        costs, survey = measure_operators(graphs, self._device, cache=CostCache())
        self._operators.update(costs.operators)
        self.notes += [note for note in survey.notes if note not in self.notes]

    def know_update(self, make: OptimizerFactory, update: Program) -> None:
        """Measure the optimizer's operators, and its own Python between them."""
        self.know(update.graph)
        if not self._is_here:
            return
        gradients = (n for n in update.graph.inputs() if n.name.startswith("gradient:"))
        dims = [len(n.outputs[0].shape) for n in gradients]
        calls = sum(not update.graph.by_name[i.node].is_free for i in update.instructions)
        seconds = update_call_seconds(make, dims=dims, calls=calls)
        self.costs = replace(self.costs, update_call_seconds=seconds)

    def check(self, source: StepSource, program: Program) -> None:
        """Hold the list against a whole step, where one can be run in reasonable time."""
        seconds = sum(
            self.costs.seconds(program.graph.by_name[i.node]).value
            for i in program.instructions
            if i.sink is None
        )
        rounds = min(7, int(_CHECK_SECONDS / max(seconds, 1e-9)) - _WARMUPS)
        fits = peak_bytes(program, self.costs) < _SHARE_OF_FREE_MEMORY * available_bytes()
        if self._is_here and rounds >= _FEWEST_ROUNDS and fits and _can_run(source):
            self._on_progress("checking them against a whole step")
            whole = _checked(source, program, seconds, rounds)
            self.costs = replace(self.costs, whole_step=whole)


class PricedSource:
    """The step at other batch sizes, each on the price list as soon as it is captured."""

    def __init__(self, source: StepSource, prices: Prices) -> None:
        self._source = source
        self._prices = prices

    def graph(self, *, micro_batches: int) -> Graph:
        graph = self._source.graph(micro_batches=micro_batches)
        self._prices.know(graph)
        return graph

    def divisors(self) -> tuple[int, ...]:
        return self._source.divisors()

    def why_not_split(self) -> str | None:
        return self._source.why_not_split()


def _checked(source: StepSource, program: Program, seconds: float, rounds: int) -> Estimate:
    """Run the unplanned step on the user's model, and leave no trace of it."""
    captured = source.captured()
    step = LiveStep(source.model, program, constants=captured.constants, batch=source.batch)

    def run() -> None:
        step.backward(source.batch)
        step.zero_grad()

    with _untouched(source.model):
        return whole_step([Runnable(run=run, operator_seconds=seconds)], rounds=rounds)


def _can_run(source: StepSource) -> bool:
    """Whether a step on the live model is possible and leaves nothing behind."""
    parameters = list(source.model.parameters())
    return (
        not source.captured().is_grown
        and not _torch.any_hooks(parameters)
        and not source.is_imagined
    )


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and the random state back."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
