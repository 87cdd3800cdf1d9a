"""The workload that a transformers configuration describes, on the meta device.

Nothing is downloaded, and no code of the configuration's folder is run. Not for workloads of
scripts: see api/workload.py.
"""

import contextlib
import difflib
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from steelyard.api.workload import Workload
from steelyard.errors import BadInput, PlanFileError
from steelyard.safe_files import read_bytes
from steelyard.safe_text import printable

_MOST_BYTES = 4 * 2**20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = (*_DTYPES, "bf16-mixed", "fp16-mixed")
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {
        "adamw": partial(torch.optim.AdamW, lr=1e-4),
        "adamw-fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
        "adafactor": torch.optim.Adafactor,
        "sgd": partial(torch.optim.SGD, lr=1e-3),
        "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    }
)
# The class of a model that has no loss of its own, by the end of its class name.
_MODEL = "Model"
_HEADS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """A transformers configuration, and how its model is to be trained.

    ``lora`` is the rank of the adapters that PEFT adds to its default modules of this architecture;
    all other weights are frozen.
    """

    path: Path
    batch: int = 1
    sequence: int = 2048
    precision: str = "bf16"
    lora: int | None = None
    optimizer: str = "adamw"

    def workload(self) -> Workload:
        self._check()
        transformers = _imported("transformers", "to read a configuration")
        given = _decoded(self.path)
        config = _config(transformers, given, self.path)
        _check_keys(config, given, self.path)
        with _quiet(transformers), torch.device("meta"):
            model = _model(transformers, config, self._dtype)
            if self.lora is not None:
                model = _with_adapters(model, self.lora)
        model.train()
        return Workload(
            model, self._loss, [self._inputs(model, config)], OPTIMIZERS[self.optimizer]
        )

    def _check(self) -> None:
        for option, value, known in (
            ("--precision", self.precision, PRECISIONS),
            ("--optimizer", self.optimizer, tuple(OPTIMIZERS)),
        ):
            if value not in known:
                shown = printable(repr(value), most=40)
                raise BadInput(
                    f"unknown {option} {shown}{_suggestion(value, known)}",
                    expected=f"one of {', '.join(known)}",
                    remedy=f"write {option} {known[0]}",
                )

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES.get(self.precision, torch.float32)

    def _loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        kind = _DTYPES[self.precision.removesuffix("-mixed")]
        autocast = torch.autocast("cpu", dtype=kind, enabled=self.precision.endswith("-mixed"))
        with without_packing(), autocast:
            loss: torch.Tensor = model(**batch).loss
        return loss

    def _inputs(self, model: Any, config: Any) -> dict[str, torch.Tensor]:
        name = getattr(model, "main_input_name", "input_ids")
        if name == "pixel_values":
            size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
            sides = (size, size) if isinstance(size, int) else tuple(size)
            images = torch.empty(self.batch, channels, *sides, dtype=self._dtype, device="meta")
            return {name: images, "labels": _tokens(self.batch)}
        if name != "input_ids":
            raise BadInput(
                f"{type(model).__name__} takes {name}",
                expected="a model of token ids or of images",
                remedy="write a script with a function workload(), and name it instead",
            )
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and self.sequence > longest > 0:
            raise BadInput(
                f"--sequence {self.sequence} is longer than the model's {longest} positions",
                expected=f"at most max_position_embeddings of {printable(str(self.path))}",
                remedy=f"write --sequence {longest}",
            )
        return {
            name: _tokens(self.batch, self.sequence),
            "labels": _tokens(self.batch, self.sequence),
        }


def _tokens(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.long, device="meta")


