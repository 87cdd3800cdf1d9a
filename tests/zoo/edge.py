"""Awkward but legal training steps (`CASES`), and steps that must be refused readably (`REFUSED`).

Each is as small as shows the point. They have no scale but "tiny".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .case import Case, Sample, Scale, Shelf, class_loss, images, square_loss

_COUNT, _WIDTH, _LENGTH = 4, 8, 6

_legal = Shelf(scales=("tiny",))
_illegal = Shelf(scales=("tiny",))


class Around(nn.Module):
    """A model: a linear layer, the function in question, and a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = _WIDTH) -> None:
        super().__init__()
        self.before = nn.Linear(_WIDTH, _WIDTH)
        self.after = nn.Linear(width, _WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.function(self.before(x)))
        return result


def _rows(count: int = _COUNT) -> dict[str, Tensor]:
    return {"x": torch.randn(count, _WIDTH), "y": torch.randint(0, _WIDTH, (count,))}


def _sequences() -> dict[str, Tensor]:
    return {"x": torch.randn(_COUNT, _LENGTH, _WIDTH)}


def _around(function: Callable[[Tensor], Tensor], width: int = _WIDTH) -> Sample:
    return Around(function, width), class_loss, _rows()


def _chain(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *parts, nn.Linear(_WIDTH, _WIDTH))


# --- parameters -----------------------------------------------------------------------------------


@_legal.add("one weight under an embedding, a linear and a bare parameter")
def tied_three_ways(scale: Scale) -> Sample:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(_WIDTH, _WIDTH)
            self.head = nn.Linear(_WIDTH, _WIDTH, bias=False)
            self.head.weight = self.token.weight
            self.bare = self.token.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.token(ids) @ self.bare).mean(1)

    ids = torch.randint(0, _WIDTH, (_COUNT, _LENGTH))
    return Tied(), class_loss, {"x": ids, "y": ids[:, 0].clone()}


@_legal.add("decoder uses the encoder's weight, transposed")
def tied_transposed(scale: Scale) -> Sample:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(_WIDTH, 3)
            self.bias = nn.Parameter(torch.zeros(_WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.encoder(x).tanh(), self.encoder.weight.t(), self.bias) - x

    return Autoencoder(), square_loss, _rows()


@_legal.add("one module object under two names")
def tied_module(scale: Scale) -> Sample:
    shared = nn.Linear(_WIDTH, _WIDTH)
    return nn.Sequential(shared, nn.ReLU(), shared), class_loss, _rows()


@_legal.add("one module called twice by its parent")
def module_called_twice(scale: Scale) -> Sample:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.dropout(self.layer(self.dropout(x)).relu()))

    return Twice(), class_loss, _rows()


@_legal.add("the middle block takes no gradient, but passes one on")
def frozen_block(scale: Scale) -> Sample:
    model = _chain(nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU())
    model[2].requires_grad_(False)
    return model, class_loss, _rows()


@_legal.add("the first block takes no gradient: nothing flows below it")
def frozen_first_block(scale: Scale) -> Sample:
    model = _chain(nn.ReLU())
    model[0].requires_grad_(False)
    return model, class_loss, _rows()


