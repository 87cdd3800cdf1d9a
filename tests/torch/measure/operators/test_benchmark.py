import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph, Node
from steelyard.measure.cache import CostCache
from steelyard.measure.operators.benchmark import measure_operators
from steelyard.measure.operators.memory import meter
from steelyard.measure.operators.timer import Clock
from steelyard.predict.cost_table import Missing, OperatorCost
from tests.support.calls import graph_of

DEVICE = Device(
    kind="cpu of a test", flops_per_second=40e9, bytes_per_second=8e9, memory_bytes=1 << 30
)
X = torch.zeros(64, 256)


def some_graph() -> Graph:
    return graph_of(
        ("aten.relu.default", [X], [X.clone()]),
        ("aten.logsumexp.default", [X, [1]], [torch.zeros(64)]),
        ("aten.mm.default", [X, X.t()], [torch.zeros(64, 64)]),
    )


def computed(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if not node.is_input]


IMAGES, KERNELS = torch.zeros(2, 3, 16, 16), torch.zeros(8, 3, 3, 3)
CALLS = {
    "no workspace": ("aten.relu.default", [X], lambda: torch.relu(X)),
    "temporaries": ("aten.logsumexp.default", [X, [1]], lambda: torch.logsumexp(X, 1)),
    "convolution": (
        "aten.convolution.default",
        [IMAGES, KERNELS, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1],
        lambda: torch.conv2d(IMAGES, KERNELS, padding=1),
    ),
    "strided": ("aten.cumsum.default", [X.t(), 0], lambda: X.t().cumsum(0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_workspace_is_the_peak_of_a_call_beyond_its_result(name: str) -> None:
    op, args, again = CALLS[name]
    with torch.no_grad():
        result = again()
        metered = meter(again)
    graph = graph_of((op, args, [result]))
    costs, survey = measure_operators([graph], DEVICE)
    workspace = costs.workspace_bytes(graph.nodes[-1])
    assert survey.measured == 1
    assert workspace == metered.peak_bytes - metered.left_bytes
    if name in ("no workspace", "temporaries"):
        assert (workspace > 0) == (name == "temporaries")


def test_every_distinct_operator_is_measured_once() -> None:
    graph = some_graph()
    costs, survey = measure_operators([graph, graph], DEVICE)
    assert (survey.measured, survey.known, survey.unmeasured) == (3, 0, ())
    assert survey.notes == ()
    for node in graph.nodes:
        assert costs.is_measured(node)
    for node in computed(graph):
        assert 0 < costs.seconds(node).low <= costs.seconds(node).high


def test_rounds_end_as_soon_as_their_halves_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(times: Iterable[float]) -> int:
        source = iter(times)
        taken = []

        def seconds(_clock: Clock, call: Callable[[], object]) -> float:
            call()
            taken.append(next(source))
            return taken[-1]

        monkeypatch.setattr(Clock, "seconds", seconds)
        graph = graph_of(("aten.relu.default", [X], [X.clone()]))
        measure_operators([graph], DEVICE)
        return len(taken)

    assert rounds(itertools.repeat(1e-3)) == 6
    assert rounds(itertools.cycle([1e-3, 1.1e-3])) == 15
    # Single slow calls do not count: each half has its median.
    assert rounds(itertools.chain([1e-3, 1e-3, 5e-3], itertools.repeat(1e-3))) == 6


def test_known_operators_are_not_measured_again(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    first, _ = measure_operators([some_graph()], DEVICE, cache=cache)
    second, survey = measure_operators([some_graph()], DEVICE, cache=cache)
    assert (survey.measured, survey.known) == (0, 3)
    assert second.operators == first.operators


def test_measurements_of_another_process_meanwhile_are_used(tmp_path: Path) -> None:
    first, _ = measure_operators([some_graph()], DEVICE, cache=CostCache(tmp_path / "costs.sqlite"))

    class EarlyCache(CostCache):
        """A cache whose first read finds nothing, as if it came too early."""

        looked = False

        def read(self, context: str, signatures: Sequence[str]) -> dict[str, OperatorCost]:
            found = super().read(context, signatures) if self.looked else {}
            self.looked = True
            return found

    second, survey = measure_operators(
        [some_graph()], DEVICE, cache=EarlyCache(tmp_path / "costs.sqlite")
    )
    assert (survey.measured, survey.known) == (3, 0)
    assert second.operators == first.operators


def test_without_time_to_measure_costs_are_declared_with_a_note() -> None:
    graph = some_graph()
    costs, survey = measure_operators([graph], DEVICE, seconds_budget=0.0)
    assert survey.measured == 0
    assert survey.count(Missing.NO_TIME) == 3
    (note,) = survey.notes
    assert "3 operators not measured" in note
    for node in computed(graph):
        assert costs.seconds(node).value > 0
        assert not costs.is_measured(node)


def test_failing_operators_are_named_and_never_free() -> None:
    graph = graph_of(
        ("aten.relu.default", [X], [X.clone()]), ("aten.mm.default", [X, X], [X.clone()])
    )
    costs, survey = measure_operators([graph], DEVICE)
    (failed,) = survey.unmeasured
    assert failed.why is Missing.FAILED
    assert failed.signature == graph.nodes[-1].signature
    assert "RuntimeError" in failed.detail
    assert any("fails when called on its own" in note for note in survey.notes)
    assert costs.seconds(graph.nodes[-1]).value > 0


def test_too_large_operators_are_not_run() -> None:
    huge = torch.zeros(1 << 20, 1 << 30, device="meta")
    graph = graph_of(("aten.relu.default", [torch.zeros(1).expand(4)], [huge]))
    _, survey = measure_operators([graph], DEVICE)
    assert survey.count(Missing.TOO_LARGE) == 1
    assert "PiB" in survey.unmeasured[0].detail or "TiB" in survey.unmeasured[0].detail


def test_results_larger_than_in_the_graph_are_reported() -> None:
    # In torch 2.13 the scalar shares the storage of the losses from which it was reduced.
    y = X.clone()
    graph = graph_of(("aten.mse_loss.default", [X, y], [torch.zeros(())]))
    _, survey = measure_operators([graph], DEVICE)
    (note,) = survey.notes
    assert "aten.mse_loss.default take 64.0 KiB more" in note


def test_results_with_other_strides_than_in_the_graph_are_reported() -> None:
    as_said = ("aten.relu.default", [X.t()], [X.clone().t()])
    otherwise = ("aten.neg.default", [X.t()], [X.t().contiguous()])
    _, survey = measure_operators([graph_of(as_said, otherwise)], DEVICE)
    (note,) = survey.notes
    assert note.startswith("aten.neg.default returns results in another layout")


def test_collectives_are_not_measured_as_operators() -> None:
    sent = ("_c10d_functional.all_reduce.default", [X, "sum", "0"], [X.clone()])
    waited = ("_c10d_functional.wait_tensor.default", [X], [X.clone()])
    _, survey = measure_operators([graph_of(sent, waited)], DEVICE)
    assert survey.count(Missing.EXCHANGES) == 2
    # Its link is measured, so no note is needed.
    assert not any("operators not measured" in note for note in survey.notes)


@pytest.mark.parametrize("fused", [False, True])
def test_foreach_optimizers_are_measured(fused: bool) -> None:
    lists = [[torch.zeros(8, 8), torch.zeros(3)] for _ in range(4)]
    if fused:
        steps = [torch.zeros(()), torch.zeros(())]
        graph = graph_of(("aten._fused_adamw_.default", [*lists, [], steps], []))
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        graph = _with_kwargs(graph, tuple({**options, **flags}.items()))
    else:
        graph = graph_of(("aten._foreach_add_.List", lists[:2], []))
    node = graph.nodes[-1]
    costs, survey = measure_operators([graph], DEVICE)
    assert survey.unmeasured == ()
    assert costs.is_measured(node)
    assert costs.workspace_bytes(node) == 0


def _with_kwargs(graph: Graph, kwargs: tuple[tuple[str, float], ...]) -> Graph:
    return replace(graph, nodes=(*graph.nodes[:-1], replace(graph.nodes[-1], kwargs=kwargs)))


def test_measuring_leaves_the_users_random_stream_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    _, survey = measure_operators([graph_of(("aten.bernoulli.p", [X, 0.5], [X.clone()]))], DEVICE)
    assert survey.measured == 1
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()
