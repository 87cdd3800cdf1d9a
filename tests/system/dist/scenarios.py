"""The work of each rank in the tests of this folder, and its reports.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard import _torch
from steelyard.capture.step import CapturedStep
from steelyard.hardware.cluster import Device, Link
from steelyard.ir.collective import GLOO, Exchange
from steelyard.predict.cost_table import CostTable
from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.comm.gloo import direct_collectives as directly
from steelyard.comm.channel import Channel
from steelyard.passes.data_parallel.all_reduce import bucketed_all_reduce
from steelyard.passes.data_parallel.shard_parameters import gathered
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
from steelyard.comm.tcp_quickack import QuickAcks
from steelyard.comm.gloo.thread_scheduling import LISTENER, take_turns
from steelyard.passes.data_parallel.overlap import issued_ahead, waits_within
from steelyard.measure.operators.memory import meter_once
from steelyard.predict import predict
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.trades.recompute import with_copies
from tests.system.dist.ranks import NUM_RANKS
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

COSTS = CostTable(
    device=Device(
        kind="declared", flops_per_second=1e10, bytes_per_second=1e10, memory_bytes=1 << 40
    ),
    links={
        axis: Link(kind="declared", latency_seconds=5e-5, bytes_per_second=1e8)
        for axis in ("data", "tensor")
    },
)
# The weight of a rank's loss in the mean over the whole batch.
_SHARE = 1 / NUM_RANKS
# Gloo frees a sum in its own thread, a moment after the wait, where the meter does not see it. So
# each measurement waits for that moment, and the least of several is taken.
METERED, _MOMENT_SECONDS = 8, 0.002


class Ranks:
    """A small GPT on this rank's share of the batch, with the gradients of the whole batch."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16, dropout=0.0)
        whole = tokens(2 * NUM_RANKS, 16, 64)
        self.batch = {key: x.chunk(NUM_RANKS)[rank].clone() for key, x in whole.items()}
        alone = copy.deepcopy(self.model)
        next_token_loss(alone, whole).backward()
        self.expected = _gradients(alone)
        self._captured = CapturedStep(
            model=self.model, loss=next_token_loss, batch=self.batch
        ).captured()
        assert dist.group.WORLD is not None
        self._channels = {"data": Channel.of(dist.group.WORLD)}

    def graph(self, *, sharded: tuple[str, ...] = ()) -> Graph:
        graph = self._captured.graph
        for parameter in sharded:
            graph = gathered(graph, [parameter], num_ranks=NUM_RANKS, transport=GLOO)
        return graph

    def program(self, bucket_bytes: int, *, sharded: tuple[str, ...] = ()) -> Program:
        return Program.plain(
            bucketed_all_reduce(
                self.graph(sharded=sharded),
                bucket_bytes=bucket_bytes,
                num_ranks=NUM_RANKS,
                transport=GLOO,
            )
        )

    def report(self, program: Program, *, sharded: tuple[str, ...] = ()) -> dict[str, Any]:
        assert program.problems() == []
        model, step = self._live(program, sharded)
        step.backward(self.batch, _SHARE)  # the first call allocates memory that stays allocated
        model.zero_grad()
        with Recorder() as recorder:
            step.backward(self.batch, _SHARE)
        gradients = _gradients(model)
        peaks = []
        for _ in range(METERED):
            model.zero_grad()
            dist.barrier()
            with Patience():
                peaks.append(meter_once(lambda: step.backward(self.batch, _SHARE)).peak_bytes)
        predicted = predict(program, COSTS)
        above = int(predicted.metrics.memory_bytes.value) - predicted.peak.resident_bytes
        return {
            "error": max(self._error(name, g, sharded) for name, g in gradients.items()),
            "digests": {name: _digest(g) for name, g in gradients.items()},
            "peak_bytes": min(peaks),
            "predicted_peak_bytes": above,
            "handed_bytes": recorder.handed_bytes,
            "sent_bytes": program.sent_bytes,
            "executed": recorder.executed,
            "planned": planned_calls(program),
        }

    def digests(self, *, sharded: tuple[str, ...]) -> dict[str, str]:
        """Return digests of each gradient after all-reduces, or of this rank's share of it."""
        model, step = self._live(self.program(8192), ())
        step.backward(self.batch, _SHARE)
        return {name: _digest(self._own(name, g, sharded)) for name, g in _gradients(model).items()}

    def _live(self, program: Program, sharded: tuple[str, ...]) -> tuple[nn.Module, LiveStep]:
        model = copy.deepcopy(self.model)
        for parameter in sharded:
            _cut(model, parameter.removeprefix("parameter:"), self.rank)
        step = LiveStep(
            model,
            program,
            constants=self._captured.constants,
            batch=self.batch,
            runner=partial(emit, channels=self._channels),
        )
        return model, step

    def _error(self, name: str, gradient: Tensor, sharded: tuple[str, ...]) -> float:
        expected = self._own(name, self.expected[name], sharded)
        return float((gradient - expected).abs().max() / expected.abs().max())

    def _own(self, name: str, whole: Tensor, sharded: tuple[str, ...]) -> Tensor:
        """Return this rank's part of a gradient: all of it, unless the parameter is sharded."""
        return whole.chunk(NUM_RANKS)[self.rank] if f"parameter:{name}" in sharded else whole


