"""The states of the random generators that a training step may draw from, as tensors and numbers.

They are those of torch, Python, numpy and data loaders. Not for saving them: see
run/checkpoint/state.py.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steelyard.errors import CheckpointError

Generators = Mapping[str, torch.Generator]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomState:
    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, Any]


def random_state(generators: Generators) -> RandomState:
    """Return the current states; ``generators`` are additional ones, by name."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - theirs
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.from_numpy(np.array(words, dtype=np.int64)),
        "numpy": torch.tensor(np.asarray(keys, dtype=np.int64), device="cpu"),
        **{f"generator/{key}": g.get_state() for key, g in generators.items()},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()
        tensors |= {f"cuda/{index}": state for index, state in enumerate(states)}
    numbers = {
        "python": (version, gauss),
        "numpy": (name, int(position), int(has_gauss), float(cached)),
    }
    return RandomState(tensors=tensors, numbers=numbers)


def set_random_state(state: RandomState, generators: Generators) -> None:
    expected = {"torch", "python", "numpy", *(f"generator/{key}" for key in generators)}
    lacking = expected - state.tensors.keys()
    cuda = sum(name.startswith("cuda/") for name in state.tensors)
    if lacking or cuda > torch.cuda.device_count():
        raise CheckpointError(
            "the checkpoint was saved with other random generators"
            + (f": {sorted(lacking)[0]} is not in it" if lacking else f" ({cuda} CUDA devices)"),
            expected="the same kind of data loader and devices as at the save",
            remedy="resume with the script that saved it",
        )
    try:
        _set(state, generators)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"a random state of the checkpoint cannot be restored: {str(error)[:80]}",
            expected="generator states as they were saved",
            remedy="resume from an older checkpoint, with --resume and its path",
        ) from error


def _set(state: RandomState, generators: Generators) -> None:
    version, gauss = state.numbers["python"]
    random.setstate((version, tuple(state.tensors["python"].tolist()), gauss))
    name, position, has_gauss, cached = state.numbers["numpy"]
    keys = state.tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))  # noqa: NPY002 - the user's
    torch.set_rng_state(state.tensors["torch"])
    for key, generator in generators.items():
        generator.set_state(state.tensors[f"generator/{key}"])
    for name, tensor in state.tensors.items():
        if name.startswith("cuda/"):
            torch.cuda.set_rng_state(tensor, int(name.partition("/")[2]))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's code may draw from it
    torch.manual_seed(seed)


@contextlib.contextmanager
def per_rank_rng(rank: int) -> Iterator[None]:
    """Within this context, each rank draws different random numbers.

    The seed is drawn from the outer generator, so that only the state of that generator has to be
    saved.
    """
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((seed + rank) % 2**63)
        yield
