"""Costs from a file in place of measured ones, so that plans are the same on every machine."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import steelyard as sy
from steelyard.hardware.cluster import (
    OFFLOAD_IN,
    OFFLOAD_OUT,
    Cluster,
    LevelMember,
    OffloadMemory,
    TopologyLevel,
)
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link
from steelyard.ir.graph import Graph, Node
from steelyard.ir.metrics import Estimate
from steelyard.measure.links.link_figures import LinkMeasurement
from steelyard.planner import cost_provider as pricing
from steelyard.planner.calibration import StepCalibration
from steelyard.predict.cost_table import CostTable, OperatorCost, Survey

_COSTS = json.loads((Path(__file__).parent / "costs.json").read_text("utf-8"))


def this_machine(ranks: int = 1, offload_memory: OffloadMemory | None = None) -> sy.Cluster:
    """A cluster of processes here, each of which is the device of the file."""
    device = Device(is_here=True, **_COSTS["device"])
    member = LevelMember(of=device, count=ranks, link=_link("loopback", "all_reduce"))
    return Cluster(
        tree=TopologyLevel(name="here", members=(member,)), offload_memory=offload_memory
    )


@contextlib.contextmanager
def fixed_costs() -> Iterator[None]:
    """Within it nothing is measured."""
    with contextlib.ExitStack() as stack:
        for name, instead in (
            ("measure_operators", _operators),
            ("measured_ranks", _ranks),
            ("measured_links", _far),
            ("update_call_seconds", lambda *_, **__: _estimate(_COSTS["optimizer_call_seconds"])),
            ("is_virtual", lambda: False),
            ("quota_cores", lambda: math.inf),
        ):
            stack.enter_context(mock.patch.object(pricing, name, instead))
        # No step is run to check the sum of the operators by.
        stack.enter_context(mock.patch.object(StepCalibration, "_can_run", return_value=False))
        yield


def _operators(graphs: Sequence[Graph], device: Device, **_: Any) -> tuple[CostTable, Survey]:
    nodes = {n.signature: n for graph in graphs for n in graph.nodes if not n.is_free}
    costs = {
        signature: OperatorCost(seconds=_seconds(node), workspace_bytes=_workspace(node))
        for signature, node in nodes.items()
        if not node.is_transfer
    }
    return CostTable(device=device, operators=costs), Survey(measured=len(costs))


def _seconds(node: Node) -> Estimate:
    device = _COSTS["device"]
    computing = node.flops / device["flops_per_second"]
    moving = node.moved_bytes / device["bytes_per_second"]
    return _estimate(_COSTS["operators"]["call_seconds"] + max(computing, moving))


def _workspace(node: Node) -> int:
    """Only matrix products and the like have workspace, as kernels that pack their operands do."""
    share = _COSTS["operators"]["workspace"] if node.flops else 0.0
    return round(share * sum(output.nbytes for output in node.outputs))


def _estimate(seconds: float) -> Estimate:
    return Estimate.within(seconds, share=_COSTS["operators"]["share"])


def _link(kind: str, name: str) -> Link:
    return Link(kind=kind, doubt=0.15, **_COSTS["links"].get(name) or _COSTS[name])


def _ranks(*_: Any, **__: Any) -> LinkMeasurement:
    return LinkMeasurement(
        link=_link("loopback", "all_reduce"), handing=_link("loopback", "send"), near=None,
        speeds=(), slots=None, slotted=None, skew=None,
    )  # fmt: skip


def _far(*_: Any, **__: Any) -> tuple[dict[str, Link], tuple[str, ...]]:
    return dict.fromkeys((OFFLOAD_IN, OFFLOAD_OUT), _link("offload memory", "far")), ()
