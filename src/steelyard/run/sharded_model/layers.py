"""A live model of which this rank holds only some layers: the others are released, and can be
gathered from all ranks.

Between steps the other layers' tensors are empty, and nothing can be computed with them. Not for
layers whose tensors are sharded too: see tensors.py.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.run.sharded_model.tensors import ShardedTensors


class ShardedLayers:
    """Releases the tensors of other ranks' layers. ``owned_names`` lists the tensors of each rank
    of the group, by name in the graph; tensors in no list remain on all ranks."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        owned_names: Sequence[frozenset[str]],
        *,
        group: dist.ProcessGroup,
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        owners = {
            n: min(r for r, own in enumerate(owned_names) if n in own)
            for n in set().union(*owned_names)
        }
        # The tensors are in the order of the model, which is the same on all ranks.
        self._owned = [(t, owners[name]) for name, t in tensors.items() if name in owners]
        self._unowned = [
            t
            for name, t in tensors.items()
            if name in owners and name not in owned_names[self._rank]
        ]
        self._forms = {id(t): (t.shape, t.stride()) for t in self._unowned}
        for tensor in self._unowned:
            tensor.grad = None
        self._release()

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within this context, all ranks have the whole model and optimizer state; all ranks must
        enter it.

        Changes to the tensors that a rank holds persist.
        """
        for tensor in self._unowned:
            shape, stride = self._forms[id(tensor)]
            tensor.data = tensor.new_empty_strided(shape, stride)
        try:
            for tensor, owner in self._owned:
                self._broadcast(tensor.data, owner)
            if optimizer is not None:
                self._gather_state(optimizer)
            yield
        finally:
            for tensor in self._unowned:
                if optimizer is not None:
                    optimizer.state.pop(tensor, None)
            self._release()

    @contextlib.contextmanager
    def imagined(self) -> Iterator[None]:
        """Within this context, tensors have their full shapes and no values, for tracing."""
        for tensor in self._unowned:
            shape, stride = self._forms[id(tensor)]
            tensor.data = tensor.new_empty_strided(shape, stride)
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for tensor in self._unowned:
            tensor.data = tensor.new_empty(0)

    def _gather_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, owner in self._owned:
            own = optimizer.state.get(parameter, {}) if owner == self._rank else {}
            forms = self._broadcast_json(_forms_of(own), owner)
            state = optimizer.state[parameter] if forms else {}
            for key, form in forms.items():
                if isinstance(form, dict) and key not in state:
                    state[key] = _empty(**form)
                if isinstance(form, dict):
                    self._broadcast(state[key], owner)
                else:
                    state[key] = form

    def _broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        """Broadcast a tensor from its owner."""
        flat = tensor.detach().contiguous().view(-1)
        raw = flat.view(torch.uint8) if flat.numel() else flat
        dist.broadcast(raw, dist.get_global_rank(self._group, owner), group=self._group)
        if owner != self._rank:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))

    def _broadcast_json(self, value: Mapping[str, Any], owner: int) -> dict[str, Any]:
        """Broadcast a JSON object from its owner."""
        text = json.dumps(value).encode() if owner == self._rank else b""
        length = torch.tensor([len(text)], device=CPU)
        self._broadcast(length, owner)
        data = torch.zeros(int(length), dtype=torch.uint8, device=CPU)
        if text:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._broadcast(data, owner)
        found: dict[str, Any] = json.loads(bytes(data.tolist()))
        return found


class ShardedTensorsOfLayers:
    """A model with sharded tensors, of which each rank holds some ``layers``. Gathering
    broadcasts the layers first and then unshards their tensors."""

    def __init__(self, parts: ShardedTensors, layers: ShardedLayers) -> None:
        self._parts, self._layers = parts, layers

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within this context, all ranks have the whole model and optimizer state; all ranks must
        enter it.
        """
        with self._layers.whole(optimizer), self._parts.whole(optimizer):
            yield

    @contextlib.contextmanager
    def imagined(self) -> Iterator[None]:
        with self._layers.imagined(), self._parts.imagined():
            yield


def _forms_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of each tensor; numbers are returned unchanged."""
    return {
        key: {
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            # Step counters are on the host, whichever GPU the parameter is on.
            "device": value.device.type,
        }
        if isinstance(value, torch.Tensor)
        else value
        for key, value in sorted(state.items())
    }


def _empty(*, shape: list[int], stride: list[int], dtype: str, device: str) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
