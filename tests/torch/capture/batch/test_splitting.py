"""The batch is split only if its parts train what the whole batch would train."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.batch.independence_proof import Reduction, Splitting, sketch
from tests import zoo
from tests.harness import trial_of
from tests.support.samples import (
    Counting,
    class_loss,
    data,
    net,
    spread_loss,
    squared_mean_loss,
    sum_loss,
    verdict,
    weighed_loss,
)
from tests.zoo.workers import on_its_worker


@pytest.mark.parametrize(
    ("loss", "reduction"), [(class_loss, Reduction.COUNTED), (sum_loss, Reduction.SUM)]
)
def test_a_batch_of_independent_samples_can_be_split(loss: Any, reduction: Reduction) -> None:
    torch.manual_seed(0)
    found = verdict((net(), loss, data()))
    assert not found.reason
    assert found.reduction is reduction


@pytest.mark.parametrize("loss", [squared_mean_loss, spread_loss, weighed_loss])
def test_a_batch_of_coupled_samples_cannot_be_split(loss: Any) -> None:
    torch.manual_seed(0)
    assert verdict((net(), loss, data())).reason


@pytest.mark.parametrize("name", ["moe", "hf_mixtral"])
def test_a_balance_loss_over_the_batch_is_noticed(name: str) -> None:
    """The term is a hundredth of the loss, which hardly differs from the mean of the samples'
    losses."""
    assert "samples are not independent" in verdict(zoo.case(name).make()).reason


@pytest.mark.parametrize(
    "name", [on_its_worker(name) for name in ("gpt", "lstm", "hf_gpt2", "hf_t5")]
)
def test_rounding_differences_do_not_count_as_coupling(name: str) -> None:
    assert not trial_of(name).source.splitting().reason


class Choices(nn.Module):
    """A model with a bias that all choices share: its gradient is zero up to rounding, because
    the softmax is over the choices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score = nn.Linear(8, 4), nn.Linear(4, 1)
        for parameter in self.parameters():
            parameter.data.mul_(1e-2)  # so that the other gradients are small as well

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.score(self.inner(x)).squeeze(-1)
        return out


def lookalike_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss in which samples look each other up, in the small gradient of one parameter
    only."""
    h = model[0](batch["x"]).detach()
    others = h[batch["y"] % len(h)]
    return class_loss(model, batch) + 1e-4 * (model.get_parameter("small") * h * others).mean()


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(seed: int) -> None:
    torch.manual_seed(seed)
    batch = {"x": torch.randn(4, 3, 8), "y": torch.randint(3, (4,))}
    assert not verdict((Choices(), class_loss, batch)).reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_small_is_compared_all_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = net()
    model.register_parameter("small", nn.Parameter(torch.randn(8)))
    batch = {"x": torch.randn(6, 8, dtype=dtype), "y": torch.arange(6) % 3}
    assert "the gradient of small" in verdict((model.to(dtype), lookalike_loss, batch)).reason


# --- parameters and precisions that hide a dependence ---------------------------------------------


def with_zeros(model: nn.Module) -> nn.Module:
    """Return the model with a head of zeros, as many start: every class is equally likely for
    any sample."""
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    return model


def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return class_loss(model, batch)


def low_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose mean is taken in half precision."""
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return each.to(torch.bfloat16).mean()


@pytest.mark.parametrize("loss", [class_loss, autocast_loss, low_loss])
def test_zeros_and_half_precision_do_not_prevent_splitting(loss: Any) -> None:
    torch.manual_seed(0)
    assert not verdict((with_zeros(net()), loss, data())).reason


def test_a_half_precision_model_can_be_split() -> None:
    torch.manual_seed(0)
    batch = data()
    low = {**batch, "x": batch["x"].bfloat16()}
    assert not verdict((with_zeros(net()).bfloat16(), class_loss, low)).reason


def test_a_zero_gate_does_not_hide_coupled_samples() -> None:
    """Experts choose samples by values of the batch, which no operator shows."""
    model = net()
    model.register_parameter("gate", nn.Parameter(torch.zeros(())))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model[0](batch["x"])
        others = h[batch["y"] % len(h)]
        return class_loss(model, batch) + model.get_parameter("gate").square() * (h * others).mean()

    torch.manual_seed(0)
    assert "samples are not independent" in verdict((model, loss, data())).reason


def test_half_precision_hides_no_small_term_of_all_samples() -> None:
    """The term moves gradients by less than bfloat16 rounds them."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model[0](batch["x"]).float()
        scores = model(batch["x"]).float()
        others = h[batch["y"] % len(h)]
        return nn.functional.cross_entropy(scores, batch["y"]) + 1e-3 * (h * others).mean()

    torch.manual_seed(0)
    batch = data()
    low = {**batch, "x": batch["x"].bfloat16()}
    assert "samples are not independent" in verdict((net().bfloat16(), loss, low)).reason


def test_noise_outside_the_domain_of_the_loss_is_left_out() -> None:
    model = net()
    model.register_parameter("shift", nn.Parameter(torch.zeros(())))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the root of a number, which is negative wherever the shift is above zero."""
        return class_loss(model, batch) * (1e-4 - model.get_parameter("shift").abs()).sqrt()

    torch.manual_seed(0)
    assert not verdict((model, loss, data())).reason