class _Bag(nn.Module):
    """A model that maps ids to classes by the mean of their embeddings."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(_WIDTH, _WIDTH, **embedding)
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.token(ids).mean(1))
        return result


def _bag(**embedding: Any) -> Sample:
    ids = torch.randint(0, _WIDTH, (_COUNT, _LENGTH))
    return _Bag(**embedding), class_loss, {"x": ids, "y": ids[:, 0].clone()}


@_legal.add("an embedding without gradient, read with int ids")
def frozen_embedding(scale: Scale) -> Sample:
    model, loss, batch = _bag()
    model.token.requires_grad_(False)
    return model, loss, batch


@_legal.add("a row of the embedding takes no gradient")
def padding_idx(scale: Scale) -> Sample:
    return _bag(padding_idx=0)


@_legal.add("gradients scaled by how often an id occurs in the batch")
def scale_grad_by_freq(scale: Scale) -> Sample:
    return _bag(scale_grad_by_freq=True)


@_legal.add("eager leaves its gradient None")
def unused_parameter(scale: Scale) -> Sample:
    model = Around(torch.relu)
    model.unused = nn.Parameter(torch.ones(3))
    return model, class_loss, _rows()


@_legal.add("used, but only behind a detach: eager leaves its gradient None")
def detached_parameter(scale: Scale) -> Sample:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Linear(_WIDTH, _WIDTH)
            self.head = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.seen(x).detach().relu())
            return result

    return Detached(), class_loss, _rows()


@_legal.add("used, but its gradient is zero everywhere (not None)")
def zero_gradient(scale: Scale) -> Sample:
    model, loss, batch = _around(lambda x: x * 0.0)
    return model, loss, batch


@_legal.add("a parameter whose strides are not those of its shape")
def noncontiguous_parameter(scale: Scale) -> Sample:
    model = _chain(nn.ReLU())
    model[0].weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH).t())
    return model, class_loss, _rows()


@_legal.add("parameters that are views of one flat storage")
def parameters_in_one_storage(scale: Scale) -> Sample:
    flat = torch.randn(2 * _WIDTH * _WIDTH)
    model = _chain(nn.ReLU())
    model[0].weight = nn.Parameter(flat[: _WIDTH * _WIDTH].view(_WIDTH, _WIDTH))
    model[2].weight = nn.Parameter(flat[_WIDTH * _WIDTH :].view(_WIDTH, _WIDTH))
    return model, class_loss, _rows()


@_legal.add("a parameter without dims")
def scalar_parameter(scale: Scale) -> Sample:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.temperature = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.temperature.exp()

    return Scaled(), class_loss, _rows()


@_legal.add("parameters in a ParameterList and a ParameterDict")
def parameter_containers(scale: Scale) -> Sample:
    class Contained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(_WIDTH, _WIDTH) for _ in range(3))
            self.scales = nn.ParameterDict({"last": nn.Parameter(torch.ones(_WIDTH))})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return x * self.scales["last"]

    return Contained(), class_loss, _rows()


@_legal.add("a complex parameter")
def complex_parameter(scale: Scale) -> Sample:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(_WIDTH // 2 + 1, dtype=torch.complex64))
            self.head = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.gain, n=_WIDTH))
            return result

    return Filter(), class_loss, _rows()


@_legal.add("complex layers, whose backward conjugates lazily: kernels copy what they read so")
def complex_layers(scale: Scale) -> Sample:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(_WIDTH, 64, dtype=torch.complex64)
            self.second = nn.Linear(64, 64, dtype=torch.complex64)
            self.head = nn.Linear(64, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.second(self.first(x.cfloat()).tanh()).abs())
            return result

    return Layers(), class_loss, _rows()


@_legal.add("the weight is computed from two parameters at every call")
def weight_norm(scale: Scale) -> Sample:
    return parametrizations.weight_norm(nn.Linear(_WIDTH, _WIDTH)), class_loss, _rows()


@_legal.add("the parametrization updates its buffers in place at every call")
def spectral_norm(scale: Scale) -> Sample:
    return parametrizations.spectral_norm(nn.Linear(_WIDTH, _WIDTH)), class_loss, _rows()


# --- buffers and statistics -----------------------------------------------------------------------


@_legal.add("the model writes a running mean into a buffer, in place")
def buffer_written(scale: Scale) -> Sample:
    class Tracked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.register_buffer("mean", torch.zeros(_WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            return y - self.mean

    return Tracked(), class_loss, _rows()


@_legal.add("a buffer that is not saved with the model")
def buffer_not_persistent(scale: Scale) -> Sample:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.register_buffer("mask", torch.arange(_WIDTH) % 2 == 0, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).masked_fill(self.mask, 0.0)

    return Masked(), class_loss, _rows()


@_legal.add("part of the model in eval mode: its statistics stand still")
def batchnorm_in_eval(scale: Scale) -> Sample:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    return _chain(Frozen(_WIDTH), nn.ReLU()), class_loss, _rows()


@_legal.add("BatchNorm without running statistics")
def batchnorm_untracked(scale: Scale) -> Sample:
    model = _chain(nn.BatchNorm1d(_WIDTH, track_running_stats=False), nn.ReLU())
    return model, class_loss, _rows()


def _norm2d(norm: nn.Module) -> Sample:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), *head), class_loss, images(4, 8, 10)


@_legal.add()
def group_norm(scale: Scale) -> Sample:
    return _norm2d(nn.GroupNorm(2, 4))


@_legal.add()
def instance_norm(scale: Scale) -> Sample:
    return _norm2d(nn.InstanceNorm2d(4, affine=True))


@_legal.add("InstanceNorm with running statistics")
def instance_norm_tracked(scale: Scale) -> Sample:
    return _norm2d(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))


# --- writing in place -----------------------------------------------------------------------------


@_legal.add("activations changed in place, where autograd allows it")
def inplace_activations(scale: Scale) -> Sample:
    def change(x: Tensor) -> Tensor:
        y = (x * 2).add_(1).relu_()
        y = y + x
        y *= 0.5
        return y.clamp_(-2, 2).neg_()

    return _around(change)


@_legal.add("parts of an activation written through views")
def inplace_views(scale: Scale) -> Sample:
    def change(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] += 1
        y[:, 1:3].mul_(2)
        halves = y.view(len(y), 2, -1)
        halves[:, 0].copy_(halves[:, 1] * 3)
        y[0].zero_()
        return y

    return _around(change)


@_legal.add("an activation filled piece by piece")
def inplace_filled(scale: Scale) -> Sample:
    def fill(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for column in range(x.shape[1]):
            out[:, column] = x[:, column] * column
        return out

    return _around(fill)


# --- batches --------------------------------------------------------------------------------------


@_legal.add("two inputs of different kinds")
def two_inputs(scale: Scale) -> Sample:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = _Bag()
            self.rows = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
            result: Tensor = self.text(ids) + self.rows(rows)
            return result

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, rows, labels = batch
        return F.cross_entropy(model(ids, rows), labels)

    labels = torch.randint(0, _WIDTH, (_COUNT,))
    ids = torch.randint(0, _WIDTH, (_COUNT, _LENGTH))
    return Two(), loss, (ids, torch.randn(_COUNT, _WIDTH), labels)


@_legal.add("dict in list in tuple")
def nested_batch(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: tuple[list[dict[str, Tensor]], Tensor]) -> Tensor:
        views, labels = batch
        return sum((F.cross_entropy(model(view["x"]), labels) for view in views), torch.zeros(()))

    views = [{"x": torch.randn(_COUNT, _WIDTH)} for _ in range(2)]
    return _chain(nn.ReLU()), loss, (views, torch.randint(0, _WIDTH, (_COUNT,)))


@_legal.add("the batch goes in by keyword; one is left at its default")
def keyword_batch(scale: Scale) -> Sample:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)

        def forward(
            self, *, y: Tensor | None = None, x: Tensor, weight: Tensor | None = None
        ) -> dict[str, Tensor]:
            logits = self.layer(x)
            assert y is not None
            return {"logits": logits, "loss": F.cross_entropy(logits, y, weight)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = model(**batch)["loss"]
        return value

    return Keyword(), loss, _rows()


class Pair(NamedTuple):
    """A batch with names that is a tuple."""

    x: Tensor
    y: Tensor


@_legal.add("the batch is a named tuple")
def named_tuple_batch(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    return _chain(nn.ReLU()), loss, Pair(**_rows())


@_legal.add("the batch is one tensor")
def bare_batch(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch), batch)

    return _chain(nn.ReLU()), loss, torch.randn(_COUNT, _WIDTH)


@_legal.add("a number and a None beside the tensors of the batch")
def constants_in_batch(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["x"]) / batch["temperature"]
        return F.cross_entropy(logits, batch["y"], batch["weight"])

    return _chain(nn.ReLU()), loss, {**_rows(), "temperature": 0.5, "weight": None}


@_legal.add("one tensor twice in the batch")
def repeated_batch_tensor(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["target"])

    x = torch.randn(_COUNT, _WIDTH)
    return _chain(nn.ReLU()), loss, {"x": x, "target": x}


@_legal.add("a tensor of the batch is not contiguous")
def noncontiguous_batch(scale: Scale) -> Sample:
    batch = _rows()
    batch["x"] = torch.randn(_WIDTH, _COUNT).t()
    return _chain(nn.ReLU()), class_loss, batch


@_legal.add("int and bool tensors, made float in the model")
def int_and_bool_inputs(scale: Scale) -> Sample:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, pixels: Tensor, keep: Tensor) -> Tensor:
            return self.layer(torch.where(keep, pixels.float() / 255, 0.0))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["pixels"], batch["keep"]), batch["y"])

    pixels = torch.randint(0, 256, (_COUNT, _WIDTH), dtype=torch.uint8)
    return Typed(), loss, {"pixels": pixels, "keep": pixels > 40, "y": _rows()["y"]}


@_legal.add("a batch of one")
def one_row(scale: Scale) -> Sample:
    return _chain(nn.ReLU()), class_loss, _rows(1)


@_legal.add("a tensor without elements joins the activations")
def empty_tensor(scale: Scale) -> Sample:
    return _around(lambda x: torch.cat([x[:, :0], x], dim=1))


# --- losses ---------------------------------------------------------------------------------------


@_legal.add("rows count unequally: the mean is over the labels that are not ignored")
def ignore_index(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["y"].flatten(), ignore_index=-1)

    labels = torch.randint(0, _WIDTH, (_COUNT, _LENGTH))
    dropped = torch.arange(_LENGTH) > torch.arange(_COUNT)[:, None]
    return _chain(nn.ReLU()), loss, {**_sequences(), "y": labels.masked_fill(dropped, -1)}


@_legal.add("cross entropy with label smoothing and class weights held by a module")
def label_smoothing(scale: Scale) -> Sample:
    criterion = nn.CrossEntropyLoss(torch.linspace(0.5, 1.5, _WIDTH), label_smoothing=0.1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = criterion(model(batch["x"]), batch["y"])
        return value

    return _chain(nn.ReLU()), loss, _rows()


@_legal.add("a sum over the batch, no mean")
def sum_loss(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    return _chain(nn.ReLU(), nn.Dropout(0.1)), loss, _rows()


@_legal.add("every row is compared with every other: micro-batches change it")
def contrastive_loss(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        left, right = (F.normalize(model(batch[side]), dim=-1) for side in ("left", "right"))
        scores = left @ right.t() / 0.1
        labels = torch.arange(len(scores))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2

    batch = {side: torch.randn(_COUNT, _WIDTH) for side in ("left", "right")}
    return _chain(nn.ReLU()), loss, batch


@_legal.add("the loss reads the parameters itself")
def penalty_on_parameters(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        penalty = torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
        return class_loss(model, batch) + 0.01 * penalty

    return _chain(nn.ReLU()), loss, _rows()


@_legal.add("a teacher outside the model, held by the loss")
def distillation(scale: Scale) -> Sample:
    teacher = _chain(nn.Tanh()).requires_grad_(False).eval()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            target = teacher(batch["x"]).log_softmax(-1)
        return F.kl_div(
            model(batch["x"]).log_softmax(-1), target, log_target=True, reduction="batchmean"
        )

    return _chain(nn.ReLU()), loss, _rows()


@_legal.add("the loss is a partial")
def partial_loss(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor], *, smoothing: float) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=smoothing)

    return _chain(nn.ReLU()), partial(loss, smoothing=0.2), _rows()


@_legal.add("the loss is a method of an object with tensors of its own")
def method_loss(scale: Scale) -> Sample:
    class Criterion:
        def __init__(self) -> None:
            self.weight = torch.linspace(0.5, 1.5, _WIDTH)

        def value(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch["x"]), batch["y"], self.weight)

    return _chain(nn.ReLU()), Criterion().value, _rows()


@_legal.add("the loss is another dtype than the model")
def float64_loss(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).double(), batch["y"])

    return _chain(nn.ReLU()), loss, _rows()


# --- dtypes and layouts ---------------------------------------------------------------------------


@_legal.add("bf16 inside autocast, float32 outside")
def autocast_bf16(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch["x"])
        return F.cross_entropy(logits.float(), batch["y"])

    return _chain(nn.LayerNorm(_WIDTH), nn.GELU(), nn.Dropout(0.1)), loss, _rows()


@_legal.add("autocast switched off again for one layer")
def autocast_nested(scale: Scale) -> Sample:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast = nn.Linear(_WIDTH, _WIDTH)
            self.exact = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.fast(x)
                with torch.autocast("cpu", enabled=False):
                    return self.exact(x.float())

    return Mixed(), class_loss, _rows()


@_legal.add()
def float64_model(scale: Scale) -> Sample:
    batch = _rows()
    return (
        _chain(nn.Tanh(), nn.Dropout(0.1)).double(),
        class_loss,
        {**batch, "x": batch["x"].double()},
    )


@_legal.add()
def bf16_model(scale: Scale) -> Sample:
    batch = _rows()
    model = _chain(nn.LayerNorm(_WIDTH), nn.GELU(), nn.Dropout(0.1)).bfloat16()
    return model, class_loss, {**batch, "x": batch["x"].bfloat16()}


@_legal.add("weights and pictures in channels_last")
def channels_last(scale: Scale) -> Sample:
    model, loss, batch = _norm2d(nn.BatchNorm2d(4))
    batch["x"] = batch["x"].contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), loss, batch


# --- operators ------------------------------------------------------------------------------------


@_legal.add()
def einsum(scale: Scale) -> Sample:
    return _around(lambda x: torch.einsum("bi,bj,ci->bcj", x, x, x).mean(1))


@_legal.add()
def cumsum(scale: Scale) -> Sample:
    return _around(lambda x: x.cumsum(-1).tanh())


@_legal.add("gradients only where the largest were")
def topk(scale: Scale) -> Sample:
    return _around(lambda x: x.topk(3, dim=-1).values, 3)


@_legal.add()
def sort(scale: Scale) -> Sample:
    return _around(lambda x: x.sort(-1, descending=True).values)


@_legal.add("rows written at computed places, some of them twice")
def index_put(scale: Scale) -> Sample:
    def put(x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % 3
        return torch.zeros_like(x).index_put((places,), x, accumulate=True) + x

    return _around(put)


@_legal.add()
def scatter(scale: Scale) -> Sample:
    def put(x: Tensor) -> Tensor:
        order = x.detach().argsort(-1)
        summed = torch.zeros_like(x).scatter_add(1, order // 2, x)
        return torch.zeros_like(x).scatter(1, order, summed)

    return _around(put)


@_legal.add()
def gather(scale: Scale) -> Sample:
    return _around(lambda x: x.gather(1, x.detach().argsort(-1)))


@_legal.add("advanced indexing with a mask of static shape")
def where_masked(scale: Scale) -> Sample:
    return _around(lambda x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x)).nan_to_num())


@_legal.add()
def fft(scale: Scale) -> Sample:
    return _around(lambda x: torch.fft.fft(x).abs())


@_legal.add("a kernel whose result lies otherwise than torch describes it, and a view of that")
def softplus_transposed(scale: Scale) -> Sample:
    def mix(x: Tensor) -> Tensor:
        parts = torch.nn.functional.softplus(x.view(2, -1, _WIDTH)).transpose(1, 2)
        return (parts.exp() * torch.arange(parts.shape[2])).transpose(1, 2).reshape(x.shape)

    return _around(mix)


@_legal.add("an autograd.Function of the user's own, saving and drawing in its backward pass")
def autograd_function(scale: Scale) -> Sample:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return -gradient * (x > 0) * torch.rand_like(x)

    return _around(Noisy.apply)


@_legal.add("nothing is kept")
def dropout_of_everything(scale: Scale) -> Sample:
    return _around(nn.Dropout(1.0))


@_legal.add()
def pairwise_distances(scale: Scale) -> Sample:
    return _around(lambda x: torch.cdist(x, x), _COUNT)


@_legal.add()
def logsumexp(scale: Scale) -> Sample:
    return _around(lambda x: x - x.logsumexp(-1, keepdim=True))


@_legal.add("chunk, split, roll, flip, repeat, expand and stack")
def reshuffled(scale: Scale) -> Sample:
    def move(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        both = torch.stack([left.roll(1, 0), right.flip(1)], dim=-1).flatten(1)
        return both + x[:1].expand_as(x) + x[:, :1].repeat(1, _WIDTH)

    return _around(move)


@_legal.add()
def bilinear(scale: Scale) -> Sample:
    class Pairing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(_WIDTH, _WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x, x.tanh())
            return result

    return Pairing(), class_loss, _rows()


@_legal.add()
def conv_transpose(scale: Scale) -> Sample:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, stride=2)
    )
    return model, square_loss, images(_COUNT, 9, 2)


@_legal.add()
def conv1d(scale: Scale) -> Sample:
    model = nn.Sequential(nn.Conv1d(_LENGTH, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 2, 3))
    return model, square_loss, _sequences()


@_legal.add()
def conv3d(scale: Scale) -> Sample:
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2))
    return model, square_loss, {"x": torch.randn(2, 1, 4, 4, 4)}


@_legal.add("dilated, grouped, padded by reflection")
def conv_unusual(scale: Scale) -> Sample:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, dilation=2, groups=3, padding=2, padding_mode="reflect"),
        nn.PReLU(6),
        nn.PixelShuffle(1),
        nn.AvgPool2d(2),
    )
    return model, square_loss, images(_COUNT, 8, 2)


@_legal.add("pooling that remembers where, then undoes it; upsampling")
def unpool(scale: Scale) -> Sample:
    class Hourglass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.pool = nn.MaxPool2d(2, return_indices=True)
            self.unpool = nn.MaxUnpool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            small, where = self.pool(self.conv(x))
            grown = F.interpolate(small, scale_factor=2, mode="bilinear")
            result: Tensor = self.unpool(small, where) + grown
            return result

    return Hourglass(), square_loss, images(_COUNT, 8, 2)


@_legal.add("sampling at places the model computes")
def grid_sample(scale: Scale) -> Sample:
    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            theta = self.places(x.mean((2, 3))).view(-1, 2, 3)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            return F.grid_sample(x, grid, align_corners=False)

    return Warp(), square_loss, images(_COUNT, 8, 2)


@_legal.add()
def embedding_bag(scale: Scale) -> Sample:
    model = nn.Sequential(nn.EmbeddingBag(_WIDTH, _WIDTH, mode="mean"), nn.Linear(_WIDTH, _WIDTH))
    ids = torch.randint(0, _WIDTH, (_COUNT, _LENGTH))
    return model, class_loss, {"x": ids, "y": ids[:, 0].clone()}


@_legal.add("the largest of each bag; its backward pass works on the bags that are not empty")
def embedding_bag_max(scale: Scale) -> Sample:
    model = nn.Sequential(nn.EmbeddingBag(_WIDTH, _WIDTH, mode="max"), nn.Linear(_WIDTH, _WIDTH))
    ids = torch.randint(0, _WIDTH, (_COUNT, _LENGTH))
    return model, class_loss, {"x": ids, "y": ids[:, 0].clone()}


@_legal.add("dropout of whole channels, and of SELU nets")
def dropout_variants(scale: Scale) -> Sample:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Dropout2d(0.2),
        nn.SELU(),
        nn.AlphaDropout(0.2),
        nn.RReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 10),
    )
    return model, class_loss, images(_COUNT, 8, 10)


@_legal.add("dropout on a transposed activation: which element a draw falls on depends on strides")
def dropout_transposed(scale: Scale) -> Sample:
    return _around(lambda x: F.dropout(x.t(), 0.5).t() + F.dropout(x.t().contiguous(), 0.5).t())


class Turned(nn.Module):
    """A model with the channels in the middle for a convolution, and last elsewhere: gradients
    arrive transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(_WIDTH, _WIDTH)
        self.across = nn.Conv1d(_WIDTH, 4 * _WIDTH, 1)
        self.norm = nn.LayerNorm(_LENGTH)
        self.after = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.before(x).transpose(1, 2)).transpose(1, 2)
        wide = F.dropout(self.across(first.transpose(1, 2)), 0.5)
        result: Tensor = self.after(wide.transpose(1, 2))
        return result


