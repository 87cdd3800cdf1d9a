"""Operators show that samples are not independent if the numbers of the planned batch do not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.checks.batch_independence import coupling
from steelyard.capture.step import CapturedStep
from steelyard.ir.graph import Graph
from tests import zoo
from tests.support.samples import (
    class_loss,
    data,
    net,
    verdict,
)


def class_balanced(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    frequency = nn.functional.one_hot(batch["y"], 3).sum(0).clamp(min=1)
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * (1 / frequency)[batch["y"]]).mean()


def trimmed_padding(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return class_loss(model, {**batch, "x": batch["x"] * batch["mask"].bool().any(0)})


def mean_of_each_task(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = (model(batch["x"]) - 1).square() * batch["mask"]
    return (each.sum(0) / batch["mask"].sum(0).clamp(min=1)).mean()


def off_a_baseline(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    reward = batch["mask"][:, 0]
    advantage = reward - reward.mean()
    return class_loss(model, batch) + (model(batch["x"]).mean(1) * advantage).mean()


def mean_without_nan(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = (model(batch["x"]) - batch["mask"]).square()
    known = ~each.isnan()
    return torch.where(known, each, 0.0).sum() / known.sum()


def mean_over_active(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hinge = (9 - model(batch["x"])[:, 0]).relu()
    return hinge.sum() / (hinge > 0).sum().clamp(min=1)


def softmax_of_rewards(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["mask"][:, 0].softmax(0)).sum()


def distances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    apart = batch["mask"][:, None] - batch["mask"][None, :]
    return class_loss(model, batch) + model(batch["x"]).mean() * apart.square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        *(class_balanced, trimmed_padding, mean_of_each_task, off_a_baseline, mean_without_nan),
        *(mean_over_active, softmax_of_rewards, distances),
    ],
)
def test_coupling_that_the_first_batch_hides_is_found_from_operators(loss: Any) -> None:
    """The batch has every class once, nothing masked, only one reward, no missing target, and
    all samples active."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    batch = {"x": torch.randn(3, 3), "y": torch.arange(3), "mask": torch.ones(3, 3)}
    reason = verdict((model, loss, batch)).reason
    assert "samples are not independent" in reason
    assert "test_batch_independence.py:" in reason


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return a graph for its sizes, by which samples are recognized; the terms below add no
    other sizes."""
    return CapturedStep(model=net(), loss=class_loss, batch=data()).graph(micro_batches=1)


def next_to_each_other(h: Tensor) -> Tensor:
    return (h - h.roll(1, 0)).square()


def rolled_as_one(h: Tensor) -> Tensor:
    return (h - h.roll(3)).square()


def in_order(h: Tensor) -> Tensor:
    return h.sort(0)[0] * torch.arange(len(h))[:, None]


def in_order_of_one(h: Tensor) -> Tensor:
    return h[h[:, 0].argsort()] * torch.arange(len(h))[:, None]


def highest_so_far(h: Tensor) -> Tensor:
    return h.cummax(0)[0]


def shuffled(h: Tensor) -> Tensor:
    return h * h[torch.randperm(len(h))]


def shuffled_by_keys(h: Tensor) -> Tensor:
    return h * h.index_select(0, torch.rand(len(h)).argsort())


def gathered(h: Tensor) -> Tensor:
    return h * torch.take_along_dim(h, torch.randint_like(h, len(h)).long(), 0)


def scattered(h: Tensor) -> Tensor:
    return h * torch.zeros_like(h).index_copy(0, torch.randperm(len(h)), h)


def drawn_by_weight(h: Tensor) -> Tensor:
    return h * nn.functional.embedding(torch.multinomial(h[:, 0].abs() + 1, len(h)), h)


@pytest.mark.parametrize(
    "term",
    [
        *(next_to_each_other, rolled_as_one, in_order, in_order_of_one, highest_so_far),
        *(shuffled, shuffled_by_keys, gathered, scattered, drawn_by_weight),
    ],
)
def test_coupling_is_found_in_a_term_of_weight_zero(term: Any, graph: Graph) -> None:
    model = net()
    model.register_buffer("ramp", torch.zeros(()))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ramp = model.get_buffer("ramp")
        return class_loss(model, batch) + ramp * term(model(batch["x"])).mean()

    assert "samples are not independent" in coupling(model, loss, data(), graph)


def test_per_sample_lookups_sorts_and_draws_can_be_split() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            noise = torch.rand(ids.shape)  # masked autoencoders choose what to keep in this way
            h = self.words(ids).gather(1, noise.argsort(1)[:, :4, None].expand(-1, -1, 8))
            h = (h + h.roll(1, 1)).sort(1)[0] + self.words(torch.randint(7, (len(ids), 1)))
            experts = nn.functional.dropout(h.detach(), 0.5)[:, 0].argmax(1)
            order = experts.argsort()
            back = order.argsort()
            last = h[order][back][torch.arange(len(ids)), y]
            return self.out(last)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["ids"], batch["y"]), batch["y"])

    torch.manual_seed(0)
    batch = {"ids": torch.randint(7, (6, 5)), "y": torch.randint(3, (6,))}
    assert not verdict((Model(), loss, batch)).reason


@pytest.mark.parametrize(
    "words", [nn.Embedding(64, 3, scale_grad_by_freq=True), nn.EmbeddingBag(64, 3, None, 2.0, True)]
)
def test_frequency_scaled_gradients_prevent_splitting(words: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = model(batch["x"])
        return nn.functional.cross_entropy(out.flatten(1), batch["y"])

    batch = {"x": torch.randperm(64)[:6].reshape(6, 1), "y": torch.randint(3, (6,))}
    assert "frequency of each index in the batch" in verdict((words, loss, batch)).reason


class Clip(torch.autograd.Function):
    """A function that clips the gradient of the batch by its norm, or that of each sample by its
    own norm."""

    @staticmethod
    def forward(context: Any, x: Tensor, is_of_all: bool) -> Tensor:
        context.is_of_all = is_of_all
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        norm = gradient.norm() if context.is_of_all else gradient.norm(dim=1, keepdim=True)
        return gradient * (1e3 / norm).clamp(max=1), None


@pytest.mark.parametrize("is_of_all", [False, True])
def test_samples_may_not_see_each_other_in_a_backward_pass_of_the_users_own(
    is_of_all: bool,
) -> None:
    """No gradient of the planned batch is large enough to be clipped."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = Clip.apply(model[0](batch["x"]), is_of_all)
        return nn.functional.cross_entropy(model[1](hidden), batch["y"])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    reason = verdict((model, loss, data())).reason
    if is_of_all:
        assert (
            "reduces all samples to one value "
            "(tests/torch/capture/checks/test_batch_independence.py:" in reason
        )
    else:
        assert not reason


