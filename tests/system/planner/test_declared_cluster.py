"""Plans for several devices that are only declared, through the public call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import steelyard as sy
from steelyard.api.planned_cluster import PlannedForCluster, plan_for_cluster
from steelyard.api.scaling_study import scaling_study
from steelyard.api.train import run_workload
from steelyard.capture.deep.batch_template import TruncatedStep
from steelyard.errors import BadInput, Infeasible, Mismatch
from steelyard.hardware.calibration import DECLARED_DOUBT
from steelyard.hardware.cluster_file import decode_tree
from steelyard.plan_files.plan_file import read_decisions
from steelyard.plan_files.prediction_file import read_plan, write_explanation, write_plan
from steelyard.planner import declared_cluster as elsewhere
from steelyard.planner.declared_cluster import DeclaredClusterPlanner
from steelyard.planner.session import PlanRequest
from steelyard.plans.trade import codec_trades
from steelyard.predict.analytic import step as deep
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.json import to_json as json_of
from steelyard.report.scaling import rendered, to_json
from steelyard.report.styled_text import plain
from steelyard.report.text import render
from steelyard.trades import TRADES
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

_ADAMW = partial(torch.optim.AdamW, lr=1e-3)
pytestmark = pytest.mark.xdist_group("elsewhere")


def _cluster(count: int = 8, memory: str = "1100 KiB", more: str = "") -> sy.Cluster:
    return sy.Cluster(
        tree=decode_tree(f"""
