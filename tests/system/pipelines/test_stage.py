"""A step in stages, one after the other in one process, equals the whole step: for idioms and
for models of each kind, cut after some of their modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import _torch
from steelyard.capture.pipeline_stages import cut_into_stages, end_of
from steelyard.capture.step import CapturedStep
from steelyard.errors import BadInput
from steelyard.ir.graph import Graph, OutputKind
from steelyard.ir.pipeline_stages import PipelineStages
from steelyard.run.binding import BatchLayout, live_tensors
from steelyard.run.pipeline.stage import LiveStage, Values, keep_only
from tests import zoo
from tests.support.stepping import SEED, live
from tests.system.zoo.test_zoo import SLOW
from tests.zoo import Case, reference

_ROUNDING = 1e-12
# Models that name a dtype themselves, so that they do not run in double precision.
_AS_THEY_COME = frozenset({
    "edge_complex_layers", "edge_int_and_bool_inputs", "edge_label_smoothing", "edge_distillation",
    "edge_method_loss", "edge_autocast_nested", "edge_bf16_model",
})  # fmt: skip
# Their backward pass draws random numbers, or has an operator that might.
_REFUSED = frozenset({"edge_autograd_function", "hf_olmoe"})
# Hooks of parameters run at the end of a backward pass, so a pipeline refuses them.
_HOOKED = frozenset({"edge_tensor_hook", "edge_post_accumulate_hook"})
# The number of single cuts of a model, spread over its modules; one more cut makes many stages.
_MOST_CUTS = 2
# One model of each kind: encoder and decoder, experts, state space, recurrent, convolutional; and
# idioms.
_KINDS = frozenset({
    "gpt", "resnet_bn", "lstm", "moe", "hf_t5", "hf_llama", "hf_mixtral", "hf_mamba2", "hf_clip",
    "hf_olmoe", "edge_tied_three_ways", "edge_tied_transposed", "edge_module_called_twice",
    "edge_frozen_block", "edge_frozen_embedding", "edge_unused_parameter", "edge_zero_gradient",
    "edge_parameters_in_one_storage", "edge_complex_parameter", "edge_weight_norm",
    "edge_spectral_norm", "edge_buffer_written", "edge_buffer_not_persistent",
    "edge_inplace_activations", "edge_inplace_views", "edge_two_inputs", "edge_nested_batch",
    "edge_constants_in_batch", "edge_repeated_batch_tensor", "edge_int_and_bool_inputs",
    "edge_penalty_on_parameters", "edge_distillation", "edge_method_loss", "edge_autocast_nested",
    "edge_bf16_model", "edge_channels_last", "edge_autograd_function", "edge_dropout_variants",
    "edge_random_draws", "edge_lstm_on_data", "edge_user_checkpoint", "edge_no_grad_inside",
})  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in SLOW else [])
        for c in zoo.CASES
        if c.name not in _HOOKED and c.name in _KINDS
    ],
)
def test_stages_in_sequence_equal_the_whole_step(case: Case) -> None:
    model, loss, batch = case.make()
    if case.name not in _AS_THEY_COME:
        model, batch = model.double(), _double(batch)
    source = CapturedStep(model=model, loss=loss, batch=batch)
    captured = source.captured()
    start = copy.deepcopy(model.state_dict())
    step = live(source)
    torch.manual_seed(SEED)
    expected = (step.backward(batch).clone(), *_left(model))
    for cut in _cuts(captured.graph):
        try:
            stages = cut_into_stages(captured.graph, cut)
        except BadInput as refusal:
            is_late = "after the loss" in refusal.happened
            assert case.name in _REFUSED or is_late, refusal  # noqa: PT017 - refused cuts are no law
            continue
        given = _given(captured.graph, source)
        for is_split in (False, True):
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            tensors = live_tensors(model, captured.constants)
            torch.manual_seed(SEED)
            value = _run([LiveStage(s, live=tensors) for s in stages.stages], given, is_split)
            actual = (value, *_left(model))
            assert _gap(expected, actual) <= _ROUNDING, (cut, is_split)


def _double(batch: Any) -> Any:
    return _torch.tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.dtype is torch.float32 else x, batch
    )


def _cuts(graph: Graph) -> list[list[str]]:
    """Yield cuts after single modules, and after several at the same time."""
    (loss,) = (o.node for o in graph.outputs if o.kind is OutputKind.LOSS)
    last: dict[str, str] = {}
    for node in graph.forward():
        path = node.path
        while path and graph.position[node.name] < graph.position[loss]:
            last[path] = node.name
            path = path.rpartition(".")[0]
    ends = sorted(set(last.values()), key=graph.position.__getitem__)
    several = ends[:: max(1, len(ends) // 4)]
    return [[end] for end in ends[:: max(1, len(ends) // _MOST_CUTS)]] + [several] * bool(ends)


def _given(graph: Graph, source: CapturedStep) -> Values:
    layout = BatchLayout(source.batch)
    leaves = dict(zip(layout.names, layout.leaves(source.batch)))
    (planned,) = graph.by_name["tangent"].outputs
    return leaves | {"tangent": torch.ones(planned.shape, dtype=getattr(torch, planned.dtype))}


def _run(stages: list[LiveStage], given: Values, is_split: bool) -> Tensor:
    """Run the stages; sent values are copied, so that stages share nothing else."""
    values = [dict(given) for _ in stages]
    loss = None
    for index, stage in enumerate(stages):
        _send(values, index - 1, index, stage.stage.receives)
        loss = stage.forward(values[index])
        keep = (*given, *stage.stage.kept, *stage.stage.sends)
        keep_only(values[index], dict.fromkeys(keep))
    for index, stage in reversed(list(enumerate(stages))):
        _send(values, index + 1, index, stage.stage.receives_back)
        if not is_split:
            stage.backward(values[index])
            continue
        stage.back_to_inputs(values[index])
        between = {name: values[index][name] for name in (*given, *stage.stage.kept_between)}
        stage.back_to_weights(between)
    assert loss is not None
    return loss


def _send(values: list[Values], source: int, target: int, names: tuple[str, ...]) -> None:
    values[target].update({name: values[source][name].clone() for name in names})


def _left(model: torch.nn.Module) -> tuple[Any, Any]:
    return reference.gradients(model), reference.buffers(model)


def _gap(expected: Any, actual: Any) -> float:
    """Return the largest difference, relative to the largest element of each tensor.

    A gradient that is zero up to rounding (of a key's bias) is not compared.
    """
    pairs = [(expected[0], actual[0])]
    pairs += [(expected[k][name], actual[k][name]) for k in (1, 2) for name in expected[k]]
    worst = 0.0
    for left, right in pairs:
        if left is None or right is None:
            assert left is right
        elif left.numel():
            wide = torch.complex128 if left.is_complex() else torch.float64
            scale = left.to(wide).abs().nan_to_num(0).max().clamp(min=1e-9)
            gap = (left.to(wide) - right.to(wide)).abs()
            gap[left.isnan() & right.isnan()] = 0
            worst = max(worst, float(gap.max() / scale))
    return worst


# --- the tensors of each stage --------------------------------------------------------------------


def _stages_of_gpt() -> PipelineStages:
    model, loss, batch = zoo.case("gpt").make()
    graph = CapturedStep(model=model, loss=loss, batch=batch).graph(micro_batches=1)
    return cut_into_stages(graph, [end_of(graph, "dropout"), end_of(graph, "blocks.0")])


def test_a_stage_holds_its_own_parameters_and_tied_ones_are_shared() -> None:
    stages = _stages_of_gpt()
    assert stages.shared == (("parameter:token.weight", (0, 2)),)
    first, second, third = (set(s.held) for s in stages.stages)
    assert first == {"parameter:token.weight", "parameter:position.weight"}
    assert all(name.startswith("parameter:blocks.0.") for name in second)
    assert first & third == {"parameter:token.weight"}
    assert not second & third


def test_a_stage_sends_an_activation_and_receives_its_gradient() -> None:
    """The cut is between blocks: no mask, no saved value and no part of a tied gradient crosses
    it."""
    stages = _stages_of_gpt()
    assert [len(s.sends) for s in stages.stages] == [1, 1, 0]
    assert [len(s.sends_back) for s in stages.stages] == [0, 1, 1]


def test_input_and_weight_gradients_together_are_the_backward_pass() -> None:
    for stage in _stages_of_gpt().stages:
        parts = (stage.back_to_inputs, stage.back_to_weights)
        assert sum(part.flops for part in parts) == stage.backward.flops
        # Nothing needs the gradient of the first stage's inputs.
        assert (stage.back_to_inputs.flops > 0) == (stage.index > 0)
        assert (stage.back_to_weights.flops > 0) == (stage.index > 0)
        for part in (stage.forward, stage.backward, *parts):
            assert not part.problems()


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (["blocks.1", "blocks.0"], "the stages end after"),
        (["blocks.0", "blocks.0"], "the stages end after"),
        (["nowhere"], "computes nothing"),
    ],
)
def test_invalid_stage_ends_are_refused(ends: list[str], says: str) -> None:
    model, loss, batch = zoo.case("gpt").make()
    graph = CapturedStep(model=model, loss=loss, batch=batch).graph(micro_batches=1)
    with pytest.raises(BadInput, match=says) as caught:
        cut_into_stages(graph, [end_of(graph, end) for end in ends])
    assert len(str(caught.value).splitlines()) == 3


def test_a_stage_behind_the_loss_is_refused() -> None:
    model, loss, batch = zoo.case("mlp").make()
    graph = CapturedStep(model=model, loss=loss, batch=batch).graph(micro_batches=1)
    (end,) = (o.node for o in graph.outputs if o.kind is OutputKind.LOSS)
    with pytest.raises(BadInput, match="after the loss"):
        cut_into_stages(graph, [end])
