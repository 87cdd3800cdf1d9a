"""Values in 8 bits from the public API to a receipt: if a loss is allowed, and probed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.cli import main
from steelyard.errors import Infeasible, Mismatch, PlanFileError
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plan_files.prediction_file import read_plan
from steelyard.planner import accuracy_probe as probing
from steelyard.planner import lossy as accuracy
from steelyard.planner.lossy import LossyPlanner
from steelyard.report.document import tree_of
from steelyard.report.json import to_json
from steelyard.trades.offload_state import MOVABLE, OffloadStateRule, movable
from steelyard.trades.quantize_activations import QuantizeActivations
from tests.harness import floor_bytes, in_a_hurry

ADAM = partial(torch.optim.AdamW, lr=1e-3)
MIB = 1 << 20
PROBED = r"[0-9.]+ ± [0-9.]+ % \(probe: 10 steps, 1 items, twin run\)"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("accuracy")]


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


class Rows(nn.Module):
    """A step with one sample, so that the batch cannot be split, and random masks, which are
    never recomputed."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(depth))
        self.norm = nn.BatchNorm1d(128)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return self.norm(x[0])


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out - 1).square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Rows().train(), torch.randn(1, 4096, 128)


def least(planned: sy.Planned, **budget: Any) -> int:
    with pytest.raises(Infeasible) as refusal:
        planned.what_if(memory=floor_bytes(planned), **budget)
    assert refusal.value.least_bytes is not None
    return refusal.value.least_bytes


@pytest.fixture(scope="module")
def plain() -> sy.Planned:
    model, x = made()
    return sy.plan(model, loss, x, optimizer=ADAM)


@pytest.fixture(scope="module")
def tight(plain: sy.Planned) -> int:
    """Return a budget below the least memory without 8 bits, and above that with them."""
    without, with_them = least(plain), least(plain, accuracy_loss="1%")
    assert with_them < without - MIB
    return (without + with_them) // 2


@pytest.fixture(scope="module")
def planned(plain: sy.Planned, tight: int) -> sy.Planned:
    return plain.what_if(memory=tight, accuracy_loss="1%")


def rules_of(planned: sy.Planned) -> list[Rule]:
    return [r for r in planned.plan.decisions.rules if r.trade == "quantize_activations"]


def test_a_lossy_plan_fits_where_no_exact_one_does(planned: sy.Planned) -> None:
    taken = [t for t in planned.plan.taken if t.trade == "quantize_activations"]
    assert sum(t.buys_bytes for t in taken) > 0
    assert sum(t.pays_seconds for t in taken) > 0
    assert sum(r.count for t in taken for r in t.rules) == sum(r.count for r in rules_of(planned))
    assert planned.predicted.memory_bytes.value <= planned.plan.decisions.budget.memory_bytes
    word = planned.predicted.accuracy_loss
    assert re.fullmatch(PROBED, word), word
    assert planned.plan.unplanned.metrics.accuracy_loss == "exact"
    assert planned.why_not("quantize_activations").startswith("quantize_activations was applied: ")
    said = str(planned)
    assert word.partition(" (")[0] in said
    assert "not a bound on the final accuracy" in " ".join(said.split())
    document = to_json(tree_of(planned.plan))
    assert document["amounts"]["accuracy_loss"]["plan"] == word.partition(" (")[0]


def test_the_receipt_is_within_its_intervals_and_the_first_loss_equals_eager(
    planned: sy.Planned,
) -> None:
    model, x = made()
    torch.manual_seed(3)
    eager = float(loss(copy.deepcopy(model), x).detach())
    step = planned.apply(model)
    torch.manual_seed(3)
    losses = [float(step(x)) for _ in range(4)]
    assert losses[0] == pytest.approx(eager, rel=1e-6)
    assert losses[-1] < losses[0]
    receipt = step.receipt()
    assert receipt.measured.memory_bytes == pytest.approx(
        planned.predicted.memory_bytes.value, rel=0.01
    )
    assert receipt.measured.memory_bytes <= planned.plan.decisions.budget.memory_bytes
    assert planned.predicted.accuracy_loss.partition(" (")[0] in str(receipt)