[device.d]
memory = "{memory}"
memory_bandwidth = "900 GB/s"
price = "2 USD/h"
peak = {{ float32 = "15 TFLOP/s" }}
{more}
[link.l]
rate = "25 GB/s"
latency = "5 us"
[scope.node]
members = {{ d = 4 }}
link = "l"
[scope.cluster]
members = {{ node = {count // 4} }}
link = "l"
""")
    )


_GPT = GPT(layers=7, width=32, heads=2, vocabulary=64, length=32)


@pytest.fixture(scope="module", autouse=True)
def _captured_once() -> Iterator[None]:
    """Cache the capture of the model, which does not depend on the cluster and is used by most
    tests."""
    captured: list[TruncatedStep] = []

    def step(**asked: Any) -> TruncatedStep:
        if asked["model"] is not _GPT:
            return TruncatedStep(**asked)
        if not captured:
            captured.append(TruncatedStep(**asked))
        return captured[0]

    with mock.patch.object(elsewhere, "TruncatedStep", step):
        yield


def _request(**changed: Any) -> PlanRequest:
    request = PlanRequest(
        model=_GPT,
        loss=next_token_loss,
        batch=tokens(16, 32, 64),
        optimizer=_ADAMW,
        cluster=_cluster(),
        budget=sy.Budget(),
        runner="python",
        title="gpt",
        on_progress=lambda _: None,
    )
    return replace(request, **changed)


@pytest.fixture(scope="module")
def where() -> DeclaredClusterPlanner:
    return DeclaredClusterPlanner(request=_request())


@pytest.fixture(scope="module")
def planned(where: DeclaredClusterPlanner) -> PlannedForCluster:
    return plan_for_cluster(where, sy.Budget())


@pytest.mark.parametrize("is_deep", [True, False])
def test_lossy_trades_are_refused_where_they_cannot_be_probed(
    is_deep: bool, where: DeclaredClusterPlanner
) -> None:
    lossy, exact = sy.Budget(accuracy_loss="1%"), sy.Budget()
    if is_deep:
        plans = [plan_for_cluster(where, budget) for budget in (lossy, exact)]
    else:
        torch.manual_seed(0)
        shallow = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        plans = [
            sy.plan(
                shallow, lambda m, b: m(b).square().mean(), torch.randn(8, 16), optimizer=_ADAMW,
                cluster=_cluster(memory="1 GiB"), budget=budget,
            )
            for budget in (lossy, exact)
        ]  # fmt: skip
    said = [
        [n for n in plan.plan.notes if n.startswith("the plan loses no accuracy")] for plan in plans
    ]
    assert [len(each) for each in said] == [1, 0]
    for plan in plans:
        assert plan.predicted.accuracy_loss == "exact"
        for trade in (trade.name for trade in codec_trades(TRADES)):
            assert "cannot run here cannot be probed" in plan.why_not(trade)


def test_plan_of_a_deep_model_uses_the_cluster_search(planned: PlannedForCluster) -> None:
    request = _request()
    found = sy.plan(
        request.model,
        request.loss,
        request.batch,
        optimizer=_ADAMW,
        cluster=_cluster(),
        title="gpt",
    )
    assert isinstance(found, PlannedForCluster)
    assert str(found) == str(planned)


def test_the_plan_fits_the_device_and_lists_refused_trades(planned: PlannedForCluster) -> None:
    assert planned.predicted.memory_bytes.value <= 1100 * 1024
    assert planned.baseline.memory_bytes.value > 1100 * 1024
    said = str(planned)
    assert "8 ranks" in said
    assert "layouts on 8 devices is predicted to be more than" in said
    # Another layout is a few percent slower, which is within the uncertainty of declared rates.
    assert "not distinguishable from data 4 x pipeline 2" in " ".join(said.split())
    assert "no published step was compared with them" in said
    assert "is not searched for declared clusters" in planned.why_not("chunk")
    assert "the cluster declares no host memory" in planned.why_not("offload")
    assert {t.trade for t in planned.plan.taken} & {"shard_batch", "shard_tensor", "shard_pipeline"}
    for trade in ("shard_batch", "shard_tensor", "shard_pipeline", "shard_states"):
        assert planned.why_not(trade)
    with pytest.raises(BadInput, match="unknown trade 'shard'"):
        planned.why_not("shard")


def test_the_next_cent_is_what_larger_devices_would_save(
    where: DeclaredClusterPlanner, planned: PlannedForCluster
) -> None:
    """This also holds if the plan may use all memory of a device."""
    cent, limit = planned.plan.next_cent, 1100 * 1024
    assert cent is not None
    larger = where.search.fastest(8, limit + cent.more_bytes)
    assert larger is not None
    now = planned.predicted.step_seconds.value
    assert cent.saved_seconds == pytest.approx(now - larger.step.step_seconds)
    assert cent.saved_seconds > 0


def test_stages_on_a_slower_device_class_fit_its_memory() -> None:
    old = """
[device.old]
memory = "700 KiB"
memory_bandwidth = "450 GB/s"
peak = { float32 = "7 TFLOP/s" }
"""
    tree = """
[device.d]
memory = "1100 KiB"
memory_bandwidth = "900 GB/s"
peak = { float32 = "15 TFLOP/s" }
[link.l]
rate = "25 GB/s"
latency = "5 us"
[scope.cluster]
members = { d = 2, old = 2 }
link = "l"
"""
    mixed = DeclaredClusterPlanner(
        request=_request(cluster=sy.Cluster(tree=decode_tree(old + tree)))
    )
    laid = mixed.best(sy.Budget(), 4)
    said = str(plan_for_cluster(mixed, sy.Budget()))
    places = mixed.search.pricing.stage_devices.of(laid.layout)
    assert {place.memory_bytes for place in places} <= {1100 * 1024, 700 * 1024}
    for place, memory in zip(places, laid.step.stages, strict=True):
        assert memory.nbytes <= place.memory_bytes
    assert "700 KiB on devices with less memory" in said


def test_the_plan_states_the_reached_share_and_is_slower_by_it(planned: PlannedForCluster) -> None:
    half = _request(cluster=_cluster(more='reached = { share = "50 %" }'))
    found = [plan_for_cluster(DeclaredClusterPlanner(request=half), sy.Budget()), planned]
    computing = [plan.predicted.computation_seconds.value for plan in found]
    assert computing[0] > computing[1]
    said = [" ".join(str(plan).split()) for plan in found]
    assert "d at 50 % of its declared rates, as declared in the cluster file" in said[0]
    assert "d at its declared peak, which programs do not reach" in said[1]
    assert "as declared in the cluster file" in scaling_study(half, fewest=8, most=8).notes[0]


def test_extrapolation_is_reported_and_widens_the_interval() -> None:
    """A small GPT in single precision on 8 H100, whose efficiency was fitted on a Llama in
    bfloat16."""
    joined = """
    [device.small]
    preset = "H100-SXM5"
    memory = "1100 KiB"
    [scope.cluster]
    members = { small = 8 }
    link = "nvlink-h100"
    """
    cluster = sy.Cluster(tree=decode_tree(joined))
    plan = plan_for_cluster(DeclaredClusterPlanner(request=_request(cluster=cluster)), sy.Budget())
    said = " ".join(str(plan).split())
    assert "outside of the range that was fitted" in said
    assert "products in float32" in said
    assert "parameters" in said
    assert "missed by a median of" in said
    assert "Llama-3.1-8B; torchtitan; data parallel; bfloat16" in said
    step = plan.plan.predicted.metrics.step_seconds
    assert step.high - step.value >= DECLARED_DOUBT * step.value * (1 - 1e-9)


_HOST = """
host_memory = "1 GiB"
host_link = "pcie4-x16"
"""


def test_host_memory_lets_a_model_fit_fewer_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory may hold both optimizer state and activations; plans say so, and can be read
    back."""
    # The whole optimizer state of this model is smaller than three pieces, so pieces are made
    # smaller.
    monkeypatch.setattr(deep, "OFFLOAD_PIECE_BYTES", 1 << 10)
    behind = DeclaredClusterPlanner(request=_request(cluster=_cluster(memory="5 MiB", more=_HOST)))
    alone = DeclaredClusterPlanner(request=_request(cluster=_cluster(memory="5 MiB")))
    limit = sy.Budget(memory="1 MiB")
    few, more = (plan_for_cluster(each, limit, "devices") for each in (behind, alone))  # type: ignore[arg-type]
    assert int(few.plan.fewest.split()[0]) < int(more.plan.fewest.split()[0])
    assert few.predicted.memory_bytes.value <= 2**20
    trades = {taken.trade for taken in few.plan.taken}
    assert "offload_state" in trades
    assert more.plan.decisions.offload_memory is None
    few.save(tmp_path / "gpt.plan.toml")
    found = read_decisions(tmp_path / "gpt.plan.toml")
    assert found.offload_memory == few.plan.decisions.offload_memory
    assert found.offload_memory is not None
    assert found.offload_memory.size_bytes == 2**30
    assert any(rule.trade == "offload_state" for rule in found.rules)
    for trade in ("offload", "offload_state", "recompute"):
        assert few.why_not(trade)


def test_the_plan_file_of_a_declared_cluster_reads_back(
    planned: PlannedForCluster, tmp_path: Path
) -> None:
    planned.save(tmp_path / "gpt.plan.toml")
    found = read_decisions(tmp_path / "gpt.plan.toml")
    assert found == replace(
        planned.plan.decisions, rules=tuple(sorted(planned.plan.decisions.rules))
    )
    assert found.target.ranks == 8


def test_a_plan_for_a_declared_cluster_cannot_be_run_here(planned: PlannedForCluster) -> None:
    with pytest.raises(BadInput, match="is for 8 devices of cluster and cannot be"):
        planned.apply()


def test_the_plan_file_is_checked_against_its_cluster(
    planned: PlannedForCluster, tmp_path: Path
) -> None:
    path, request = tmp_path / "gpt.plan.toml", _request()
    planned.save(path)

    def loaded(**changed: Any) -> Any:
        asked = {"optimizer": _ADAMW, "cluster": _cluster(), "title": "gpt", **changed}
        return sy.load(path, request.model, request.loss, request.batch, **asked)

    found = loaded()
    assert isinstance(found, PlannedForCluster)
    assert found.predicted == planned.predicted
    assert found.simulated() == planned.simulated()
    ends = max(span.end_seconds for span in found.simulated())
    assert ends <= planned.predicted.step_seconds.value * (1 + 1e-9)
    with pytest.raises(Mismatch, match="was made for a different cluster than cluster"):
        loaded(cluster=_cluster(memory="2 MiB"))
    with pytest.raises(BadInput, match="cluster is 'dgx-h100'"):
        loaded(cluster="dgx-h100")
    text = path.read_text()
    assert "memory = " not in text
    path.write_text(text.replace("[budget]", '[budget]\nmemory = "300 KiB"'))
    assert any(note.startswith("does not fit") for note in loaded().plan.notes)


def test_minimize_devices_finds_the_smallest_number(where: DeclaredClusterPlanner) -> None:
    fewest = plan_for_cluster(where, sy.Budget(), "devices")  # type: ignore[arg-type]
    (title,) = (fewest.plan.fewest,)
    ranks = int(title.split()[0])
    assert title == f"{ranks} of 8 devices; no layout on fewer fits the budget"
    assert 1 < ranks <= 8
    for fewer in range(1, ranks):
        with pytest.raises(Infeasible):
            where.best(sy.Budget(), fewer)
    # A bound on the step time needs more devices.
    seconds = fewest.predicted.step_seconds.value
    quicker = plan_for_cluster(where, sy.Budget(step_time=seconds * 0.9), "devices")  # type: ignore[arg-type]
    assert int(quicker.plan.fewest.split()[0]) > ranks
    assert quicker.predicted.step_seconds.value <= seconds * 0.9


def test_a_memory_refusal_gives_the_reason_for_not_splitting_the_batch() -> None:
    def pairing(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(batch["x"]).mean(1)
        return (out @ out.T).square().mean()

    model = GPT(layers=7, width=32, heads=2, vocabulary=64, length=32)
    where = DeclaredClusterPlanner(request=_request(model=model, loss=pairing))
    with pytest.raises(Infeasible, match="cannot be split into micro-batches: mm pairs samples"):
        plan_for_cluster(where, sy.Budget(memory="100 KiB"))


def test_another_budget_is_another_plan(planned: PlannedForCluster) -> None:
    tighter = planned.what_if(memory="900 KiB")
    assert tighter.predicted.memory_bytes.value <= 900 * 1024
    assert tighter.predicted.step_seconds.value >= planned.predicted.step_seconds.value
    with pytest.raises(BadInput, match="a budget has no argument memmory"):
        planned.what_if(memmory="1 GiB")


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (sy.Budget(memory="20 KiB"), "no plan fits 20.0 KiB on each of 8 devices"),
        (sy.Budget(step_time="1 ns"), "has a step time <= 1.00 ns: the fastest takes"),
    ],
)
def test_an_infeasible_request_is_refused_with_a_possible_one(
    where: DeclaredClusterPlanner, budget: sy.Budget, said: str
) -> None:
    with pytest.raises(Infeasible, match=said):
        plan_for_cluster(where, budget)


def test_a_number_of_devices_that_divides_nothing_is_reported(
    where: DeclaredClusterPlanner,
) -> None:
    # 11 divides neither the batch nor any tensor, and there are only 7 blocks.
    assert where.search.leanest_bytes(11) is None
    other = DeclaredClusterPlanner(request=_request(cluster=_cluster(12)))
    with pytest.raises(Infeasible, match="divides the 16 samples of the batch and the 7 blocks"):
        other.best(sy.Budget(), 11)


def test_minimize_devices_works_for_a_model_without_blocks() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    found = sy.plan(
        model, lambda m, b: m(b).square().mean(), torch.randn(16, 64), optimizer=_ADAMW,
        cluster=_cluster(memory="800 KiB"), minimize="devices",
    )  # fmt: skip
    assert found.plan.fewest == "2 of 8 devices; no layout on fewer fits the budget"


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"minimize": "devices"}, "on this machine"),
        ({"minimize": "devices", "maximize": "batch", "cluster": _cluster()}, "several ranks"),
        ({"minimize": "ranks", "cluster": _cluster()}, "minimize is 'ranks'"),
    ],
)
def test_contradictory_goals_are_refused(wish: dict[str, Any], said: str) -> None:
    request = _request()
    with pytest.raises(BadInput, match=said):
        sy.plan(request.model, request.loss, request.batch, **wish)


