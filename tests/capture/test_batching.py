"""The batch is cut only where the parts train what the whole would have trained."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.batching import Reduction, Splitting
from steelyard.capture.coupling import coupling
from steelyard.capture.source import StepSource
from steelyard.core.graph import Graph
from tests import zoo
from tests.harness import trial_of
from tests.zoo.case import Sample
from tests.zoo.workers import on_its_worker


def verdict(sample: Sample) -> Splitting:
    model, loss, batch = sample
    return StepSource(model=model, loss=loss, batch=batch).splitting()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def data(count: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 8), "y": torch.randint(3, (count,))}


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def sum_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum()


def squared_mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A term that sees all samples at once, a thousandth of the loss or less."""
    return class_loss(model, batch) + 1e-3 * model(batch["x"]).mean(0).square().sum()


def spread_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Samples are compared with one another."""
    out = model(batch["x"])
    return torch.cdist(out, out).mean() + out.square().mean()


def weighed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(
        model(batch["x"]), batch["y"], weight=torch.tensor([1.0, 7.0, 0.1])
    )


@pytest.mark.parametrize(
    ("loss", "reduction"), [(class_loss, Reduction.COUNTED), (sum_loss, Reduction.SUM)]
)
def test_samples_apart_from_one_another_may_be_cut(loss: Any, reduction: Reduction) -> None:
    torch.manual_seed(0)
    found = verdict((net(), loss, data()))
    assert not found.reason
    assert found.reduction is reduction


@pytest.mark.parametrize("loss", [squared_mean_loss, spread_loss, weighed_loss])
def test_samples_that_see_each_other_may_not(loss: Any) -> None:
    torch.manual_seed(0)
    assert verdict((net(), loss, data())).reason


@pytest.mark.parametrize("name", ["moe", "hf_mixtral"])
def test_a_balance_loss_over_the_batch_is_noticed(name: str) -> None:
    """It is a hundredth of the loss and hardly differs from the mean of the samples'."""
    assert "samples see each other" in verdict(zoo.case(name).make()).reason


@pytest.mark.parametrize(
    "name", [on_its_worker(name) for name in ("gpt", "lstm", "hf_gpt2", "hf_t5")]
)
def test_rounding_is_not_taken_for_more(name: str) -> None:
    assert not trial_of(name).source.splitting().reason


class Choices(nn.Module):
    """A bias that all choices share takes no gradient but rounding: the softmax is over them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score = nn.Linear(8, 4), nn.Linear(4, 1)
        for parameter in self.parameters():
            parameter.data.mul_(1e-2)  # so that the other gradients are small as well

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.score(self.inner(x)).squeeze(-1)
        return out


def lookalike_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Samples look each other up, in the small gradient of one parameter and nowhere else."""
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


def test_looking_leaves_no_trace() -> None:
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


# --- losses whose samples are weighed by what is in the batch -------------------------------------


def masked_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


@pytest.mark.parametrize("mask", [[1.0] * 6, [1.0, 1.0, 1.0, 1.0, 0.2, 0.2]])
def test_a_mean_over_a_mask_may_not_be_cut_whatever_the_first_mask_is(mask: list[float]) -> None:
    batch = {**data(), "mask": torch.tensor(mask)}
    assert verdict((net(), masked_mean, batch)).reason


def test_class_weights_may_not_be_cut_although_the_first_batch_has_equal_ones() -> None:
    batch = {**data(), "y": torch.zeros(6, dtype=torch.long)}
    assert "classes are weighed" in verdict((net(), weighed_loss, batch)).reason


def test_hooks_of_parameters_would_run_once_for_each_part() -> None:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    assert "has a hook" in verdict((model, class_loss, data())).reason


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        out: Tensor = self.inner(x)
        return out


def test_buffers_would_be_written_once_for_each_part() -> None:
    assert "buffer steps is written" in verdict((Counting(), class_loss, data())).reason


# --- parts that ranks compute at one time --------------------------------------------------------


def shared(sample: Sample) -> Splitting:
    model, loss, batch = sample
    return StepSource(model=model, loss=loss, batch=batch).sharing()


class Remembering(nn.Module):
    """A mean of what came by, as a teacher or a codebook keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.detach().mean(0), 0.1)
        out: Tensor = self.inner(x)
        return out


def normed(**said: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **said), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("said", [{}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize(
    ("loss", "reduction"), [(class_loss, Reduction.COUNTED), (sum_loss, Reduction.SUM)]
)
def test_ranks_can_take_statistics_together(
    said: dict[str, Any], loss: Any, reduction: Reduction
) -> None:
    sample = normed(**said), loss, data()
    assert "takes its statistics over the whole batch" in verdict(sample).reason
    assert shared(sample) == Splitting(reduction=reduction)


def test_ranks_count_steps_alike() -> None:
    assert shared((Counting(), class_loss, data())).reason == ""


@pytest.mark.parametrize("loss", [squared_mean_loss, spread_loss, weighed_loss])
def test_what_else_lets_samples_see_each_other_is_seen_beside_statistics(loss: Any) -> None:
    assert shared((normed(), loss, data())).reason


class Folded(nn.Module):
    """Statistics over samples that lie along another dim than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).t().unsqueeze(0)
        h = nn.functional.batch_norm(h, None, None, training=True)
        out: Tensor = self.down(h.squeeze(0).t().tanh())
        return out