def reductions(rank: int) -> dict[str, Any]:
    """Run buckets of three sizes with two windows each, and report the listening sockets."""
    ranks = Ranks(rank)
    found = {
        f"{name}, window {window}": ranks.report(waits_within(ranks.program(nbytes), window))
        for name, nbytes in (("one each", 1), ("8 KiB", 8192), ("one bucket", 1 << 30))
        for window in (0, None)
    }
    take_turns()
    connections = len(QuickAcks()._connections)
    return {
        "programs": found,
        "listening": _listening(),
        "policies": _policies(LISTENER),
        "connections": connections,
    }


def _policies(thread: str) -> list[int]:
    """Return the kernel's scheduling policies of this process's threads with that name."""
    tasks = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() == thread]
    return [os.sched_getscheduler(int(task.name)) for task in tasks]


def parameters(rank: int) -> dict[str, Any]:
    """Shard one parameter, then every matrix; gathered weights are kept, or gathered again."""
    ranks = Ranks(rank)
    matrices = tuple(
        node.name
        for node in ranks.graph().inputs()
        if node.name.startswith("parameter:") and len(node.outputs[0].shape) > 1
    )
    found = {}
    for label, sharded in (("one", ("parameter:blocks.0.mlp.up.weight",)), ("all", matrices)):
        keep = ranks.program(8192, sharded=sharded)
        again = {f"{name}_gathered{end}" for name in sharded for end in ("", "_waited")}
        for kind, program in (("keep", keep), ("re-gather", with_copies(keep, again))):
            for window in (0, None) if label == "one" else (0, 2, None):
                found[f"{label}, {kind}, window {window}"] = ranks.report(
                    waits_within(program, window), sharded=sharded
                )
    ahead = issued_ahead(waits_within(with_copies(keep, again), 2), 5)
    found["all, re-gather, ahead"] = ranks.report(ahead, sharded=matrices)
    return {"programs": found, "expected_digests": ranks.digests(sharded=matrices)}


class Patience(_torch.TorchDispatchMode):  # type: ignore[misc] # torch does not type it
    """Gives gloo's threads time to free tensors before and after a wait.

    Then this thread frees them last, and the meter sees it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops._c10d_functional.wait_tensor.default:
            return func(*args, **(kwargs or {}))
        time.sleep(2 * _MOMENT_SECONDS)
        result = func(*args, **(kwargs or {}))
        time.sleep(_MOMENT_SECONDS)
        return result


class Sends:
    """The bytes that this rank's stages send to others, over the link or through slots."""

    def __enter__(self) -> Self:
        self.nbytes, self._made, self._sent = 0, dist.P2POp.__init__, SharedMemoryTransport.send

        def counted(operation: dist.P2POp, op: Any, tensor: Tensor, *more: Any, **named: Any) -> None:
            self.nbytes += tensor.nbytes if op is dist.isend else 0
            self._made(operation, op, tensor, *more, **named)

        def put(slots: SharedMemoryTransport, index: int, number: int, values: Sequence[Tensor]) -> None:
            self.nbytes += sum(value.nbytes for value in values)
            self._sent(slots, index, number, values)

        dist.P2POp.__init__, SharedMemoryTransport.send = counted, put
        return self

    def __exit__(self, *_: object) -> None:
        dist.P2POp.__init__, SharedMemoryTransport.send = self._made, self._sent


class Recorder(_torch.TorchDispatchMode):  # type: ignore[misc] # torch does not type it
    """Records the collectives that were executed, in order, and the bytes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: list[str] = []
        self.handed_bytes = self._last_bytes = 0
        self._kept = directly.hand_over, directly.DirectCollectives._register

    def __enter__(self) -> Self:
        hand_over, issue = self._kept

        def handed_over(kind: Exchange, parts: Sequence[Tensor], *rest: Any) -> Any:
            self._last_bytes = sum(part.nbytes for part in parts[1:])
            return hand_over(kind, parts, *rest)

        def issued(*given: Any) -> Tensor:  # records only what a line of the program asks for
            self.executed.append(_HANDED_OVER)
            self.handed_bytes += self._last_bytes
            return issue(*given)

        directly.hand_over, directly.DirectCollectives._register = handed_over, issued  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        directly.hand_over, directly.DirectCollectives._register = self._kept  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            name = func.overloadpacket.__name__
            self.executed.append(name)
            if name != "wait_tensor":
                self.handed_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def planned_calls(program: Program) -> list[str]:
    """Return the planned calls; all but sums are our own messages, whose waits are not torch
    calls."""
    nodes = program.graph.by_name
    names: list[str] = []
    for instruction in program.instructions:
        node = nodes[instruction.node]
        if instruction.sink is not None:
            continue
        if node.waits_for:
            sent = nodes[node.waits_for].collective
            assert sent is not None
            names += ["wait_tensor"] if sent.kind is Exchange.ALL_REDUCE else []
        elif node.collective is not None:
            is_ours = node.collective.kind is not Exchange.ALL_REDUCE
            names.append(_HANDED_OVER if is_ours else node.op.split(".")[1])
    return names


_HANDED_OVER = "handed over"


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def _digest(gradient: Tensor) -> str:
    return hashlib.sha256(gradient.contiguous().numpy().tobytes()).hexdigest()[:16]


def _cut(model: nn.Module, name: str, rank: int) -> None:
    """Keep this rank's share of a parameter, in every place that holds it."""
    whole = model.get_parameter(name)
    share = nn.Parameter(whole.detach().chunk(NUM_RANKS)[rank].clone())
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter is whole:
                setattr(module, key, share)


def _listening() -> list[str]:
    """Return the addresses on which this process listens, in the kernel's format (IPv4 and
    IPv6)."""
    mine = {
        link.readlink().as_posix() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    }
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                found.append(local.partition(":")[0])
    return found