def test_losses_drift_no_further_than_the_probe_measured(
    planned: sy.Planned, plain: sy.Planned
) -> None:
    """The drift is measured independently: on the user's own steps, from another seed."""
    lost = []
    for of in (planned, plain):
        model, x = made()
        step = of.apply(model)
        torch.manual_seed(5)
        lost.append([float(step(x)) for _ in range(probing.STEPS)])
    ours, theirs = lost
    drifts = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    assert drifts[0] == 0
    assert 0 < max(drifts) <= 0.01


def test_planning_leaves_the_model_and_the_random_state_alone(tight: int) -> None:
    model, x = made()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    versions = [p._version for p in model.parameters()]
    batch, drawn = x.clone(), torch.get_rng_state()
    budget = sy.Budget(memory=tight, accuracy_loss="1%")
    assert rules_of(sy.plan(model, loss, x, optimizer=ADAM, budget=budget))
    for name, now in model.state_dict().items():
        assert torch.equal(now, before[name]), name
    assert [p._version for p in model.parameters()] == versions
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(x, batch)


def test_an_exact_budget_reports_what_lossy_trades_would_save(
    plain: sy.Planned, tight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this costs time, and nobody asked for it")

    monkeypatch.setattr(accuracy, "quantization_errors", never)
    monkeypatch.setattr(accuracy, "drift", never)
    exact = plain.what_if(memory=2 * tight)
    assert exact.predicted.accuracy_loss == "exact"
    reason = exact.why_not("quantize_activations")
    assert "is lossy and the accuracy budget is 0" in reason
    assert "alone would save ~" in reason
    assert " MiB, but" in reason
    left = [r for r in exact.plan.refused if r.trade == "quantize_activations"]
    assert len(left) == 1
    with pytest.raises(Infeasible):
        plain.what_if(memory=tight)


def test_a_roomy_budget_needs_no_probe(plain: sy.Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "quantization_errors", None)
    roomy = plain.what_if(memory="1 GiB", accuracy_loss="1%")
    assert roomy.predicted.accuracy_loss == "exact"
    assert "the step fits without it" in roomy.why_not("quantize_activations")
    assert "memory is not bounded" in plain.what_if(accuracy_loss="1%").why_not(
        "quantize_activations"
    )


def test_drift_beyond_the_budget_drops_the_lossiest_values_first(
    plain: sy.Planned, tight: int
) -> None:
    with pytest.raises(Infeasible):
        plain.what_if(memory=tight, accuracy_loss=1e-12)
    exact = least(plain)
    refused = plain.what_if(memory=exact + MIB // 4, accuracy_loss=1e-12)
    assert refused.predicted.accuracy_loss == "exact"
    assert "drifted" in refused.why_not("quantize_activations")
    assert "and the accuracy budget is 0.0000000001 %" in refused.why_not("quantize_activations")


def test_values_with_too_large_a_quantization_error_are_named(
    tight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "_MAX_ERROR", 1e-9)
    model, x = made()
    with pytest.raises(Infeasible):
        sy.plan(model, loss, x, optimizer=ADAM, budget=sy.Budget(memory=tight, accuracy_loss="1%"))
    exact = sy.plan(
        model, loss, x, optimizer=ADAM, budget=sy.Budget(memory=2 * tight, accuracy_loss="1%")
    )
    roomy = exact.plan.unplanned.peak.nbytes <= 2 * tight
    reasons = exact.why_not("quantize_activations")
    assert ("of its norm in 8 bits" in reasons) is not roomy


def test_a_non_finite_value_is_never_quantized() -> None:
    class Masked(Rows):
        def forward(self, x: Tensor) -> Tensor:
            open_to = torch.where(torch.ones(4096, 128).tril() > 0, 0.0, float("-inf"))
            x = super().forward(x)
            return x * (x + open_to).exp()

    torch.manual_seed(0)
    model, x = Masked(depth=3).train(), torch.randn(1, 4096, 128)
    whole = sy.plan(model, loss, x, optimizer=ADAM)
    memory = (least(whole) + whole.plan.predicted.peak.nbytes) // 2
    lossy = whole.what_if(memory=memory, accuracy_loss="1%")
    bad = [r for r in lossy.plan.refused if "not finite" in r.reason]
    assert bad
    assert all(r.trade == "quantize_activations" for r in bad)


def test_lossy_trades_need_an_optimizer_for_the_probe() -> None:
    model, x = made()
    whole = sy.plan(model, loss, x)
    between = (least(whole) + whole.plan.predicted.peak.nbytes) // 2
    refused = whole.what_if(memory=between, accuracy_loss="1%")
    assert refused.predicted.accuracy_loss == "exact"
    assert "without an optimizer the drift of the loss" in refused.why_not("quantize_activations")


def test_a_loss_that_is_not_finite_is_a_reason_against_8_bits(
    planned: sy.Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made()

    def broken(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x) * float("nan")

    whole = sy.plan(model, broken, x, optimizer=ADAM)
    session, rules = whole.session, planned.plan.decisions.rules
    program = session.apply_rules(rules)
    assert program.quantized
    lossy = SimpleNamespace(rules=rules, program=program, prediction=session.priced(program))
    # Measured times decide whether a plan with 8 bits is the fastest one; here it is.
    monkeypatch.setattr(LossyPlanner, "_find_best", lambda *_: lossy)
    refused = whole.what_if(memory=whole.plan.predicted.peak.nbytes - 1, accuracy_loss="1%")
    assert refused.predicted.accuracy_loss == "exact"
    assert "the loss is not finite within" in refused.why_not("quantize_activations")


def test_a_non_finite_loss_is_no_small_drift() -> None:
    assert not probing._share(float("nan"), float("nan")) <= 1
    assert not probing._share(float("inf"), float("inf")) <= 1
    assert not probing._share(1.0, float("nan")) <= 1
    assert not probing._share(1.0, 0.0) <= 1
    assert probing._share(0.0, 0.0) == 0


def test_a_lossy_plan_file_is_probed_again_when_loaded(planned: sy.Planned, tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    text = path.read_text()
    assert "[[quantize_activations]]" in text
    assert 'accuracy_loss = "1 %"' in text
    on_file = read_plan(path).plan
    assert on_file is not None
    assert on_file.predicted.metrics.accuracy_loss == planned.predicted.accuracy_loss
    model, x = made()
    again = sy.load(path, model, loss, x, optimizer=ADAM)
    assert sorted(again.plan.decisions.rules) == sorted(planned.plan.decisions.rules)
    assert again.plan.predicted.peak.nbytes == planned.plan.predicted.peak.nbytes
    assert again.predicted.accuracy_loss == planned.predicted.accuracy_loss
    # Without an optimizer the loss is unknown, and the plan does not claim to be exact.
    blind = sy.load(path, model, loss, x)
    assert blind.predicted.accuracy_loss == "unknown"
    assert any("is not known" in note for note in blind.plan.notes)
    assert "its accuracy loss is unknown" in " ".join(str(blind).split())


def test_a_lossy_plan_file_with_an_exact_budget_is_reported(
    planned: sy.Planned, tmp_path: Path
) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    path.write_text(path.read_text().replace('accuracy_loss = "1 %"', 'accuracy_loss = "0 %"'))
    model, x = made()
    loaded = sy.load(path, model, loss, x, optimizer=ADAM)
    assert loaded.predicted.accuracy_loss == "unknown"
    assert any(n.startswith("does not fit: ") and "8 bits" in n for n in loaded.plan.notes)
    tree = tree_of(loaded.plan)
    assert not tree.fits
    assert "DOES NOT FIT: accuracy loss unknown" in tree.verdict
    with pytest.raises(Infeasible, match="exceeds its budget: accuracy loss unknown"):
        loaded.apply(model)


def test_an_edited_rule_is_checked(planned: sy.Planned, tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    text, (rule, *_) = path.read_text(), rules_of(planned)
    model, x = made()
    path.write_text(text.replace("[[quantize_activations]]", "[[quantize]]"))
    with pytest.raises(PlanFileError, match="quantize_activations"):
        sy.load(path, model, loss, x, optimizer=ADAM)
    again = f'\n[[recompute]]\nmodule = "{rule.module}"\nop = "{rule.op}"\nnth = {rule.nth}\n'
    path.write_text(text + again + f"count = {rule.count}\n")
    with pytest.raises(Mismatch, match=r"recomputed|matches|cannot be recomputed"):
        sy.load(path, model, loss, x, optimizer=ADAM)


def test_a_smaller_last_batch_runs_by_the_same_rules(planned: sy.Planned) -> None:
    model, x = made()
    step = planned.apply(model)
    losses = [float(step(x[:, :rows])) for rows in (4096, 37, 2)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))


def test_the_frontier_of_a_lossy_plan_marks_unprobed_points(planned: sy.Planned) -> None:
    words = {p.accuracy_loss for p in planned.frontier}
    assert words <= {"exact", "unknown"}
    for point in planned.frontier:
        is_coded = any(rule.trade == "quantize_activations" for rule in point.rules)
        assert (point.accuracy_loss == "unknown") is is_coded
    assert any(p.accuracy_loss == "unknown" for p in planned.frontier)


def test_inductor_is_refused_with_the_reason() -> None:
    model, x = Rows(depth=2).train(), made()[1]
    other = sy.plan(model, loss, x, optimizer=ADAM, runner="inductor")
    assert "only plans for generated Python are probed" in other.why_not("quantize_activations")


def test_maximize_batch_uses_no_lossy_trades(tight: int) -> None:
    model, x = made()
    found = sy.plan(
        model, loss, x.expand(2, -1, -1).clone(), optimizer=ADAM, maximize="batch",
        budget=sy.Budget(memory=4 * tight, accuracy_loss="1%"),
    )  # fmt: skip
    assert found.predicted.accuracy_loss == "exact"
    assert "no value is kept in 8 bits" in found.plan.largest


@pytest.fixture(scope="module")
def beside_far(tight: int, tmp_path_factory: pytest.TempPathFactory) -> sy.Planned:
    model, x = made()
    offload_memory = sy.OffloadMemory(tmp_path_factory.mktemp("far"), rate="1 GB/s", size="1 GiB")
    return sy.plan(
        model, loss, x, optimizer=ADAM, cluster=sy.Cluster.here(offload_memory=offload_memory),
        budget=sy.Budget(memory=tight + 2 * MIB, accuracy_loss="1%"),
    )  # fmt: skip


def test_offload_and_8_bit_activations_are_chosen_together(beside_far: sy.Planned) -> None:
    model, x = made()
    step = beside_far.apply(model)
    assert [float(step(x)) for _ in range(3)][-1] > 0
    measured = step.receipt().measured.memory_bytes
    assert measured == pytest.approx(beside_far.predicted.memory_bytes.value, rel=0.01)


def test_a_probe_keeps_weights_in_the_memory_that_the_plan_uses(beside_far: sy.Planned) -> None:
    planned = beside_far
    session = planned.session
    coded = tuple(r for r in planned.plan.decisions.rules if r.trade == "quantize_activations")
    if not coded:
        offers, _ = QuantizeActivations().offers(session.base, session.source)
        coded = tuple(rule for offer in offers for rule in offer.rules)[:1]
    moved = tuple(
        OffloadStateRule(what=what, parameter=name, lead=1)
        for what in MOVABLE
        for name in movable(session.base, what)
    )
    assert {rule.what for rule in moved} == set(MOVABLE)
    lossy = LossyPlanner(session=session)
    near = lossy.probe_drift(coded, session.apply_rules(coded), 1.0)
    away = lossy.probe_drift((*coded, *moved), session.apply_rules((*coded, *moved)), 1.0)
    assert near == away


def test_a_transformers_model_keeps_its_values_in_8_bits() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=256, vocab_size=320
    )
    model = transformers.GPT2LMHeadModel(config).train()
    batch = {"input_ids": torch.randint(0, 320, (1, 256))}

    def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = model(**batch, labels=batch["input_ids"]).loss
        return value

    whole = sy.plan(model, next_token, batch, optimizer=ADAM)
    without, with_them = least(whole), least(whole, accuracy_loss="2%")
    assert with_them < without
    planned = whole.what_if(memory=(without + with_them) // 2, accuracy_loss="2%")
    assert rules_of(planned)
    assert "probe: 10 steps, 1 items" in planned.predicted.accuracy_loss
    step = planned.apply(model)
    losses = [float(step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]
    measured = step.receipt().measured.memory_bytes
    assert measured == pytest.approx(planned.predicted.memory_bytes.value, rel=0.01)


SCRIPT = """
import torch
from functools import partial
import steelyard as sy
from tests.system.planner.test_lossy import loss, made


def workload():
    model, x = made()
    return sy.Workload(model, loss, [x] * 3, partial(torch.optim.AdamW, lr=1e-3))
"""


def test_a_lossy_plan_from_the_command_line(
    tight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    memory = ["--memory", f"{tight}B"]
    assert main(["plan", "train.py", *memory]) == 3
    capsys.readouterr()
    assert main(["plan", "train.py", *memory, "--accuracy-loss", "1%"]) == 0
    said = capsys.readouterr().out
    assert "accuracy loss <= 1 %" in said
    assert "quantize_activations" in said
    assert main(["plan", "train.py", "--check", "train.plan.toml"]) == 0
    assert main(["run", "train.py", "--plan", "train.plan.toml", "--steps", "3"]) == 0
    assert "±" in capsys.readouterr().out
    path = Path("train.plan.toml")
    path.write_text(path.read_text().replace('accuracy_loss = "1 %"', 'accuracy_loss = "0 %"'))
    assert main(["plan", "train.py", "--check", "train.plan.toml"]) == 3
    assert "DOES NOT FIT: accuracy loss unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("drifts", "steps", "is_kept"),
    [
        # Clearly inside the budget, clearly outside, and three cases that ten steps do not decide.
        ([0.01] * 10, 10, True),
        ([0.01] * 9 + [0.06], 10, False),
        ([0.01] * 9 + [0.046] + [0.046] * 20, 30, False),
        ([0.03] * 9 + [0.049] + [0.049] * 5 + [0.048] * 15, 30, False),
        ([0.03] * 9 + [0.046] + [0.03] * 20, 30, True),
    ],
)
def test_a_probe_whose_interval_contains_the_budget_goes_on(
    planned: sy.Planned,
    monkeypatch: pytest.MonkeyPatch,
    drifts: list[float],
    steps: int,
    is_kept: bool,
) -> None:
    asked: list[int] = []

    def told(_: object, program: Program, *, steps: int, **__: object) -> list[float]:
        asked.append(steps)
        is_coded = program.is_lossy
        return [1.0 + (d if is_coded else 0.0) for d in drifts[:steps]]

    monkeypatch.setattr(accuracy, "losses", told)
    session, rules = planned.session, planned.plan.decisions.rules
    seen = accuracy.LossyPlanner(session=session).probe_drift(
        rules, session.apply_rules(rules), 0.05
    )
    assert not isinstance(seen, str)
    assert (len(seen.shares), seen.keeps(0.05)) == (steps, is_kept)
    assert asked == ([10, 10] if steps == 10 else [10, 10, 30, 30])