def _decoded(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(read_bytes(file, most_bytes=_MOST_BYTES))
    except PlanFileError as error:
        problem = error.happened
    except (ValueError, RecursionError) as error:
        problem = f"{printable(str(file))} is not JSON: {printable(str(error), most=80)}"
    else:
        if isinstance(given, dict) and isinstance(given.get("model_type"), str):
            return given
        problem = f"{printable(str(file))} has no model_type"
    raise BadInput(
        problem,
        expected="the config.json of a transformers model",
        remedy="give the config.json, or the folder that contains it",
    )


def _imported(name: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BadInput(
            f"{name} is not installed",
            expected=f"{name}, {purpose}",
            remedy=f"install it: pip install {name}",
        ) from None


def _config(transformers: Any, given: dict[str, Any], path: Path) -> Any:
    kind = given["model_type"]
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        raise BadInput(
            f"{printable(str(path))} is of unknown model_type {printable(repr(kind), most=60)}"
            f"{_suggestion(kind, known)}",
            expected=f"an architecture of transformers {transformers.__version__}",
            remedy="correct it, install a newer transformers, or name a script with a workload()",
        )
    dtypes = {str(given[key]) for key in ("dtype", "torch_dtype") if given.get(key) is not None}
    if len(dtypes) > 1:
        raise BadInput(
            f"{printable(str(path))} has dtype {printable(str(given['dtype']), most=40)} and "
            f"torch_dtype {printable(str(given['torch_dtype']), most=40)}",
            expected="one precision",
            remedy="remove torch_dtype, which is the old name of dtype",
        )
    if given.get("quantization_config"):
        raise BadInput(
            f"{printable(str(path))} has a quantization_config",
            expected="a model whose weights are floating-point numbers",
            remedy="remove the quantization_config to ask about the model before quantization",
        )
    settings = {k: v for k, v in given.items() if k not in ("model_type", "auto_map")}
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise BadInput(
            f"transformers refuses {printable(str(path))}: {printable(str(error), most=200)}",
            expected=f"the settings of {kind}",
            remedy="correct the configuration",
        ) from error
    config.use_cache = False
    return config


def _check_keys(config: Any, given: dict[str, Any], path: Path) -> None:
    """Refuse a key that resembles a known one: transformers ignores unknown keys."""
    known = set(type(config)().to_dict()) | set(config.attribute_map)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.9)
            if close:
                raise BadInput(
                    f"{printable(str(path))} has the unknown key {printable(repr(key), most=60)}; "
                    f"did you mean {close[0]}?",
                    expected=f"the settings of {config.model_type}",
                    remedy="correct the key, or remove it",
                )


def _model(transformers: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model with the head that has a loss."""
    for name in config.architectures or ():
        named = getattr(transformers, str(name), None)
        if named is not None and not str(name).endswith(_MODEL):
            built: nn.Module = named._from_config(config, dtype=dtype)
            return built
    for head in _HEADS:
        mapping = getattr(transformers, f"AutoModel{_AUTO[head]}")
        if type(config) in mapping._model_mapping:
            made: nn.Module = mapping.from_config(config, dtype=dtype)
            return made
    raise BadInput(
        f"transformers has no model of {config.model_type} with a loss",
        expected="a language model, or an image classifier",
        remedy="write a script with a function workload(), and name it instead",
    )


_AUTO = {
    "ForCausalLM": "ForCausalLM",
    "ForMaskedLM": "ForMaskedLM",
    "ForConditionalGeneration": "ForSeq2SeqLM",
    "ForImageClassification": "ForImageClassification",
}


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    peft = _imported("peft", "to add LoRA adapters")
    try:
        settings = peft.LoraConfig(r=rank)
        adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise BadInput(
            f"PEFT cannot add adapters: {printable(str(error), most=160)}",
            expected="an architecture for which PEFT knows the modules to adapt",
            remedy="write a script that makes the PEFT model in workload(), and name it instead",
        ) from error
    return adapted


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from printing about the configuration."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


@contextlib.contextmanager
def without_packing() -> Iterator[None]:
    """Tell transformers that each sample is one sequence.

    It cannot look into fake tensors, and would prepare attention for several: with a mask, and with
    repeated keys and values.
    """
    masking: Any = importlib.import_module("transformers.masking_utils")
    before = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda _: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = before


def _suggestion(given: str, known: Any) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