def test_scaling_is_compared_with_two_scaling_laws(where: DeclaredClusterPlanner) -> None:
    request = _request(cluster=_cluster(memory="8 MiB"))
    found = scaling_study(request, fewest=1, most=8, tokens=32 * 16 * 3600)
    assert [p.devices for p in found.points] == [1, 2, 4, 8]
    assert "which programs do not reach" in found.notes[0]
    first = found.points[0]
    assert found.speed_up(first) == found.scaled_speed_up(first) == 1
    for point in found.points:
        assert point.same_batch is not None
        assert point.grown_batch is not None
        assert point.same_batch.samples == 16
        assert point.grown_batch.samples == 16 * point.devices
        # 3,600 steps take as many hours as one step takes seconds; an hour of a device costs 2 USD.
        assert point.same_batch.hours == pytest.approx(point.same_batch.step_seconds)
        assert point.same_batch.usd == pytest.approx(2 * point.devices * point.same_batch.hours)
    said = plain(rendered(found, width=100))
    assert "Amdahl: the serial share is" in said
    assert "the batch scaled with the devices" in said
    document = to_json(found)
    assert [p["devices"] for p in document["points"]] == [1, 2, 4, 8]
    assert document["points"][3]["same_batch"]["speed_up"] == found.speed_up(found.points[3])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"fewest": 4, "most": 2}, "devices 4..2 are not in a cluster of 8"),
        ({"fewest": 1, "most": 16}, "devices 1..16 are not in a cluster of 8"),
    ],
)
def test_more_devices_than_the_cluster_has_are_refused(asked: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        scaling_study(_request(), **asked)


def test_tokens_of_a_batch_that_has_none_are_refused() -> None:
    model = nn.Linear(4, 4)
    request = _request(model=model, loss=lambda m, b: m(b).mean(), batch=torch.randn(8, 4))
    with pytest.raises(BadInput, match="the batch holds no tokens"):
        scaling_study(request, fewest=1, most=2, tokens=1000)
    assert scaling_study(request, fewest=1, most=2, samples=1000).points[0].same_batch is not None


def _small() -> tuple[nn.Module, Any, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return model, lambda model, x: model(x).square().mean(), torch.randn(8, 16)


def _one_declared() -> sy.Cluster:
    tree = decode_tree("""
[device.d]
memory = "1 GiB"
memory_bandwidth = "900 GB/s"
peak = { float32 = "15 TFLOP/s" }
[link.l]
rate = "25 GB/s"
latency = "5 us"
[scope.cluster]
members = { d = 1 }
link = "l"
""")
    return sy.Cluster(tree=tree)


@pytest.mark.parametrize("is_read_back", [False, True])
def test_a_measured_run_of_a_declared_plan_is_marked(tmp_path: Path, is_read_back: bool) -> None:
    model, loss, batch = _small()
    planned: Any = sy.plan(model, loss, batch, cluster=_one_declared())
    if is_read_back:
        planned.save(tmp_path / "p.plan.toml")
        planned = sy.load(tmp_path / "p.plan.toml", model, loss, batch)
        assert "planned for the declared cluster cluster (1 d)" in " ".join(planned.plan.notes)
    said: list[str] = []
    work = sy.Workload(model=model, loss=loss, batches=[batch])
    receipt = run_workload(planned, work, steps=3, on_note=said.append)
    assert receipt.measured.stands_in in said[0]
    assert "the plan is for the declared cluster cluster (1 d)" in said[0]
    tree = tree_of(receipt)
    text = plain(render(tree))
    assert "measured*   on " in text
    assert "  measured*  " in text
    assert json_of(tree)["stands_in"] == receipt.measured.stands_in
    assert "measured*: on " in to_html(tree)
    # The prediction file beside the plan file says so, too.
    write_plan(tmp_path / "q.plan.toml", receipt.plan)
    write_explanation(tmp_path / "q.plan.toml", receipt.plan, receipt.measured)
    found = read_plan(tmp_path / "q.plan.toml")
    assert found.measured is not None
    assert found.measured.stands_in == receipt.measured.stands_in


def test_a_run_of_a_plan_for_this_machine_is_not_marked() -> None:
    model, loss, batch = _small()
    work = sy.Workload(model=model, loss=loss, batches=[batch])
    said: list[str] = []
    receipt = run_workload(sy.plan(model, loss, batch), work, steps=2, on_note=said.append)
    tree = tree_of(receipt)
    assert not said
    assert tree.stands_in == ""
    assert "measured*" not in plain(render(tree)) + to_html(tree)
