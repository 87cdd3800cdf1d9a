"""Saves and loads the state of a run as tensors and JSON: model, optimizer, random states, data
position.

Nothing is pickled, and everything is compared with the live model before any of it is changed. Not
for saving safely in case of a crash: see directory.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from torch import nn

from steelyard.errors import CheckpointError
from steelyard.run.checkpoint.directory import canonical
from steelyard.run.checkpoint.json_values import Unplain, from_plain, to_plain
from steelyard.run.checkpoint.position import STATE, check_numbers
from steelyard.run.checkpoint.tensors import (
    check_storable,
    entries,
    entry,
    from_stored,
    opened,
    write_tensors,
)
from steelyard.run.rng_state import RandomState
from steelyard.safe_text import printable

# Allocates a tensor, given its shape, stride, dtype and device.
Empty = Callable[..., torch.Tensor]

_FORMAT = "steelyard checkpoint 1"
_MODEL, _OPTIMIZER, _RANDOM, _RESIDUALS, _STATE = (
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "residuals.safetensors",
    STATE,
)
_SHOWN = 6
_SETTINGS_SHOWN = 5
# Twelve digits, the maximum in the name of a checkpoint folder.
_MAX_STEPS = 10**12 - 1
# The maximum ratio of the memory that a tensor's strides span to its elements; if a view is saved,
# this is the memory of its base.
_MAX_SPAN_RATIO = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """The progress of a run: ``taken`` batches of epoch ``epoch``, which began with random state
    ``began``.
    """

    step: int
    epoch: int
    taken: int
    now: RandomState
    began: RandomState


class _State(BaseModel):
    """The content of state.json; json_values.py encodes values that JSON lacks."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: str
    plan: str
    torch: str
    step: Annotated[int, Field(ge=0, le=_MAX_STEPS)]
    epoch: Annotated[int, Field(ge=0)]
    taken: Annotated[int, Field(ge=0)]
    aliases: dict[str, str]
    optimizer: dict[str, Any] | None
    random: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _check_consistency(self) -> "_State":
        if max(self.epoch, self.taken) > self.step:
            raise ValueError(
                f"is after {self.step} steps, but has more batches or epochs than that"
            )
        return self


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    position: Position,
    plan: str,
    lost: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Write the files of one checkpoint into ``folder``, which exists and is empty.

    ``lost`` holds the compression residuals of all ranks.
    """
    model_tensors, non_persistent, aliases = _model_tensors(model)
    optimizer_tensors: dict[str, torch.Tensor] = {}
    described = _describe(optimizer, model, optimizer_tensors) if optimizer else None
    state = _State(
        format=_FORMAT,
        plan=plan,
        torch=torch.__version__,
        step=position.step,
        epoch=position.epoch,
        taken=position.taken,
        aliases=aliases,
        optimizer=described,
        random={
            "now": {k: to_plain(v) for k, v in position.now.numbers.items()},
            "began": {k: to_plain(v) for k, v in position.began.numbers.items()},
        },
    )
    random = {f"now/{k}": t for k, t in position.now.tensors.items()}
    random |= {f"began/{k}": t for k, t in position.began.tensors.items()}
    random |= {f"buffer/{k}": t for k, t in non_persistent.items()}
    write_tensors(folder / _MODEL, model_tensors)
    if optimizer is not None:
        write_tensors(folder / _OPTIMIZER, optimizer_tensors)
    write_tensors(folder / _RANDOM, random)
    if lost:
        write_tensors(folder / _RESIDUALS, lost)
    (folder / _STATE).write_bytes(canonical(state.model_dump()))


def load(
    checkpoint: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    allocator_for: Callable[[str], Empty] = lambda _: torch.empty_strided,
    note: Callable[[str], None] = lambda _: None,
) -> Position:
    """Compare the whole checkpoint, then copy it into the model and the optimizer.

    ``allocator_for`` returns the allocator for a parameter's optimizer state. ``note`` is called
    with a line for each optimizer setting that differs from the script's. The checkpoint must have
    passed ``directory.verify``.
    """
    try:
        found = json.loads((checkpoint / _STATE).read_bytes())
        if isinstance(found, dict):
            check_numbers(checkpoint, found)
        state = _State.model_validate(found)
        if state.format != _FORMAT:
            raise _other(checkpoint, f"has format {state.format[:40]!r}", _FORMAT)
        live, non_persistent, aliases = _model_tensors(model)
        with opened(checkpoint / _MODEL) as saved, opened(checkpoint / _RANDOM) as random:
            names = [n for n in random.keys() if n.startswith("buffer/")]  # noqa: SIM118 - no dict
            _compare(checkpoint, {**entries(saved), **entries(random, names, "buffer/")},
                     {**live, **non_persistent}, aliases, state.aliases)  # fmt: skip
            put = _optimizer_loader(checkpoint, state, model, optimizer, allocator_for, note)
            position = _position(state, random)
            for name, tensor in live.items():
                _copy_into(name, tensor, saved.get_tensor(name))
            for name, tensor in non_persistent.items():
                _copy_into(name, tensor, random.get_tensor(f"buffer/{name}"))
        put()
    except (ValidationError, SafetensorError, Unplain, OSError, RecursionError) as error:
        raise _other(checkpoint, f"cannot be read: {str(error).splitlines()[0][:80]}",
                     "files in Steelyard's format") from error  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _other(checkpoint, f"has an invalid {_STATE}: {str(error)[:80]}",
                     "a state in Steelyard's format") from error  # fmt: skip
    return position


def residuals_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the saved compression residuals; empty if gradients were not compressed."""
    if not (checkpoint / _RESIDUALS).exists():
        return {}
    try:
        with opened(checkpoint / _RESIDUALS) as saved:
            return {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise _other(checkpoint, f"cannot be read: {str(error).splitlines()[0][:80]}",
                     "files in Steelyard's format") from error  # fmt: skip


def check_savable(model: nn.Module) -> None:
    """Refuse a model that cannot be saved, before the first step."""
    tensors, non_persistent, _ = _model_tensors(model)
    for name, tensor in {**tensors, **non_persistent}.items():
        check_storable(name, tensor)


# --- the model ------------------------------------------------------------------------------------


def _model_tensors(
    model: nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of the state dict (each once), the non-persistent buffers, and the aliases
    of tied tensors.
    """
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {path or 'the model'} has extra state that is not a tensor",
                expected="a model whose state consists of parameters and buffers",
                remedy="run without checkpoints, or store that state in a buffer",
            )
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    persistent = model.state_dict(keep_vars=True).keys()
    persistent_tensors: dict[str, torch.Tensor] = {}
    non_persistent: dict[str, torch.Tensor] = {}
    named = [*model.named_parameters(remove_duplicate=False)]
    for name, tensor in (*named, *model.named_buffers(remove_duplicate=False)):
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        (persistent_tensors if name in persistent else non_persistent)[name] = tensor
    return persistent_tensors, non_persistent, aliases


def _compare(
    checkpoint: Path,
    saved: Mapping[str, str],
    live: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    saved_aliases: Mapping[str, str],
) -> None:
    differences = []
    for name in sorted(saved.keys() | live.keys()):
        ours = entry(live[name]) if name in live else "nothing"
        theirs = saved.get(name, "nothing")
        if ours != theirs:
            differences.append(f"{name}: {theirs} in the checkpoint, {ours} in the model")
    for name in sorted(aliases.keys() ^ saved_aliases.keys()):
        where = "model" if name in aliases else "checkpoint"
        differences.append(f"{name}: tied to another weight only in the {where}")
    if differences:
        more = [f"... and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
        raise CheckpointError(
            "\n  ".join([f"{checkpoint} is for another model:", *differences[:_SHOWN], *more]),
            expected="the names, shapes and dtypes of the model",
            remedy="resume with the script that saved it",
        )


def _copy_into(name: str, live: torch.Tensor, stored: torch.Tensor) -> None:
    value = from_stored(stored, live.dtype)
    expanded = any(s == 0 and n > 1 for s, n in zip(live.stride(), live.shape, strict=True))
    if not expanded:
        with torch.no_grad():
            live.copy_(value)
    elif not torch.equal(live.cpu(), value):
        raise CheckpointError(
            f"{name} is expanded from fewer elements than it was saved with",
            expected="a tensor that can be written into",
            remedy="call .contiguous() on it where the model makes it",
        )


# --- the optimizer --------------------------------------------------------------------------------


def _describe(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the optimizer's groups and state by parameter name; tensors are added to
    ``tensors``."""
    names = {id(p): name for name, p in model.named_parameters()}

    def put(place: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return to_plain(value)
        tensors[place] = value
        return {
            "tensor": place,
            "stride": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
        }

    try:
        return {
            "kind": _kind(optimizer),
            "groups": [
                {
                    "parameters": [names[id(p)] for p in group["params"]],
                    "settings": {
                        key: put(f"group/{index}/{key}", value)
                        for key, value in group.items()
                        if key != "params"
                    },
                }
                for index, group in enumerate(optimizer.param_groups)
            ],
            "state": {
                names[id(p)]: {
                    key: put(f"state/{names[id(p)]}/{key}", v) for key, v in state.items()
                }
                for p, state in optimizer.state.items()
            },
        }
    except (Unplain, KeyError) as error:
        raise CheckpointError(
            f"the state of {_kind(optimizer)} cannot be saved: {error}",
            expected="an optimizer whose state is tensors, numbers and strings, by parameter",
            remedy="run without checkpoints, or with another optimizer",
        ) from error


def _optimizer_loader(
    checkpoint: Path,
    state: _State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    allocator_for: Callable[[str], Empty],
    note: Callable[[str], None],
) -> Callable[[], None]:
    """Read and compare the optimizer state; return a function that installs it and cannot fail."""
    saved = state.optimizer
    if optimizer is None or saved is None:
        if (optimizer is None) != (saved is None):
            raise _other(checkpoint, f"was saved with{'out' if saved is None else ''} an optimizer",
                         "the same training step")  # fmt: skip
        return lambda: None
    if saved["kind"] != _kind(optimizer):
        raise _other(
            checkpoint, f"was saved with {saved['kind']}", f"{_kind(optimizer)}, as in this run"
        )
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    ours = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    if [g["parameters"] for g in saved["groups"]] != ours:
        raise _other(
            checkpoint, "was saved with other parameter groups", "the present parameter groups"
        )
    with opened(checkpoint / _OPTIMIZER) as file:
        device = {name: p.device for name, p in parameters.items()}
        default_device = next(iter(device.values()))
        settings = [
            {
                k: _value(file, v, default_device, torch.empty_strided)
                for k, v in group["settings"].items()
            }
            for group in saved["groups"]
        ]
        states = {
            name: {k: _value(file, v, device[name], allocator_for(name)) for k, v in values.items()}
            for name, values in saved["state"].items()
        }

    notes = _other_settings(optimizer.param_groups, settings)

    def put() -> None:
        for text in notes:
            note(text)
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
        optimizer.state.clear()
        for name, values in states.items():
            optimizer.state[parameters[name]] = values

    return put


def _other_settings(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Describe the settings that differ from the script's, and say which value is used; lines that
    are equal for all groups appear once.
    """
    groups_by_text: dict[str, list[int]] = {}
    for index, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        # initial_lr is set by a scheduler, not by the optimizer.
        for key in sorted((ours.keys() | theirs.keys()) - {"params", "initial_lr"}):
            if key not in ours or key not in theirs or not _is_same(ours[key], theirs[key]):
                name, script_value = _SETTINGS.get(key, key), _shown(ours.get(key, "nothing"))
                used = _shown(theirs[key]) if key in theirs else script_value
                text = f"{name} {used} from the checkpoint is used; the script says {script_value}"
                if key not in theirs:
                    text = f"{name} {script_value} of the script is used; the checkpoint has none"
                groups_by_text.setdefault(text, []).append(index)
    lines = [
        text if len(indices) == len(groups) else f"parameter group {_places(indices)}: {text}"
        for text, indices in groups_by_text.items()
    ]
    more = len(lines) - _SETTINGS_SHOWN
    shown = lines[:_SETTINGS_SHOWN]
    return [*shown, f"{more} more settings are the checkpoint's"] if more > 0 else shown


_SETTINGS = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "maximize": "maximize=",
    "foreach": "foreach=",
    "fused": "fused=",
    "capturable": "capturable=",
    "differentiable": "differentiable=",
}


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        one, other = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (ours, theirs))
        # A learning rate may be a tensor with a lower precision than the number that was given for
        # it.
        return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-6, atol=0))
    return bool(ours == theirs)


def _shown(value: Any) -> str:
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return printable(str(plain), most=60)


def _places(indices: Sequence[int]) -> str:
    return ", ".join(str(index) for index in indices[:8]) + (", ..." if len(indices) > 8 else "")


def _value(file: Any, encoded: Any, device: torch.device, empty: Empty) -> Any:
    if not isinstance(encoded, dict) or "tensor" not in encoded:
        return from_plain(encoded)
    value = from_stored(file.get_tensor(encoded["tensor"]), getattr(torch, encoded["dtype"]))
    spanned = 1 + sum((n - 1) * s for n, s in zip(value.shape, encoded["stride"], strict=True))
    if spanned > _MAX_SPAN_RATIO * max(1, value.numel()):
        raise ValueError(f"strides that span {spanned} elements, of {value.numel()}")
    # Restore the strides, because kernels, and so the bits, may depend on them.
    restored = empty(
        value.shape,
        encoded["stride"],
        dtype=value.dtype,
        device="cpu" if encoded["device"] == "cpu" else device,
    )
    return restored.copy_(value)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# --- the rest ----------------------------------------------------------------------------------


def _position(state: _State, random: Any) -> Position:
    def at(moment: str) -> RandomState:
        names = [n for n in random.keys() if n.startswith(f"{moment}/")]  # noqa: SIM118 - no dict
        return RandomState(
            tensors={n.removeprefix(f"{moment}/"): random.get_tensor(n).clone() for n in names},
            numbers={k: from_plain(v) for k, v in state.random[moment].items()},
        )

    return Position(
        step=state.step, epoch=state.epoch, taken=state.taken, now=at("now"), began=at("began")
    )


def _other(checkpoint: Path, happened: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} {happened}",
        expected=expected,
        remedy="resume with the script that saved it, or from another checkpoint",
    )