@_legal.add("gradients that reach dropout, layer norm and convolutions transposed")
def turned_gradients(scale: Scale) -> Sample:
    return Turned(), square_loss, _sequences()


@_legal.add("noise drawn in the forward pass, in three ways")
def random_draws(scale: Scale) -> Sample:
    def draw(x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.8))
        return F.gumbel_softmax(x + 0.1 * torch.randn_like(x)) * kept + torch.rand(1)

    return _around(draw)


# --- library layers -------------------------------------------------------------------------------


@_legal.add("nn.MultiheadAttention that also returns its weights")
def multihead_attention(scale: Scale) -> Sample:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(_WIDTH, 2, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mixed, weights = self.attention(x, x, x)
            result: Tensor = mixed + weights.mean()
            return result

    return Attend(), square_loss, _sequences()


@_legal.add("nn.TransformerEncoderLayer, two of them, with a padding mask")
def transformer_encoder(scale: Scale) -> Sample:
    layer = nn.TransformerEncoderLayer(_WIDTH, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(batch["x"], src_key_padding_mask=batch["padding"])
        return F.mse_loss(output, batch["x"].flip(1))

    padding = torch.arange(_LENGTH) >= _LENGTH - torch.arange(_COUNT)[:, None]
    return model, loss, {**_sequences(), "padding": padding}


@_legal.add("nn.Transformer: encoder and decoder, causal")
def transformer_decoder(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        output = model(batch["x"], batch["y"], tgt_mask=mask, tgt_is_causal=True)
        return F.mse_loss(output, batch["y"].flip(1))

    batch = {"x": _sequences()["x"], "y": _sequences()["x"]}
    return nn.Transformer(_WIDTH, 2, 1, 1, 16, batch_first=True), loss, batch


class _Cells(nn.Module):
    """A recurrent layer that keeps only its outputs."""

    def __init__(self, cells: nn.RNNBase) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cells(x)[0]
        return result


@_legal.add("nn.GRU, both ways")
def gru(scale: Scale) -> Sample:
    cells = nn.GRU(_WIDTH, _WIDTH, batch_first=True, bidirectional=True)
    return _Cells(cells), square_loss, _sequences()


@_legal.add("nn.RNN")
def rnn(scale: Scale) -> Sample:
    return _Cells(nn.RNN(_WIDTH, _WIDTH, batch_first=True)), square_loss, _sequences()


@_legal.add("two layers with dropout between them, straight on data that takes no gradient")
def lstm_on_data(scale: Scale) -> Sample:
    cells = nn.LSTM(_WIDTH, _WIDTH, num_layers=2, dropout=0.5, batch_first=True)
    return _Cells(cells), square_loss, _sequences()


@_legal.add("two layers with dropout between them: an export that loses it must be caught")
def gru_dropout(scale: Scale) -> Sample:
    cells = nn.GRU(_WIDTH, _WIDTH, num_layers=2, dropout=0.5, batch_first=True)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), _Cells(cells))
    return model, square_loss, _sequences()


@_legal.add("nn.LSTM with a projection")
def lstm_projected(scale: Scale) -> Sample:
    cells = nn.LSTM(_WIDTH, _WIDTH, proj_size=4, batch_first=True)
    return _Cells(cells), square_loss, _sequences()


@_legal.add("a cell stepped by a Python loop")
def lstm_cell_loop(scale: Scale) -> Sample:
    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = (x.new_zeros(len(x), _WIDTH), x.new_zeros(len(x), _WIDTH))
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state[0]

    return Stepped(), square_loss, _sequences()


# --- autograd by hand -----------------------------------------------------------------------------


@_legal.add("a tensor hook changes a parameter's gradient")
def tensor_hook(scale: Scale) -> Sample:
    model = _chain(nn.ReLU())
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model, class_loss, _rows()


@_legal.add("post-accumulate hooks scale the gradient where it lies")
def post_accumulate_hook(scale: Scale) -> Sample:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model = _chain(nn.ReLU())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return model, class_loss, _rows()


@_legal.add("a tensor hook on an activation, set in the forward pass")
def activation_hook(scale: Scale) -> Sample:
    def scaled(x: Tensor) -> Tensor:
        y = x.relu()
        y.register_hook(lambda gradient: gradient * 0.5)
        return y

    return _around(scaled)


@_legal.add("a forward hook that replaces the output, without side effects")
def forward_hook(scale: Scale) -> Sample:
    model = _chain(nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model, class_loss, _rows()


class _Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_chain(nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@_legal.add("the user recomputes already, with dropout inside")
def user_checkpoint(scale: Scale) -> Sample:
    return _Checkpointed(use_reentrant=False), class_loss, _rows()


@_legal.add("the same in its older, reentrant form")
def user_checkpoint_reentrant(scale: Scale) -> Sample:
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), _Checkpointed(use_reentrant=True))
    return model, class_loss, _rows()


class _Clipped(torch.autograd.Function):
    """Identity forward; the gradient is clamped."""

    @staticmethod
    def forward(context: Any, x: Tensor, bound: float) -> Tensor:
        context.bound = bound
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = context.saved_tensors
        return gradients[0].clamp(-context.bound, context.bound) * (x > 0), None


@_legal.add("torch.autograd.Function with a backward of its own")
def custom_function(scale: Scale) -> Sample:
    return _around(lambda x: _Clipped.apply(x, 0.05))


@_legal.add("straight through a rounding")
def straight_through(scale: Scale) -> Sample:
    return _around(lambda x: x + (x.round() - x).detach())


@_legal.add("part of the forward pass under no_grad")
def no_grad_inside(scale: Scale) -> Sample:
    def normalised(x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.norm(dim=-1, keepdim=True)
        return x / size

    return _around(normalised)


@_legal.add("a branch on a Python value, and one on a shape")
def static_branches(scale: Scale) -> Sample:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.deep = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) if self.deep else x
            return y.relu() if len(y) > 2 and self.training else y

    return Branching(), class_loss, _rows()


@_legal.add("three equal-looking blocks that differ in a Python attribute")
def blocks_alike_but_not(scale: Scale) -> Sample:
    class Shifted(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.roll(self.shift, 1) if self.shift else x).relu()

    return nn.Sequential(*(Shifted(index % 2) for index in range(6))), class_loss, _rows()


CASES: tuple[Case, ...] = tuple(
    Case(name=f"edge_{case.name}", build=case.build, note=case.note, scales=case.scales)
    for case in _legal.cases
)


# --- what must be refused -------------------------------------------------------------------------


class _Stateful(nn.Module):
    """A layer with a side effect that a captured step would have once, or never."""

    def __init__(self, effect: Callable[[_Stateful, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.effect = effect
        self.calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.effect(self, self.layer(x))


def _stateful(effect: Callable[[_Stateful, Tensor], Tensor]) -> Sample:
    return _Stateful(effect), class_loss, _rows()


@_illegal.add("a forward hook with a side effect: it would run at capture and never again")
def hook_with_side_effect(scale: Scale) -> Sample:
    model = _chain(nn.ReLU())
    seen: list[Tensor] = []

    def remember(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output.detach())

    model[0].register_forward_hook(remember)
    return model, class_loss, _rows()


@_illegal.add("a module's full backward hook: the captured step has no module to hang it on")
def full_backward_hook(scale: Scale) -> Sample:
    model = _chain(nn.ReLU())
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return model, class_loss, _rows()


@_illegal.add("a loss with a trainable tensor of its own, which nobody would train")
def trainable_loss(scale: Scale) -> Sample:
    model, loss, batch = _around(lambda x: x)
    temperature = torch.tensor(2.0, requires_grad=True)
    return model, lambda model, batch: loss(model, batch) * temperature, batch


@_illegal.add("a model that has been through torch.compile")
def compiled_model(scale: Scale) -> Sample:
    model, loss, batch = _around(lambda x: x)
    return torch.compile(model), loss, batch


@_illegal.add("an operator that checks its result and raises: torch.linalg")
def linalg(scale: Scale) -> Sample:
    def solve(x: Tensor) -> Tensor:
        square = x.t() @ x + torch.eye(_WIDTH)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(square), x.t(), upper=False).t()

    return _around(solve)


@_illegal.add("a branch on a value")
def branch_on_value(scale: Scale) -> Sample:
    return _around(lambda x: x.relu() if x.sum() > 0 else x.tanh())


@_illegal.add(".item() steers a branch")
def branch_on_item(scale: Scale) -> Sample:
    return _around(lambda x: x.relu() if x.sum().item() > 0 else x.tanh())


@_illegal.add(".item() becomes a factor")
def item_as_factor(scale: Scale) -> Sample:
    return _around(lambda x: x * x.abs().max().item())


@_illegal.add("the running mean of every batch so far: BatchNorm reads its counter with .item()")
def batchnorm_without_momentum(scale: Scale) -> Sample:
    return _chain(nn.BatchNorm1d(_WIDTH, momentum=None)), class_loss, _rows()


@_illegal.add("nonzero: as many rows as the values say")
def shape_from_values(scale: Scale) -> Sample:
    return _around(lambda x: x.index_add(1, (x[0] > 0).nonzero()[:, 0], x[:, x[0] > 0]))


@_illegal.add("boolean indexing: as many elements as the values say")
def boolean_index(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(batch["x"])
        kept: Tensor = output[output > 0].mean()
        return kept

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("the loss is a vector")
def loss_is_vector(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("the loss is a tuple")
def loss_is_tuple(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), logits

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("the loss is a Python number")
def loss_is_number(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
        return float(class_loss(model, batch))

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("the loss is None")
def loss_is_none(scale: Scale) -> Sample:
    return _chain(nn.ReLU()), lambda model, batch: None, _rows()


@_illegal.add("the loss is an integer tensor: a count has no gradient")
def loss_is_integer(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        wrong: Tensor = (model(batch["x"]).argmax(-1) != batch["y"]).sum()
        return wrong

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("every parameter is frozen")
def nothing_to_train(scale: Scale) -> Sample:
    return _chain(nn.ReLU()).requires_grad_(False), class_loss, _rows()


@_illegal.add("there is no parameter")
def no_parameters(scale: Scale) -> Sample:
    return nn.Sequential(nn.ReLU()), class_loss, _rows()


@_illegal.add("the loss does not depend on the model")
def loss_without_model(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        model(batch["x"])
        return batch["x"].square().mean()

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("the loss depends on the model only behind a detach")
def loss_detached(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return class_loss(model, batch).detach()

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("print in the forward pass: it would print at capture and never again")
def prints(scale: Scale) -> Sample:
    def say(model: _Stateful, x: Tensor) -> Tensor:
        print("seen", x.shape)
        return x

    return _stateful(say)


@_illegal.add("the forward pass counts its calls in a Python attribute")
def counts_calls(scale: Scale) -> Sample:
    def count(model: _Stateful, x: Tensor) -> Tensor:
        model.calls += 1
        return x

    return _stateful(count)


@_illegal.add("the forward pass decides by a Python attribute that it changes")
def decides_by_calls(scale: Scale) -> Sample:
    def decide(model: _Stateful, x: Tensor) -> Tensor:
        model.calls += 1
        return x.relu() if model.calls % 2 else x.tanh()

    return _stateful(decide)


@_illegal.add("a new tensor is put in the place of a buffer: the graph has nowhere to put it")
def buffer_replaced(scale: Scale) -> Sample:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.layer(x) / self.calls

    return Counted(), class_loss, _rows()


@_illegal.add("the forward pass keeps its activations in a list")
def keeps_activations(scale: Scale) -> Sample:
    def keep(model: _Stateful, x: Tensor) -> Tensor:
        model.seen.append(x.detach())
        return x

    return _stateful(keep)


@_illegal.add("the forward pass keeps a tensor in a plain attribute")
def keeps_tensor_attribute(scale: Scale) -> Sample:
    def keep(model: _Stateful, x: Tensor) -> Tensor:
        model.last = x.detach()
        return x

    return _stateful(keep)


@_illegal.add("the loss changes the batch in place: a second call would see another batch")
def batch_written(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["x"].add_(1)
        return class_loss(model, batch)

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("the loss adds a key to the batch")
def batch_extended(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["logits"] = model(batch["x"])
        return F.cross_entropy(batch["logits"], batch["y"])

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("a parameter is changed in the forward pass")
def parameter_written(scale: Scale) -> Sample:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.1, 0.1)
            result: Tensor = self.layer(x)
            return result

    return Early(), class_loss, _rows()


@_illegal.add("the model lies on the meta device, the batch does not")
def model_on_meta(scale: Scale) -> Sample:
    return _chain(nn.ReLU()).to("meta"), class_loss, _rows()


@_illegal.add("the embedding's gradient is sparse")
def sparse_gradient(scale: Scale) -> Sample:
    return _bag(sparse=True)


@_illegal.add("a gradient of a gradient, taken inside the loss")
def gradient_penalty(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].requires_grad_()
        logits = model(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, batch["y"]) + slope.square().mean()

    return _chain(nn.Tanh()), loss, _rows()


@_illegal.add("the loss runs backward itself")
def backward_inside(scale: Scale) -> Sample:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = class_loss(model, batch)
        value.backward()
        return value

    return _chain(nn.ReLU()), loss, _rows()


@_illegal.add("Python's random module decides the shape of the step")
def python_random(scale: Scale) -> Sample:
    import random

    return _around(lambda x: x.relu() if random.random() < 0.5 else x.tanh())


@_illegal.add("the batch is a class that pytree does not know")
def opaque_batch(scale: Scale) -> Sample:
    class Opaque:
        def __init__(self) -> None:
            rows = _rows()
            self.x, self.y = rows["x"], rows["y"]

    def loss(model: nn.Module, batch: Opaque) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    return _chain(nn.ReLU()), loss, Opaque()


@_illegal.add("the model raises in its forward pass: the user's own error must come through")
def model_raises(scale: Scale) -> Sample:
    return _around(lambda x: x.view(3, -1, 7))


REFUSED: tuple[Case, ...] = tuple(
    Case(name=f"refused_{case.name}", build=case.build, note=case.note, scales=case.scales)
    for case in _illegal.cases
)
