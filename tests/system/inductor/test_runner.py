"""The Inductor runner: its results, its memory, and that it keeps the decisions of the plan."""

import copy
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.tracing.decompositions import table
from steelyard.capture.tracing.joint_graph import trace
from steelyard.capture.tracing.to_ir import to_graph
from steelyard.errors import BadInput, RunFailed
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import OutputKind, Phase
from steelyard.ir.program import Instruction, Program
from steelyard.measure.operators.memory import meter
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import liveness
from steelyard.run.codegen import Emitted
from steelyard.run.compiled import inductor
from steelyard.run.compiled.inductor import compile_program
from steelyard.run.compiled.lower import lower
from steelyard.run.compiled.segments import Segment, segments
from steelyard.run.step import LiveStep
from steelyard.trades.recompute import recomputable, with_copies
from tests.zoo import case as case_named
from tests.zoo.own import MoE

# All tests that compile run on one worker.
pytestmark = pytest.mark.xdist_group("inductor")

FREE = CostTable(
    device=Device(kind="any", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=2**30)
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(self.drop(hidden)))


class Blocks(nn.Module):
    """Blocks with two dropouts each, normalisation with running statistics, and a shared weight."""

    def __init__(self, width: int = 16, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.last = nn.BatchNorm1d(width)
        self.first_bias = nn.Parameter(torch.zeros(width))
        self.second_bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Both biases get the same gradient, but each gradient must own its storage.
        x = x + (self.first_bias + self.second_bias)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Case:
    """A captured model, which any runner can run from the same state."""

    def __init__(self, model: nn.Module, batch: torch.Tensor) -> None:
        self.model, self.batch = model, batch
        traced = trace(model, loss_of, batch, decompositions=table("inductor-1"))
        self.constants = traced.constants
        plain = Program.plain(to_graph(traced, decomposition="inductor-1"))
        again = recomputable(plain.graph)
        self.programs = {"plain": plain, "copies": with_copies(plain, again)}
        self._state = copy.deepcopy(model.state_dict())

    def step(self, which: str, emitted: Emitted) -> Callable[[], torch.Tensor]:
        live = LiveStep(
            self.model,
            self.programs[which],
            constants=self.constants,
            batch=self.batch,
            runner=lambda _: emitted,
        )

        def run() -> torch.Tensor:
            self.reset()
            torch.manual_seed(0)
            return live.backward(self.batch)

        return run

    def eager(self) -> torch.Tensor:
        self.reset()
        torch.manual_seed(0)
        loss = loss_of(self.model, self.batch)
        loss.backward()
        return loss.detach()

    def results(self, run: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = run()
        gradients = {n: p.grad for n, p in self.model.named_parameters()}
        return {"loss": loss, **gradients, **{n: b.clone() for n, b in self.model.named_buffers()}}

    def reset(self) -> None:
        self.model.load_state_dict(self._state)
        self.model.zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    return Case(Blocks(), torch.randn(64, 16))


@pytest.fixture(scope="module")
def compiled(case: Case) -> dict[str, Emitted]:
    return {which: compile_program(program) for which, program in case.programs.items()}


# --- without compiling


def compiled_parts(program: Program) -> tuple[Segment, Segment]:
    forward, backward = (part for part in segments(program) if isinstance(part, Segment))
    return forward, backward


def test_the_backward_segment_takes_no_views_and_makes_every_copy(case: Case) -> None:
    forward, backward = compiled_parts(case.programs["copies"])
    nodes = case.programs["plain"].graph.by_name
    views = [n for n in backward.takes if nodes[n].is_view and not nodes[n].is_getitem]
    again = {i.value for i in case.programs["copies"].recomputed}
    assert views == []
    assert again
    assert again <= {i.value for i in backward.instructions}
    assert not again & {i.value for i in forward.instructions}


def test_buffers_are_updated_before_the_backward_pass_and_gradients_after(case: Case) -> None:
    parts = segments(case.programs["plain"])
    backward = parts.index(compiled_parts(case.programs["plain"])[1])
    early, late = (
        [part.sink for part in some if isinstance(part, Instruction)]
        for some in (parts[:backward], parts[backward:])
    )
    assert {sink.kind for sink in early} == {OutputKind.UPDATE}
    assert {sink.kind for sink in late} == {OutputKind.GRADIENT}
    sinks = [i.sink for i in case.programs["plain"].instructions if i.sink is not None]
    assert [*early, *late] == sinks


def test_random_draws_are_opaque_calls(case: Case) -> None:
    """Upstream's own bernoulli was fused with its readers, which read before the numbers were
    drawn."""
    with _torch.inductor_settings() as mode:
        program = case.programs["plain"]
        written = inductor.FxSegments(program, mode).write(compiled_parts(program)[0])
    targets = [str(n.target) for n in written.module.graph.nodes]
    assert targets.count("steelyard.bernoulli.default") == 4
    assert not [t for t in targets if t.startswith("aten.bernoulli") or "empty" in t]


def test_an_unread_random_draw_still_advances_the_generator() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.dropout(batch, 0.5)
        return model(batch).square().mean()

    traced = trace(nn.Linear(4, 4), loss, torch.randn(2, 4), decompositions=table("inductor-1"))
    program = Program.plain(to_graph(traced, decomposition="inductor-1"))
    with _torch.inductor_settings() as mode:
        written = inductor.FxSegments(program, mode).write(compiled_parts(program)[0])
    assert any("bernoulli" in str(n.target) for n in written.module.graph.nodes)


def test_a_gradient_keeps_its_layout_whatever_the_forward_pass_chose() -> None:
    """Inductor saves a convolution's input channels-last, and its gradient would get the same
    layout."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    batch = torch.randn(2, 4, 8, 8)
    traced = trace(model, loss_of, batch, decompositions=table("inductor-1"))
    program = Program.plain(to_graph(traced, decomposition="inductor-1"))
    first, second = compiled_parts(program)
    with _torch.inductor_settings() as mode:
        written = inductor.FxSegments(program, mode)
        forward = written.write(first)
        fakes = [forward.writer.output_fake(name) for name in first.gives]
        chosen = [_channels_last(fake) for fake in fakes]
        written.set_output_strides(forward, SimpleNamespace(output_strides=chosen))
        backward = written.write(second)
    assert any(c != tuple(f.stride()) for c, f in zip(chosen, fakes, strict=True))
    (gradients,) = backward.module.graph.output_node().args
    planned = {n.name: n.outputs[0].stride for n in program.graph.inputs() if n.outputs}
    targets = [i.sink.target for i in program.instructions if i.sink is not None]
    assert [g.meta["val"].stride() for g in gradients] == [planned[t] for t in targets]


def _channels_last(fake: torch.Tensor) -> tuple[int, ...]:
    like = torch.empty(fake.shape, device="meta")
    layout = torch.channels_last if fake.dim() == 4 else torch.contiguous_format
    return like.contiguous(memory_format=layout).stride()


def test_in_place_sums_never_alias_kept_storage() -> None:
    """The check does not keep alive what a segment reads last."""
    alive: list[bool] = []

    def compiled(taken: list[torch.Tensor]) -> list[torch.Tensor]:
        first, second = taken
        ended = weakref.ref(second)
        taken.clear()
        del second
        alive.append(ended() is not None)
        return [torch.ones(2), first.view(2)]

    apart = inductor._NoAlias(place=0, inputs=(0,), outputs=(1,))
    staying = torch.ones(2)
    run = inductor._checked(compiled, [apart])
    assert len(run([staying, torch.ones(2)])) == 2
    assert alive == [False]
    shared = inductor._checked(compiled, [replace(apart, place=1, outputs=(0,))])
    with pytest.raises(RunFailed, match="in the memory of another value"):
        shared([staying, torch.ones(2)])


@pytest.mark.parametrize("use", [compile_program, lower])
def test_a_missing_compiler_is_reported_before_the_run(
    case: Case, use: Callable[[Program], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "cpp_compiler", lambda: None)
    with pytest.raises(BadInput, match=r"no C\+\+ compiler") as refused:
        use(case.programs["plain"])
    assert "runner='python'" in refused.value.remedy


# --- with Inductor


@pytest.mark.slow
def test_compiled_steps_equal_eager_ones(case: Case, compiled: dict[str, Emitted]) -> None:
    eager = case.results(case.eager)
    ours = case.results(case.step("plain", compiled["plain"]))
    for name, value in eager.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_recomputing_is_bitwise_equal_when_compiled(
    case: Case, compiled: dict[str, Emitted]
) -> None:
    plain, copies = (case.results(case.step(w, compiled[w])) for w in ("plain", "copies"))
    assert [n for n in plain if not torch.equal(plain[n], copies[n])] == []


@pytest.mark.slow
def test_recomputing_is_bitwise_equal_where_fusion_changes() -> None:
    """Rows have 16 and 4 elements: in the past, fused neighbours decided whether such a loop was
    vectorized."""
    torch.manual_seed(0)
    # With the earlier heuristic, one layer was rounded differently from two.
    model = MoE(layers=1, width=16, experts=4, vocabulary=64)
    _, loss, batch = case_named("moe").make()
    traced = trace(model, loss, batch, decompositions=table("inductor-1"))
    plain = Program.plain(to_graph(traced, decomposition="inductor-1"))
    copies = with_copies(plain, recomputable(plain.graph))
    found = []
    for program in (plain, copies):
        step = LiveStep(
            model, program, constants=traced.constants, batch=batch, runner=compile_program
        )
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        step.backward(batch)
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_gradients_own_their_storage_and_have_the_strides_of_their_parameters(
    case: Case, compiled: dict[str, Emitted]
) -> None:
    case.step("copies", compiled["copies"])()
    gradients = [p.grad for p in case.model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in gradients}) == len(gradients)
    assert [g.stride() for g in gradients] == [p.stride() for p in case.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["plain", "copies"])
def test_compiled_peak_is_predicted_without_a_run(
    case: Case, compiled: dict[str, Emitted], which: str
) -> None:
    described = lower(case.programs[which])
    assert described.problems() == []
    assert described.graph.problems() == []
    alive = liveness(described, FREE)
    case.reset()
    metered = meter(case.step(which, compiled[which]))
    assert alive.left_bytes == metered.left_bytes
    assert alive.peak_bytes == pytest.approx(metered.peak_bytes, rel=0.05)


@pytest.mark.slow
def test_the_lowered_graph_has_the_kernels_that_run(
    case: Case, compiled: dict[str, Emitted]
) -> None:
    """The kernels and library calls are the same, so the second compilation decided like the
    first."""
    described = lower(case.programs["copies"])
    calls = re.findall(
        r"^ +(?:buf\d+ = )?(?:extern_kernels|cpp_fused)", compiled["copies"].source, re.M
    )
    drawn = "steelyard.bernoulli.default"
    nodes = [n for n in described.graph.nodes if not n.is_free and n.op != drawn]
    assert len(nodes) == len(calls)
    fused = [n for n in nodes if n.op.startswith("inductor.fused.")]
    assert fused
    # Operators outside of every block, such as the model's own additions, have no path.
    assert {n.path.partition(".")[0] for n in fused if n.phase is Phase.FORWARD} >= {"blocks"}
