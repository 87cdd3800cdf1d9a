"""Probes the accuracy of lossy plans: the 8-bit error of each activation, the drift of the loss.

The captured step runs on copies of all tensors that it writes, so the user's model, optimizer,
gradients, buffers and random state stay unchanged. Several ranks are simulated. Not for deciding:
see lossy.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.batch.splitting import batch_size
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.comm.channel import Channel
from steelyard.comm.devices import torch_device_of
from steelyard.comm.simulated_ranks import SimulatedRanks
from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.graph import Node, Output, OutputKind, Phase, Ref, Role, Storage, Tensor
from steelyard.ir.parallel_layout import ALONE, DATA
from steelyard.ir.program import Instruction, Program
from steelyard.ir.saved_activations import first_backward_line
from steelyard.measure.device_memory import random_devices
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.offload.tier import OffloadFile
from steelyard.plans.accuracy import Drift
from steelyard.run.binding import BatchLayout, BoundProgram, live_tensors, shapes_of
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep

STEPS = 10
# The length of the second probe, which runs if the budget lies within the interval of the first
# one.
MORE_STEPS = 30
_SEED = 0


def quantization_errors(
    source: CapturedStep, base: Program, values: Iterable[str], *, probe: str
) -> dict[str, float]:
    """Return the error of each value on the user's batch, as a share of its norm.

    ``probe`` is the operator that computes the error of one value. Only the forward pass runs, and
    it saves nothing for a backward pass.
    """
    captured = source.captured()
    program = _with_error_probes(base, values, probe)
    layout = BatchLayout(source.batch, unread=captured.reads.unread)
    leaves = layout.leaves(source.batch)
    bound = BoundProgram(
        program,
        emit(program),
        live=live_tensors(source.model, captured.constants),
        names=layout.names,
        shapes=shapes_of(leaves),
    )
    found: dict[str, float] = {}

    def recorder(value: str) -> Callable[[torch.Tensor], None]:
        return lambda error: found.update({value: float(error)})

    sinks = [recorder(i.sink.target) for i in program.instructions if i.sink is not None]
    devices = random_devices(torch_device_of(source.model))
    with torch.random.fork_rng(devices=devices), torch.no_grad(), _torch.below_autograd():
        bound.run(
            bound.inputs(leaves, 0, torch.zeros((), device=torch_device_of(source.model))), sinks
        )
    return found


def _with_error_probes(base: Program, values: Iterable[str], probe: str) -> Program:
    """Return the forward pass, with a measurement of the error after each line that makes a value.

    Its writes into the model are dropped.
    """
    graph = base.graph
    errors = {
        value: _error_of(graph.by_name[value], probe, number=len(graph.storages) + place)
        for place, value in enumerate(sorted(values))
    }
    lines = [i for i in base.instructions if i.sink is None]
    probed: list[Instruction] = []
    for line in lines[: first_backward_line(lines)]:
        probed.append(line)
        if line.value in errors:
            node = errors[line.value]
            probed.append(
                Instruction(
                    node=node.name, value=node.name, inputs=node.inputs, phase=Phase.FORWARD
                )
            )
    losses = tuple(o for o in graph.outputs if o.kind is OutputKind.LOSS)
    probes = tuple(
        Output(kind=OutputKind.GRADIENT, node=node.name, target=value)
        for value, node in errors.items()
    )
    probed_graph = replace(
        graph,
        nodes=(*graph.nodes, *errors.values()),
        storages=(*graph.storages, *(Storage(nbytes=8, role=Role.ACTIVATION) for _ in errors)),
        outputs=(*losses, *probes),
    )
    return Program.of(probed_graph, probed)


def _error_of(node: Node, probe: str, *, number: int) -> Node:
    return Node(
        name=f"{node.name}.error",
        op=probe,
        args=(Ref(node.name),),
        inputs=(node.name,),
        outputs=(Tensor(shape=(), stride=(), dtype="float64", storage=number),),
        phase=Phase.BACKWARD,
        signature=probe,
    )


def drift(ours: Sequence[float], theirs: Sequence[float], *, source: CapturedStep) -> Drift:
    """Return the relative difference of the losses of two twin runs, step by step."""
    shares = tuple(_share(a, b) for a, b in zip(ours, theirs, strict=True))
    return Drift(shares=shares, items=batch_size(source.batch) or 1)


def _share(ours: float, theirs: float) -> float:
    """Return the relative difference; it is infinite or not a number if a loss is."""
    if ours == theirs:
        return 0.0 * ours
    return abs(ours - theirs) / abs(theirs) if theirs else float("inf")


def losses(
    source: CapturedStep,
    program: Program,
    *,
    optimizer: OptimizerFactory,
    offload_memory: OffloadMemory | None,
    steps: int = STEPS,
) -> list[float]:
    """Return the losses of a copy of the current model, trained on the one batch from a fixed seed.

    A program for several ranks runs on simulated ranks, each with its own batch share.
    """
    with torch.random.fork_rng(devices=random_devices(torch_device_of(source.model))):
        torch.manual_seed(_SEED)
        if program.layout == ALONE:
            return _trained(
                source,
                program,
                optimizer=optimizer,
                offload_memory=offload_memory,
                channels={},
                rank=0,
                steps=steps,
            )
        together = SimulatedRanks(program.layout.num_ranks, torch_device_of(source.model))
        channels = [{DATA: together.channel(r)} for r in range(program.layout.num_ranks)]
        by_share = {each.share: each for each in (program, *program.sibling_programs)}
        own = [by_share[share] for share in program.layout.portions]
        found: list[float] = together.run(
            lambda rank: _trained(
                source,
                own[rank],
                optimizer=optimizer,
                offload_memory=offload_memory,
                channels=channels[rank],
                rank=rank,
                steps=steps,
            )
        )[0]
        return found


def _trained(
    source: CapturedStep,
    program: Program,
    *,
    optimizer: OptimizerFactory,
    offload_memory: OffloadMemory | None,
    channels: Mapping[str, Channel],
    rank: int,
    steps: int,
) -> list[float]:
    captured = source.captured(micro_batches=program.units, share=program.share)
    twin = _twin(source.model)
    batch = _torch.tree_map(_copy, source.batch)
    memory = (
        OffloadFile(offload_memory) if offload_memory is not None and program.is_moving else None
    )
    own, states = optimizer(twin.parameters()), None
    if memory is not None and program.offloaded_nbytes:
        named = dict(twin.named_parameters())
        states = OffloadedStates(own, program, parameters=named, memory=memory)
    step = LiveStep(
        twin,
        program,
        constants={name: _copy(tensor) for name, tensor in captured.constants.items()},
        batch=batch,
        optimizer=own,
        states=states,
        reduction=source.reduction().value if program.parts > 1 else "mean",
        runner=partial(
            emit,
            channels=channels,
            offload_file=memory,
            tensors=states.tensors if states else None,
        ),
        reads=captured.reads,
        rank=rank,
    )
    return [float(step(batch)) for _ in range(steps)]


def _twin(model: nn.Module) -> nn.Module:
    """Return a module with copies of the parameters and buffers, under the same names.

    It has no ``forward``, because the program is the step. Tied weights have one name and stay
    tied.
    """
    twin = nn.Module()
    for name, parameter in model.named_parameters():
        own = nn.Parameter(_copy(parameter), requires_grad=parameter.requires_grad)
        _module_of(twin, name).register_parameter(name.rpartition(".")[2], own)
    for name, buffer in model.named_buffers():
        _module_of(twin, name).register_buffer(name.rpartition(".")[2], _copy(buffer))
    return twin


def _module_of(twin: nn.Module, name: str) -> nn.Module:
    for part in name.split(".")[:-1]:
        inner = getattr(twin, part, None)
        if inner is None:
            inner = nn.Module()
            twin.add_module(part, inner)
        twin = inner
    return twin


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