def test_equal_samples_are_recognized() -> None:
    batch = {"x": torch.ones(6, 8), "y": torch.ones(6, dtype=torch.long)}
    assert "give a batch whose samples differ" in verdict((net(), class_loss, batch)).reason


def test_samples_are_compared_by_sketches_that_are_linear_and_as_large() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 701), torch.randn(300, 701)
    assert torch.allclose(sketch(a + 2 * b), sketch(a) + 2 * sketch(b), atol=1e-2)
    assert 0.5 < float(sketch(a).norm() / a.norm()) < 1.5
    assert torch.equal(sketch(a[0])[:701], a[0].double())  # small: compared without a sketch


def test_a_loss_that_is_no_number_tells_nothing() -> None:
    model = net()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    assert verdict((model, class_loss, data())).reason == (
        "the loss is nan, so splitting the batch cannot be checked"
    )


def test_checking_a_split_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    batch = data()
    drawn = torch.get_rng_state()

    assert not verdict((model, class_loss, batch)).reason
    assert torch.equal(drawn, torch.get_rng_state())
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert all(p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# --- losses whose weights are in the batch --------------------------------------------------------


def masked_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


@pytest.mark.parametrize("mask", [[1.0] * 6, [1.0, 1.0, 1.0, 1.0, 0.2, 0.2]])
def test_a_masked_mean_cannot_be_split_whatever_the_first_mask(mask: list[float]) -> None:
    batch = {**data(), "mask": torch.tensor(mask)}
    assert verdict((net(), masked_mean, batch)).reason


def test_class_weights_prevent_splitting_even_if_equal_in_the_first_batch() -> None:
    batch = {**data(), "y": torch.zeros(6, dtype=torch.long)}
    assert "normalized by the class weights" in verdict((net(), weighed_loss, batch)).reason


def test_hooks_of_parameters_would_run_once_for_each_part() -> None:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    assert "has a hook" in verdict((model, class_loss, data())).reason


def test_buffers_would_be_written_once_for_each_part() -> None:
    assert "buffer steps is updated" in verdict((Counting(), class_loss, data())).reason


def test_per_sample_statistics_can_be_split() -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten())
    model.append(nn.Linear(8, 3))
    assert verdict((model, class_loss, data())) == Splitting(reduction=Reduction.COUNTED)


# --- targets that cannot be counted ahead of the step ---------------------------------------------


def loss_on_a_random_half(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    kept = torch.rand(batch["y"].shape[0]) < 0.5
    return nn.functional.cross_entropy(model(batch["x"]), torch.where(kept, batch["y"], -100))


def loss_where_the_model_is_sure(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    unsure = out.detach().argmax(1) == 2
    return nn.functional.cross_entropy(out, batch["y"].masked_fill(unsure, -100))


def test_targets_drawn_at_random_are_not_drawn_a_second_time() -> None:
    sample = net(), loss_on_a_random_half, data()
    drawn = torch.get_rng_state()
    assert "drawn at random" in verdict(sample).reason
    assert torch.equal(drawn, torch.get_rng_state())


def test_targets_chosen_by_the_model_cannot_be_counted_in_advance() -> None:
    reason = verdict((net(), loss_where_the_model_is_sure, data())).reason
    assert "depend on the model's output" in reason


@pytest.mark.parametrize("counting", [(1, 4), (1,), (0, 4, 5), ()])
def test_counted_samples_are_found_anywhere_in_the_batch(counting: tuple[int, ...]) -> None:
    """Of twelve samples, the first, the last and two between are compared; none, one or two of
    them count."""
    batch = data(12)
    batch["y"] = torch.tensor([i % 3 if i in counting else -100 for i in range(12)])
    reason = verdict((net(), class_loss, batch)).reason
    assert not reason if len(counting) > 1 else "fewer than two samples" in reason


# --- several means that count targets -------------------------------------------------------------


def two_means(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    others = nn.functional.cross_entropy(-out, batch["others"])
    return nn.functional.cross_entropy(out, batch["y"]) + 0.4 * others


def two_means_and_another(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss with two means and another term, which has no weight yet."""
    return two_means(model, batch) + 0.0 * model(batch["x"]).square().mean()


@pytest.mark.parametrize(
    ("loss", "ignored", "others_ignored", "expected"),
    [
        (two_means, (), (), Reduction.COUNTED),
        (two_means, (1, 3), (1, 3), Reduction.COUNTED),
        (two_means_and_another, (), (), Reduction.MEAN),
        (two_means, (1,), (), "of different samples"),
        (two_means, (1,), (2,), "of different samples"),
        (two_means_and_another, (1,), (1,), "has another term"),
    ],
)
def test_means_are_weighted_by_the_total_count(
    loss: Any, ignored: Any, others_ignored: Any, expected: Any
) -> None:
    batch = data()
    batch["others"] = batch["y"].flip(0)
    batch["y"][[*ignored]] = -100
    batch["others"][[*others_ignored]] = -100
    found = verdict((net(), loss, batch))
    if isinstance(expected, Reduction):
        assert not found.reason
        assert found.reduction is expected
    else:
        assert expected in found.reason
