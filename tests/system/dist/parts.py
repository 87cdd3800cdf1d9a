"""Whole steps with tensors sharded over two ranks, and the report of each rank.

The placements are given by name: finding them is not tested here. Not for checking the results: the
tests do that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.capture.spmd.partition import partition
from steelyard.capture.step import CapturedStep
from steelyard.ir.collective import GLOO
from steelyard.predict.cost_table import CostTable
from steelyard.ir.graph import Node, Role
from steelyard.ir.sharding_choice import ShardingChoice
from steelyard.ir.placement import REPLICATE, Placement, Shard
from steelyard.ir.program import Program
from steelyard.comm.channel import Channel
from steelyard.measure.operators.memory import meter_once
from steelyard.predict import predict
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from tests import zoo
from tests.support.in_step import cut
from tests.system.dist.ranks import NUM_RANKS
from tests.system.dist.scenarios import COSTS, METERED, Patience, Recorder, planned_calls
from tests.harness import costs_of

_SEED = 3
_Choose = Callable[[str, Tensor], Placement]


def transformers(rank: int) -> dict[str, Any]:
    """Run a GPT with dropout, a Llama and a mixture of experts, sharded by columns, rows and
    vocabulary."""
    return {
        "gpt": _reported(rank, "gpt", _gpt),
        "gpt, stream in parts": _reported(
            rank, "gpt", _gpt, values=(("add", Shard(1)), ("add_1", Shard(1)))
        ),
        "llama": _reported(rank, "hf_llama", _llama),
        "mixtral": _reported(rank, "hf_mixtral", _mixtral),
    }


def others(rank: int) -> dict[str, Any]:
    """Run a ResNet with BatchNorm sharded by channels, and a mixture of experts with its own
    experts on each rank."""
    return {
        "resnet": _reported(rank, "resnet_bn", _channels),
        "moe": _reported(rank, "moe", _experts),
    }


def _reported(
    rank: int, name: str, choose: _Choose, values: tuple[tuple[str, Placement], ...] = ()
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, batch = zoo.case(name).make()
    captured = CapturedStep(model=model, loss=loss, batch=batch).captured()
    graph = captured.graph
    live = {f"parameter:{n}": p for n, p in model.named_parameters()}
    live |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    inputs = {
        node.name: choose(node.name.partition(":")[2], live[node.name])
        for node in graph.inputs()
        if graph.storages[node.outputs[0].storage].role in (Role.PARAMETER, Role.BUFFER)
    }
    choice = ShardingChoice(
        axis="tensor", num_ranks=NUM_RANKS, inputs=tuple(inputs.items()), values=values
    )
    program = Program.plain(partition(graph, choice, rank=rank, transport=GLOO))
    assert program.problems() == []
    assert dist.group.WORLD is not None
    live_step = partial(LiveStep, constants=captured.constants, batch=batch)
    alone = copy.deepcopy(model)
    whole = _left(live_step(alone, Program.plain(graph)), batch)
    mine = copy.deepcopy(model)
    for key, placement in inputs.items():
        _hold(mine, key.partition(":")[2], placement, rank)
    channels = {"tensor": Channel.of(dist.group.WORLD)}
    step = live_step(mine, program, runner=partial(emit, channels=channels))
    ours = _left(step, batch)
    with Recorder() as recorder:
        _left(step, batch)
    predicted = predict(program, _with_workspace(program))
    return {
        "error": _error(whole, ours, inputs, rank),
        "in_parts": sum(p != REPLICATE for p in inputs.values()),
        "executed": recorder.executed,
        "planned": planned_calls(program),
        "handed_bytes": recorder.handed_bytes,
        "sent_bytes": program.sent_bytes,
        "peak_bytes": _metered(mine, step, batch),
        "predicted_peak_bytes": int(predicted.metrics.memory_bytes.value)
        - predicted.peak.resident_bytes,
    }


def _with_workspace(program: Program) -> CostTable:
    """Add the workspace of convolutions to the costs; each call is metered alone."""
    graph = program.graph
    nodes = [_arrived(n) if n.collective or n.waits_for else n for n in graph.nodes]
    metered = costs_of(replace(graph, nodes=tuple(nodes)))
    return replace(metered, links=COSTS.links)


def _arrived(node: Node) -> Node:
    return replace(node, op="input", args=(), inputs=(), collective=None, waits_for="")


def _left(step: LiveStep, batch: Any) -> dict[str, Tensor]:
    """Return the loss and every gradient of one step, from the same seed each time."""
    step.model.zero_grad()
    torch.manual_seed(_SEED)
    loss = step.backward(batch)
    found = {"loss": loss.detach().clone()}
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            found[f"parameter:{name}"] = parameter.grad.clone()
    return found


def _error(
    whole: dict[str, Tensor], ours: dict[str, Tensor], inputs: dict[str, Placement], rank: int
) -> float:
    assert whole.keys() == ours.keys()
    largest = max(float(x.abs().max()) for name, x in whole.items() if name != "loss")
    worst = 0.0
    for name, expected in whole.items():
        mine = cut(expected, inputs.get(name, REPLICATE), rank, NUM_RANKS)
        # A gradient that is zero up to rounding (of a bias before BatchNorm) has no scale of its
        # own.
        scale = max(float(expected.abs().max()), largest / 100)
        worst = max(worst, float((ours[name] - mine).abs().max()) / scale)
    return worst


def _metered(model: nn.Module, step: LiveStep, batch: Any) -> int:
    peaks = []
    for _ in range(METERED):
        model.zero_grad()
        dist.barrier()
        with Patience():
            peaks.append(meter_once(lambda: step.backward(batch)).peak_bytes)
    return min(peaks)


def _hold(model: nn.Module, name: str, placement: Placement, rank: int) -> None:
    """Keep this rank's part of a parameter or buffer, in every place that holds it."""
    if placement == REPLICATE:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = tensors[name]
    part = cut(whole.detach(), placement, rank, NUM_RANKS).clone()
    held = nn.Parameter(part)  # the same parameter in each place to which it is tied
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter is whole:
                setattr(module, key, held)
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer is whole:
                setattr(module, key, part)


def _gpt(name: str, _: Tensor) -> Placement:
    if ".qkv." in name:
        return Shard(0, 3)
    if ".up." in name or name == "token.weight":
        return Shard(0)
    return Shard(1) if name.endswith(("out.weight", "down.weight")) else REPLICATE


def _llama(name: str, _: Tensor) -> Placement:
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    if name.endswith(tuple(f"{column}.weight" for column in columns)):
        return Shard(0)
    return Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else REPLICATE


def _mixtral(name: str, weight: Tensor) -> Placement:
    if name.endswith("experts.gate_up_proj"):
        return Shard(1, 2)
    return Shard(2) if name.endswith("experts.down_proj") else _llama(name, weight)


def _channels(name: str, tensor: Tensor) -> Placement:
    if tensor.dim() and ("conv1." in name or "norm1." in name):
        return Shard(0)
    return Shard(1) if "conv2." in name else REPLICATE


def _experts(name: str, _: Tensor) -> Placement:
    return Shard(0) if name.startswith("experts.") and name.endswith(("up", "down")) else REPLICATE
