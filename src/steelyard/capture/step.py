"""The user's training step, captured lazily for the whole batch or for equal parts of it.

``CapturedStep`` implements ``StepSource`` (ir/step_source.py) for the search, and gives run/ the
graph with its live tensors. The search gets graphs that are derived from that of the whole batch.
Not for tracing: see capture/tracing/joint_graph.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.batch.derived_graph import are_equal, with_samples
from steelyard.capture.batch.independence_proof import Reduction, Splitting
from steelyard.capture.batch.splitting import batch_size, entries, part, splitting
from steelyard.capture.checks.module_hooks import refuse_hooks
from steelyard.capture.checks.python_state_guards import StateGuards
from steelyard.capture.checks.wrapped_models import refuse_wrapped
from steelyard.capture.deep.equal_blocks import equal_runs
from steelyard.capture.deep.truncate import expand_runs
from steelyard.capture.deep.truncated_model import TruncatedModel, truncated_model
from steelyard.capture.eager_baseline import EagerBaseline, run_eager_baseline
from steelyard.capture.pipeline_stages import cut_into_stages, end_of, refuse_unknown_draws
from steelyard.capture.spmd.partition import partition
from steelyard.capture.spmd.shardable_regions import regions
from steelyard.capture.tracing.decompositions import table
from steelyard.capture.tracing.fake_execution import on_cpu, restoring_attributes_on_failure
from steelyard.capture.tracing.joint_graph import Loss, trace
from steelyard.capture.tracing.optimizer import (
    OptimizerFactory,
    ShardsByParameter,
    capture_update,
    leaner_settings,
)
from steelyard.capture.tracing.to_ir import to_graph
from steelyard.comm.devices import CPU, torch_device_of
from steelyard.comm.pipeline_schedules import order_under
from steelyard.errors import CaptureRefused
from steelyard.ir.collective import GLOO, NCCL, Transport
from steelyard.ir.graph import Graph, OutputKind
from steelyard.ir.optimizer_update import WEIGHT, update_of
from steelyard.ir.placement import Shard
from steelyard.ir.program import Pipeline, Program
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.passes.data_parallel.sync_batchnorm import normalising
from steelyard.plans.plan import BatchEntry

# The shards of each parameter, as (shard, number of ranks) for each mesh axis.
ParameterShards = tuple[tuple[str, tuple[tuple[Shard, int], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A step at one batch shape: the graph, and the live tensors it names as constants.

    ``is_grown`` means that the graph was expanded from three blocks of a deep model: it is for
    planning, and running the step needs a full trace.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    reads: StateGuards
    is_grown: bool = False


@dataclass(kw_only=True, eq=False)
class CapturedStep:
    """A training step that is captured lazily and cached, for each part of the batch.

    ``for_planning`` allows a deep model to be captured from three of its blocks. A step to be run
    needs a full trace.
    """

    model: nn.Module
    loss: Loss
    batch: Any
    decomposition: str = "python-2"
    for_planning: bool = False
    optimizer: OptimizerFactory | None = None
    _captured: dict[tuple[int, int], Captured] = field(default_factory=dict, init=False)
    _derived: dict[tuple[int, int], Graph | None] = field(default_factory=dict, init=False)
    _partitioned: dict[tuple[str, ShardingChoice, int], Graph] = field(
        default_factory=dict, init=False
    )
    _splitting: Splitting | None = field(default=None, init=False)
    _sharing: Splitting | None = field(default=None, init=False)
    _baseline: EagerBaseline | None = field(default=None, init=False)
    _stage_updates: dict[tuple[frozenset[str], tuple[ShardingChoice, ...]], Program] = field(
        default_factory=dict, init=False
    )
    _sharded_updates: dict[ParameterShards, Program] = field(default_factory=dict, init=False)

    @property
    def transport(self) -> Transport:
        """NCCL on GPUs (even if ranks share one GPU for testing), otherwise Gloo."""
        return GLOO if self._device == CPU else NCCL

    @cached_property
    def _device(self) -> torch.device:
        """The device of the model; the CPU for a model on the meta device."""
        return torch_device_of(self.model)

    def captured(self, *, micro_batches: int = 1, share: int = 1) -> Captured:
        """Return the captured step for ``share`` of ``micro_batches`` equal parts of the batch."""
        fraction = _reduced(share, micro_batches)
        known = self._captured.get(fraction)
        if known is None:
            known = self._capture(fraction)
            derived = self._derived.pop(fraction, None)
            if derived is not None and are_equal(derived, known.graph):
                known = replace(known, graph=derived)  # what was computed for it stays known
            self._captured[fraction] = known
        return known

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        """Return the graph for ``share`` of ``micro_batches`` equal parts of the batch.

        It is derived from the graph of the whole batch where that is possible. A step to be run is
        captured, and if the derived graph differs from that, it is not used any more.
        """
        fraction = _reduced(share, micro_batches)
        if fraction in self._captured:
            return self._captured[fraction].graph
        if fraction not in self._derived:
            self._derived[fraction] = self._derive(fraction)
        return (
            self._derived[fraction] or self.captured(micro_batches=micro_batches, share=share).graph
        )

    def is_as_derived(self, *, micro_batches: int, share: int = 1) -> bool:
        """Capture a part of the batch; True unless another graph was used for it until now."""
        derived = self._derived.get(_reduced(share, micro_batches))
        captured = self.captured(micro_batches=micro_batches, share=share)
        return derived is None or derived is captured.graph

    def constants(self, *, micro_batches: int, share: int = 1) -> Mapping[str, torch.Tensor]:
        """Return the live tensors that the graph of these parts names as constants."""
        fraction = _reduced(share, micro_batches)
        if self._derived.get(fraction) is not None and fraction not in self._captured:
            return self.captured().constants
        return self.captured(micro_batches=micro_batches, share=share).constants

    def rewritten(self, graph: Graph) -> Graph:
        return graph

    def divisors(self) -> tuple[int, ...]:
        size = batch_size(self.batch) or 1
        return tuple(k for k in range(1, size + 1) if size % k == 0)

    def why_not_split(self) -> str | None:
        return self.splitting().reason or None

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        del micro_batches, than, share  # a captured graph has no times
        return False

    @property
    def split_doubt(self) -> float:
        return 0.0

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        del micro_batches, share  # a captured graph has no costs
        return True

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        del micro_batches, share  # a captured graph has no costs

    def sharers(self) -> tuple[int, ...]:
        size = batch_size(self.batch) or 1
        # BatchNorm needs two samples per rank: a single one may have no variance.
        least = 2 if normalising(self.graph(micro_batches=1)) else 1
        return tuple(k for k in self.divisors() if k == 1 or size // k >= least)

    def why_not_shared(self) -> str | None:
        return self.sharing().reason or None

    def leaner_settings(self) -> tuple[str, ...]:
        return () if self.optimizer is None else leaner_settings(self.model, self.optimizer)

    def reduction(self) -> Reduction:
        """Return the rule that combines the losses of parts, which are micro-batches or on
        ranks.
        """
        return (self.sharing() if self.splitting().reason else self.splitting()).reduction

    def splitting(self) -> Splitting:
        if self._splitting is None:
            graph = self.graph(micro_batches=1)
            self._splitting = splitting(self.model, self.loss, self.batch, graph)
        return self._splitting

    def sharing(self) -> Splitting:
        """Return the verdict on sharing the batch among ranks, which compute their parts at the
        same time.
        """
        graph = self.graph(micro_batches=1)
        is_updating = any(output.kind is OutputKind.UPDATE for output in graph.outputs)
        if not is_updating and not normalising(graph):
            return self.splitting()
        if self._sharing is None:
            self._sharing = splitting(self.model, self.loss, self.batch, graph, at_once=True)
        return self._sharing

    def twin(self) -> EagerBaseline:
        """Return the eager baseline for the whole batch; extrapolated for a deep model."""
        if self._baseline is None:
            truncated = self._truncated
            self._baseline = (
                truncated.baseline if truncated else None
            ) or self._run_eager_baseline(self.model)
        return self._baseline

    def _run_eager_baseline(self, model: nn.Module) -> EagerBaseline:
        return run_eager_baseline(model, self.loss, self.batch)

    def update(self) -> Program | None:
        return None if self.optimizer is None else self._update(self.optimizer, {})

    def update_in_parts(self, update: Program, shardings: tuple[ShardingChoice, ...]) -> Program:
        """Return the optimizer ``update``, which is unsharded, with the graph for one rank's shards
        instead.
        """
        assert self.optimizer is not None, "a step with an update has an optimizer"
        shares = _shards_by_parameter(shardings)
        key = tuple((name, tuple(shards)) for name, shards in sorted(shares.items()))
        if key not in self._sharded_updates:
            self._sharded_updates[key] = self._update(self.optimizer, shares)
        sharded = self._sharded_updates[key]
        return replace(update, graph=sharded.graph, instructions=sharded.instructions)

    def _update(self, make: OptimizerFactory, shares: ShardsByParameter) -> Program:
        unused = frozenset(self.graph(micro_batches=1).unused)
        return capture_update(self.model, make, without_gradient=unused, shares=shares)

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        return regions(graph, num_ranks=num_ranks)

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        key = graph.fingerprint, choice, rank
        if key not in self._partitioned:
            self._partitioned[key] = partition(
                graph, choice, rank=rank, transport=self.transport, device=self._device
            )
        return self._partitioned[key]

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        graph = program.as_graph()
        refuse_unknown_draws(graph)
        module_by_end = {end_of(graph, module): module for module in ends}
        stages = cut_into_stages(graph, sorted(module_by_end, key=graph.position.__getitem__))
        order = order_under(
            schedule,
            num_ranks=num_ranks,
            num_stages=len(stages.stages),
            micro_batches=program.repeats,
        )
        pipeline = Pipeline(
            schedule=schedule, stages=stages, order=order, is_by_host=self._device != CPU
        )
        if program.update is None:
            return pipeline
        updates = (
            self._update_of_stage(program.update, pipeline.held(rank), program.shardings)
            for rank in range(num_ranks)
        )
        return replace(pipeline, updates=tuple(updates))

    def _update_of_stage(
        self, update: Program, parameters: frozenset[str], shardings: tuple[ShardingChoice, ...]
    ) -> Program:
        """Return the update of a pipeline stage, in which only these parameters have gradients."""
        restricted = update_of(update, {name.removeprefix(WEIGHT) for name in parameters})
        if restricted is not None:
            return restricted
        if (parameters, shardings) not in self._stage_updates:
            assert self.optimizer is not None, "a step with an update has an optimizer"
            named = (name for name, _ in self.model.named_parameters())
            without_gradient = {name for name in named if f"parameter:{name}" not in parameters}
            without_gradient |= set(self.graph(micro_batches=1).unused)
            self._stage_updates[parameters, shardings] = capture_update(
                self.model,
                self.optimizer,
                without_gradient=frozenset(without_gradient),
                shares=_shards_by_parameter(shardings),
            )
        captured = self._stage_updates[parameters, shardings]
        return replace(update, graph=captured.graph, instructions=captured.instructions)

    def entries(self) -> tuple[BatchEntry, ...]:
        return entries(self.batch)

    @property
    def is_imagined(self) -> bool:
        """True if some tensor is on the meta device: the step can be planned, but not run."""
        tensors = [*self.model.parameters(), *_tensors(self.batch)]
        return any(t.device.type == "meta" for t in tensors)

    def at(self, batch: Any, *, with_values: bool = True) -> "CapturedStep":
        """Return the same step on another batch.

        If the other batch has no values, the verdicts on splitting the current one are reused.
        """
        other = self._copy_with(batch=batch)
        if not with_values:
            other._splitting, other._sharing = self._splitting, self._sharing
        return other

    def on(self, model: nn.Module) -> "CapturedStep":
        """Return the same step on another model object."""
        return self._copy_with(model=model)

    def whole(self) -> "CapturedStep":
        """Return the step for running: traced in full, without truncated blocks."""
        return self._copy_with(for_planning=False) if self.captured().is_grown else self

    def _copy_with(self, **changed: Any) -> "CapturedStep":
        """Copy the step without its caches, which ``dataclasses.replace`` would carry over."""
        fields = ("model", "loss", "batch", "decomposition", "for_planning", "optimizer")
        return CapturedStep(**{**{name: getattr(self, name) for name in fields}, **changed})

    def _derive(self, fraction: tuple[int, int]) -> Graph | None:
        if fraction == (1, 1):
            return None
        size = batch_size(self.batch)
        if size is None or size % fraction[1]:
            return None
        after = size // fraction[1] * fraction[0]
        whole = self.graph(micro_batches=1)
        return with_samples(whole, before=size, after=after, device=self._device)

    def _capture(self, fraction: tuple[int, int]) -> Captured:
        refuse_wrapped(self.model)
        refuse_hooks(self.model)
        _refuse_opaque(self.batch)
        _refuse_layouts(self.batch)
        _refuse_gradient_inputs(self.batch)
        with restoring_attributes_on_failure(self.model):
            return self._capture_uncached(fraction)

    def _capture_uncached(self, fraction: tuple[int, int]) -> Captured:
        self.twin()  # first, so that the model's one-time initialization is done before tracing
        batch = self.batch
        share, parts = fraction
        if parts > 1:
            size = batch_size(batch)
            assert size is not None
            assert size % parts == 0
            batch = part(batch, start=0, size=size // parts * share)
        truncated = self._truncated
        if truncated is not None:
            captured = self._traced(truncated.truncation.model, batch)
            expanded = expand_runs(captured.graph, truncated.truncation.runs)
            if expanded is not None:
                # A first block whose inputs need no gradient differs only in the backward pass.
                expanded = replace(expanded, runs=equal_runs(self.model, expanded))
                return replace(captured, graph=expanded, is_grown=True)
        return self._traced(self.model, batch)

    @cached_property
    def _truncated(self) -> TruncatedModel | None:
        return truncated_model(self.model, self.loss, self.batch) if self.for_planning else None

    def _traced(self, model: nn.Module, batch: Any) -> Captured:
        with on_cpu(model, batch) as batch:
            traced = trace(model, self.loss, batch, decompositions=table(self.decomposition))
            graph = to_graph(traced, decomposition=self.decomposition)
        if graph.unused:
            self._check_unused(model, graph)
        graph = replace(graph, runs=equal_runs(model, graph))
        return Captured(graph=graph, constants=traced.constants, reads=traced.reads)

    def _check_unused(self, model: nn.Module, graph: Graph) -> None:
        """Refuse a graph without a gradient that eager PyTorch has: it would not be trained."""
        lost = set(graph.unused) - self._run_eager_baseline(model).without_gradient
        if lost:
            raise CaptureRefused(
                f"the captured step lost the gradient of {', '.join(sorted(lost)[:3])}"
                + (f" and {len(lost) - 3} more" if len(lost) > 3 else ""),
                expected="a gradient for every parameter that eager PyTorch trains",
                remedy="report this model; training it here would skip these parameters",
            )


def _reduced(share: int, micro_batches: int) -> tuple[int, int]:
    """Return ``share`` of ``micro_batches`` as a reduced fraction."""
    divisor = gcd(micro_batches, share)
    return share // divisor, micro_batches // divisor


def _shards_by_parameter(shardings: tuple[ShardingChoice, ...]) -> ShardsByParameter:
    """Return the shards of each parameter by its name."""
    found: dict[str, list[tuple[Shard, int]]] = {}
    for choice in shardings:
        for name, placement in choice.inputs:
            if isinstance(placement, Shard):
                found.setdefault(name.partition(":")[2], []).append((placement, choice.num_ranks))
    return found


def _refuse_opaque(batch: Any) -> None:
    """Refuse leaves other than tensors and plain values, because they could change unnoticed."""
    for path, leaf in _torch.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, _LEAVES):
            raise CaptureRefused(
                f"batch{_torch.keystr(path)} is a {type(leaf).__name__}",
                expected="tensors, numbers and strings in dicts, lists and tuples",
                remedy=_remedy_of(leaf),
            )


def _remedy_of(leaf: Any) -> str:
    if is_dataclass(leaf):
        return f"torch.export.register_dataclass({type(leaf).__name__}), once, before planning"
    if isinstance(leaf, Mapping):
        return "pass it as a dict: dict(batch)"
    return "turn it into tensors (torch.as_tensor)"


_LEAVES = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype)


def _refuse_layouts(batch: Any) -> None:
    """Refuse nested tensors, which may have no shape, and sparse ones, which have no strides."""
    for path, leaf in _torch.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
            kind = "a nested tensor" if leaf.is_nested else f"of layout {leaf.layout}"
            raise CaptureRefused(
                f"batch{_torch.keystr(path)} is {kind}",
                expected="dense tensors, because the program and its memory are planned by shapes",
                remedy="pad it (nested.to_padded_tensor(0.0)) and pass a mask"
                if leaf.is_nested
                else "pass it as .to_dense(), or pass its indices and values",
            )


def _refuse_gradient_inputs(batch: Any) -> None:
    for entry, leaf in zip(entries(batch), _tensors(batch), strict=True):
        if leaf.requires_grad:
            raise CaptureRefused(
                f"batch{entry.name} requires a gradient",
                expected="a batch without gradients, because only parameters are trained",
                remedy="detach it, or make it a parameter of the model",
            )


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor)]
