"""With workspaces, the predicted peak equals the metered peak of a whole step to the byte."""

from collections.abc import Callable

import pytest
import torch

from steelyard import _torch
from steelyard.capture.tracing.decompositions import table
from steelyard.capture.tracing.joint_graph import trace
from steelyard.capture.tracing.to_ir import to_graph
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.measure.operators.benchmark import measure_operators
from steelyard.measure.operators.inputs import InputFactory
from steelyard.measure.operators.memory import meter
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import liveness
from steelyard.run.codegen import emit
from tests.zoo import case

DEVICE = Device(
    kind="cpu of a test", flops_per_second=40e9, bytes_per_second=8e9, memory_bytes=1 << 30
)
_TABLE = "python-2"


def runnable(program: Program) -> Callable[[], object]:
    """Return the program on random inputs; gradients live as long as its results."""
    emitted = emit(program)
    source = InputFactory(torch.device("cpu"))
    nodes = program.graph.by_name
    inputs = [source.tensor(nodes[name].outputs[0]) for name in emitted.inputs]
    kinds = [i.sink.kind for i in program.instructions if i.sink is not None]

    def run() -> object:
        gradients: list[torch.Tensor] = []
        sinks = [gradients.append if kind == "gradient" else _dropped for kind in kinds]
        with torch.no_grad(), _torch.below_autograd():
            return emitted.run(inputs, sinks), gradients

    return run


def _dropped(_: torch.Tensor) -> None:
    return None


def graph_of(name: str) -> Graph:
    model, loss, batch = case(name).make()
    traced = trace(model, loss, batch, decompositions=table(_TABLE))
    return to_graph(traced, decomposition=_TABLE)


@pytest.mark.slow
def test_mixed_precision_is_measured_although_kernels_keep_other_dtypes() -> None:
    _, survey = measure_operators([graph_of("edge_autocast_bf16")], DEVICE)
    assert survey.unmeasured == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "resnet_bn",
        "gpt",
        "edge_conv_transpose",
        "edge_fft",
        "edge_embedding_bag_max",
        "edge_turned_gradients",
    ],
)
def test_predicted_peak_is_metered_peak(name: str) -> None:
    program = Program.plain(graph_of(name))
    costs, survey = measure_operators([program.graph], DEVICE)
    assert (survey.unmeasured, survey.notes) == ((), ())
    metered = meter(runnable(program))
    predicted = liveness(program, costs)
    assert predicted.peak_bytes == metered.peak_bytes
    assert predicted.left_bytes == metered.left_bytes
    without = liveness(program, CostTable(device=DEVICE)).peak_bytes
    assert (without < metered.peak_bytes) == (name != "gpt")