class Sign(torch.autograd.Function):
    """A function with weights of one bit: the gradient passes unchanged where the weight is
    small."""

    @staticmethod
    def forward(context: Any, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        return weight.sign()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (weight,) = context.saved_tensors
        return torch.where(weight.abs() < 0.3, gradients[0], 0.0)


class Rows(torch.autograd.Function):
    """A model with an embedding."""

    @staticmethod
    def forward(context: Any, weight: Tensor, ids: Tensor) -> Tensor:
        context.save_for_backward(weight, ids)
        return weight[ids]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        weight, ids = context.saved_tensors
        return torch.zeros_like(weight).index_add_(0, ids, gradients[0]), None


def test_gradients_of_weights_may_be_made_in_a_backward_pass_of_the_users_own() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = batch["x"] @ Sign.apply(model[0].weight) + Rows.apply(model[0].weight, batch["y"])
        return nn.functional.cross_entropy(model[1](hidden), batch["y"])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    assert not verdict((model, loss, data())).reason


def own_sums(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose aggregates over samples are only added up, with weights that no sample
    determines."""
    out = model(batch["x"])
    by_class = torch.stack([out[:, i].square().sum() for i in range(3)]).to(torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    total += by_class.dot(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)) / len(out)
    metric = (out.argmax(1) == batch["y"]).sum() / batch["y"].max()  # does not reach the loss
    return total.float() + 0.1 * model[0].weight.norm() / 2 + torch.zeros_like(metric)


def test_sums_and_values_unused_by_the_loss_can_be_split() -> None:
    torch.manual_seed(0)
    assert not verdict((net(), own_sums, data())).reason


def test_rows_routed_to_experts_are_independent() -> None:
    assert not verdict(zoo.case("hf_olmoe").make()).reason
