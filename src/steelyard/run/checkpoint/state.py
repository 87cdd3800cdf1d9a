"""What a run is, as tensors and JSON: model, optimizer, random states, place in the data.

Nothing is pickled, and all is compared with the live model before a byte of it is changed. Not for
how a save survives a crash: see directory.py.
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

# What makes a tensor from shape, stride, dtype and device.
Empty = Callable[..., torch.Tensor]

_FORMAT = "steelyard checkpoint 1"
_MODEL, _OPTIMIZER, _RANDOM, _LOST, _STATE = (
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "residuals.safetensors",
    STATE,
)
_SHOWN = 6
_SETTINGS_SHOWN = 5
# Twelve digits, as the name of a checkpoint's folder has at most.
_MOST_STEPS = 10**12 - 1
# How many times as much memory as its elements the strides of a tensor may span: what was saved of
# a view spans its base.
_MOST_SPANNED = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """How far a run has come: ``taken`` batches of epoch ``epoch``, which began with ``began``."""

    step: int
    epoch: int
    taken: int
    now: RandomState
    began: RandomState


class _State(BaseModel):
    """state.json; values that JSON lacks are spelt as json_values.py says."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: str
    plan: str
    torch: str
    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    epoch: Annotated[int, Field(ge=0)]
    taken: Annotated[int, Field(ge=0)]
    aliases: dict[str, str]
    optimizer: dict[str, Any] | None
    random: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _goes_together(self) -> "_State":
        if max(self.epoch, self.taken) > self.step:
            raise ValueError(f"is after {self.step} steps, and more batches or epochs than that")
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

    ``lost`` is what codes have lost of gradients, on all ranks.
    """
    model_tensors, apart, aliases = _model_tensors(model)
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
    random |= {f"buffer/{k}": t for k, t in apart.items()}
    write_tensors(folder / _MODEL, model_tensors)
    if optimizer is not None:
        write_tensors(folder / _OPTIMIZER, optimizer_tensors)
    write_tensors(folder / _RANDOM, random)
    if lost:
        write_tensors(folder / _LOST, lost)
    (folder / _STATE).write_bytes(canonical(state.model_dump()))


def load(
    checkpoint: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    empty_for: Callable[[str], Empty] = lambda _: torch.empty_strided,
    note: Callable[[str], None] = lambda _: None,
) -> Position:
    """Compare all of it, then copy it into the model and the optimizer, which is to keep tensors
    that ``empty_for`` a parameter's name makes. ``note`` is given a line for each setting of the
    optimizer that was another one than the script's.

    Only for a checkpoint that ``folder.verify`` let pass.
    """
    try:
        found = json.loads((checkpoint / _STATE).read_bytes())
        if isinstance(found, dict):
            check_numbers(checkpoint, found)
        state = _State.model_validate(found)
        if state.format != _FORMAT:
            raise _other(checkpoint, f"has format {state.format[:40]!r}", _FORMAT)
        live, apart, aliases = _model_tensors(model)
        with opened(checkpoint / _MODEL) as saved, opened(checkpoint / _RANDOM) as random:
            names = [n for n in random.keys() if n.startswith("buffer/")]  # noqa: SIM118 - no dict
            _compare(checkpoint, {**entries(saved), **entries(random, names, "buffer/")},
                     {**live, **apart}, aliases, state.aliases)  # fmt: skip
            put = _optimizer_loader(checkpoint, state, model, optimizer, empty_for, note)
            position = _position(state, random)
            for name, tensor in live.items():
                _copy_into(name, tensor, saved.get_tensor(name))
            for name, tensor in apart.items():
                _copy_into(name, tensor, random.get_tensor(f"buffer/{name}"))
        put()
    except (ValidationError, SafetensorError, Unplain, OSError, RecursionError) as error:
        raise _other(checkpoint, f"cannot be read: {str(error).splitlines()[0][:80]}", "files as "
                     "Steelyard writes them") from error  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _other(checkpoint, f"has a {_STATE} that is not whole: {str(error)[:80]}",
                     "a state as Steelyard writes it") from error  # fmt: skip
    return position


def lost_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What codes had lost of gradients; nothing where they did not go in codes."""
    if not (checkpoint / _LOST).exists():
        return {}
    try:
        with opened(checkpoint / _LOST) as saved:
            return {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise _other(checkpoint, f"cannot be read: {str(error).splitlines()[0][:80]}", "files as "
                     "Steelyard writes them") from error  # fmt: skip


def check_savable(model: nn.Module) -> None:
    """Refuse before the first step what could not be saved after it."""
    kept, apart, _ = _model_tensors(model)
    for name, tensor in {**kept, **apart}.items():
        check_storable(name, tensor)


# --- the model ------------------------------------------------------------------------------------


def _model_tensors(
    model: nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, str]]:
    """What a state dict has, each tensor once; buffers that it leaves out; names of the same."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {path or 'the model'} keeps extra state that is no tensor",
                expected="a model whose state is its parameters and buffers",
                remedy="run without checkpoints, or keep that state in a buffer",
            )
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    persistent = model.state_dict(keep_vars=True).keys()
    kept: dict[str, torch.Tensor] = {}
    apart: dict[str, torch.Tensor] = {}
    named = [*model.named_parameters(remove_duplicate=False)]
    for name, tensor in (*named, *model.named_buffers(remove_duplicate=False)):
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        (kept if name in persistent else apart)[name] = tensor
    return kept, apart, aliases


def _compare(
    checkpoint: Path,
    saved: Mapping[str, str],
    live: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    saved_aliases: Mapping[str, str],
) -> None:
    said = []
    for name in sorted(saved.keys() | live.keys()):
        ours = entry(live[name]) if name in live else "nothing"
        theirs = saved.get(name, "nothing")
        if ours != theirs:
            said.append(f"{name}: {theirs} in the checkpoint, {ours} in the model")
    for name in sorted(aliases.keys() ^ saved_aliases.keys()):
        where = "model" if name in aliases else "checkpoint"
        said.append(f"{name}: tied to another weight only in the {where}")
    if said:
        more = [f"... and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
        raise CheckpointError(
            "\n  ".join([f"{checkpoint} is of another model:", *said[:_SHOWN], *more]),
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
    """Groups and state under parameters' names; tensors go into ``tensors``."""
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
    empty_for: Callable[[str], Empty],
    note: Callable[[str], None],
) -> Callable[[], None]:
    """Read and compare now; what comes back then cannot fail."""
    saved = state.optimizer
    if optimizer is None or saved is None:
        if (optimizer is None) != (saved is None):
            raise _other(checkpoint, f"was saved with{'out' if saved is None else ''} an optimizer",
                         "the same training step")  # fmt: skip
        return lambda: None
    if saved["kind"] != _kind(optimizer):
        raise _other(checkpoint, f"was saved with {saved['kind']}", f"{_kind(optimizer)}, as now")
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    ours = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    if [g["parameters"] for g in saved["groups"]] != ours:
        raise _other(checkpoint, "was saved with other parameter groups", "the groups as now")
    with opened(checkpoint / _OPTIMIZER) as file:
        device = {name: p.device for name, p in parameters.items()}
        home = next(iter(device.values()))
        settings = [
            {k: _value(file, v, home, torch.empty_strided) for k, v in group["settings"].items()}
            for group in saved["groups"]
        ]
        states = {
            name: {k: _value(file, v, device[name], empty_for(name)) for k, v in values.items()}
            for name, values in saved["state"].items()
        }

    others = _other_settings(optimizer.param_groups, settings)

    def put() -> None:
        for text in others:
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
    """What is used and what the script says, where these differ; what all groups share once."""
    said: dict[str, list[int]] = {}
    for index, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        # What a scheduler has begun with is no setting of the optimizer's own.
        for key in sorted((ours.keys() | theirs.keys()) - {"params", "initial_lr"}):
            if key not in ours or key not in theirs or not _is_same(ours[key], theirs[key]):
                name, here = _SETTINGS.get(key, key), _shown(ours.get(key, "nothing"))
                used = _shown(theirs[key]) if key in theirs else here
                text = f"{name} {used} from the checkpoint is used; the script says {here}"
                if key not in theirs:
                    text = f"{name} {here} of the script is used; the checkpoint has none"
                said.setdefault(text, []).append(index)
    lines = [
        text if len(at) == len(groups) else f"parameter group {_places(at)}: {text}"
        for text, at in said.items()
    ]
    more = len(lines) - _SETTINGS_SHOWN
    kept = lines[:_SETTINGS_SHOWN]
    return [*kept, f"{more} more settings are the checkpoint's"] if more > 0 else kept


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
        # A rate may be a tensor of fewer digits than the number that was written for it.
        return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-6, atol=0))
    return bool(ours == theirs)


def _shown(value: Any) -> str:
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return printable(str(plain), most=60)


def _places(indices: Sequence[int]) -> str:
    return ", ".join(str(index) for index in indices[:8]) + (", ..." if len(indices) > 8 else "")


def _value(file: Any, spelt: Any, device: torch.device, empty: Empty) -> Any:
    if not isinstance(spelt, dict) or "tensor" not in spelt:
        return from_plain(spelt)
    value = from_stored(file.get_tensor(spelt["tensor"]), getattr(torch, spelt["dtype"]))
    spanned = 1 + sum((n - 1) * s for n, s in zip(value.shape, spelt["stride"], strict=True))
    if spanned > _MOST_SPANNED * max(1, value.numel()):
        raise ValueError(f"strides that span {spanned} elements, of {value.numel()}")
    # Laid out as it was: kernels, and so bits, may differ by strides.
    laid_out = empty(
        value.shape,
        spelt["stride"],
        dtype=value.dtype,
        device="cpu" if spelt["device"] == "cpu" else device,
    )
    return laid_out.copy_(value)


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
