"""Writes tensors of every dense dtype to safetensors files, and reads them back bit for bit.

Not for choosing the tensors: see state.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from steelyard.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.bool: "BOOL", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
# A dtype that safetensors lacks is stored as one of the same width; complex128 is stored as pairs
# of floats.
_STORED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    storages: set[int] = set()
    stored = {}
    for name, tensor in tensors.items():
        value = to_stored(name, tensor)
        # Safetensors refuses tensors that share memory, so each one is copied.
        storage = value.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != value.nbytes:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        stored[name] = value
    try:
        save_file(stored, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def check_storable(name: str, tensor: torch.Tensor) -> None:
    known = tensor.dtype in _NAMES or tensor.dtype in _STORED_AS
    if tensor.layout is not torch.strided or not (known or tensor.dtype is torch.complex128):
        raise CheckpointError(
            f"{name} is {tensor.layout} {tensor.dtype}, which safetensors cannot store",
            expected="a dense tensor of a dtype that safetensors supports",
            remedy="run without checkpoints, or use another kind of tensor in the model",
        )


def to_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    check_storable(name, tensor)
    value = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if value.dtype is torch.complex128:
        return torch.view_as_real(value)
    return value.view(_STORED_AS.get(value.dtype, value.dtype))


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.complex128:
        return torch.view_as_complex(stored)
    return stored.view(dtype) if dtype in _STORED_AS else stored


def opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


def entries(file: Any, names: list[str] | None = None, prefix: str = "") -> dict[str, str]:
    """Return the dtype and shape of each tensor in a file."""
    found = {}
    for name in file.keys() if names is None else names:
        part = file.get_slice(name)
        found[name.removeprefix(prefix)] = f"{part.get_dtype()}{list(part.get_shape())}"
    return found


def entry(tensor: torch.Tensor) -> str:
    """Return the dtype and shape with which a live tensor is stored."""
    dtype, shape = _STORED_AS.get(tensor.dtype, tensor.dtype), list(tensor.shape)
    if dtype is torch.complex128:
        dtype, shape = torch.float64, [*shape, 2]
    return f"{_NAMES.get(dtype, dtype)}{shape}"