def test_statistics_along_another_dim_are_seen() -> None:
    assert "takes statistics of samples" in shared((Folded(), class_loss, data())).reason
    assert verdict((Folded(), class_loss, data())).reason


def test_statistics_of_each_sample_may_be_cut() -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten())
    model.append(nn.Linear(8, 3))
    assert verdict((model, class_loss, data())) == Splitting(reduction=Reduction.COUNTED)


def test_a_buffer_of_what_a_rank_saw_is_no_statistic() -> None:
    assert "buffer seen is written" in shared((Remembering(), class_loss, data())).reason
    behind = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), Remembering())
    assert "buffer 3.seen is written" in shared((behind, class_loss, data())).reason


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


def test_targets_that_the_model_chooses_are_not_known_before_it_runs() -> None:
    reason = verdict((net(), loss_where_the_model_is_sure, data())).reason
    assert "depends on what the model says" in reason


@pytest.mark.parametrize("counting", [(1, 4), (1,), (0, 4, 5), ()])
def test_samples_that_count_are_looked_at_wherever_they_are(counting: tuple[int, ...]) -> None:
    """Of twelve, the first, the last and two between are: none, one or two of them count."""
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
    """The other is of no weight as yet."""
    return two_means(model, batch) + 0.0 * model(batch["x"]).square().mean()


@pytest.mark.parametrize(
    ("loss", "ignored", "others_ignored", "expected"),
    [
        (two_means, (), (), Reduction.COUNTED),
        (two_means, (1, 3), (1, 3), Reduction.COUNTED),
        (two_means_and_another, (), (), Reduction.MEAN),
        (two_means, (1,), (), "in different samples"),
        (two_means, (1,), (2,), "in different samples"),
        (two_means_and_another, (1,), (1,), "has a term besides"),
    ],
)
def test_means_are_weighed_by_what_all_of_them_count(
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


# --- losses whose samples see each other, but not in the batch that is planned with ---------------


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
def test_operators_show_what_the_numbers_of_one_batch_do_not(loss: Any) -> None:
    """Every class once, nothing masked, no reward but one, no target missing, all active."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    batch = {"x": torch.randn(3, 3), "y": torch.arange(3), "mask": torch.ones(3, 3)}
    reason = verdict((model, loss, batch)).reason
    assert "samples see each other" in reason
    assert "test_batching.py:" in reason


@pytest.fixture(scope="module")
def graph() -> Graph:
    """For its sizes, which samples are told apart from; the terms below bring no others."""
    return StepSource(model=net(), loss=class_loss, batch=data()).graph(micro_batches=1)


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
def test_mixing_of_samples_is_seen_in_a_term_that_is_of_no_weight_as_yet(
    term: Any, graph: Graph
) -> None:
    model = net()
    model.register_buffer("ramp", torch.zeros(()))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ramp = model.get_buffer("ramp")
        return class_loss(model, batch) + ramp * term(model(batch["x"])).mean()

    assert "samples see each other" in coupling(model, loss, data(), graph)


def test_each_sample_may_look_up_sort_and_draw_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            noise = torch.rand(ids.shape)  # as masked autoencoders choose what to keep
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
def test_gradients_by_frequency_may_not_be_cut_although_no_index_is_there_twice(words: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = model(batch["x"])
        return nn.functional.cross_entropy(out.flatten(1), batch["y"])

    batch = {"x": torch.randperm(64)[:6].reshape(6, 1), "y": torch.randint(3, (6,))}
    assert "how often each index is in the batch" in verdict((words, loss, batch)).reason


class Clip(torch.autograd.Function):
    """The gradient of the batch is clipped by its norm, or that of each sample by its own."""

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
        assert "makes one value of all samples (tests/capture/test_batching.py:" in reason
    else:
        assert not reason


class Sign(torch.autograd.Function):
    """Weights of one bit: the gradient goes straight through where the weight is small."""

    @staticmethod
    def forward(context: Any, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        return weight.sign()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (weight,) = context.saved_tensors
        return torch.where(weight.abs() < 0.3, gradients[0], 0.0)


class Rows(torch.autograd.Function):
    """An embedding."""

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
    """Everything put together from samples is added up, weighed by what no sample gives."""
    out = model(batch["x"])
    by_class = torch.stack([out[:, i].square().sum() for i in range(3)]).to(torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    total += by_class.dot(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)) / len(out)
    metric = (out.argmax(1) == batch["y"]).sum() / batch["y"].max()  # reaches nothing
    return total.float() + 0.1 * model[0].weight.norm() / 2 + torch.zeros_like(metric)


def test_sums_and_what_never_reaches_the_loss_may_be_cut() -> None:
    torch.manual_seed(0)
    assert not verdict((net(), own_sums, data())).reason


def test_rows_routed_to_experts_are_each_their_own() -> None:
    assert not verdict(zoo.case("hf_olmoe").make()).reason
