"""A live model of whose layers this rank holds some: let go of, and put together again from all.

Between steps what it does not hold is an empty tensor, which nothing can be computed with. Where
ranks share a layer's tensors too, what they hold of it are parts. Not for these: see tensors.py.
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
    """``held`` says which of the model's tensors each rank of the group holds, by their names in a
    graph; letting go of the others happens here. What nobody holds stays with all."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        held: Sequence[frozenset[str]],
        *,
        group: dist.ProcessGroup,
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        owners = {n: min(r for r, own in enumerate(held) if n in own) for n in set().union(*held)}
        # In the order of the model, which is that of all ranks.
        self._owned = [(t, owners[name]) for name, t in tensors.items() if name in owners]
        self._others = [
            t for name, t in tensors.items() if name in owners and name not in held[self._rank]
        ]
        self._forms = {id(t): (t.shape, t.stride()) for t in self._others}
        for tensor in self._others:
            tensor.grad = None
        self._let_go()

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within it all ranks hold all of the model, and of what the optimizer keeps; what is then
        written into what a rank holds is kept. All ranks enter together."""
        for tensor in self._others:
            shape, stride = self._forms[id(tensor)]
            tensor.data = tensor.new_empty_strided(shape, stride)
        try:
            for tensor, owner in self._owned:
                self._tell(tensor.data, owner)
            if optimizer is not None:
                self._gather_state(optimizer)
            yield
        finally:
            for tensor in self._others:
                if optimizer is not None:
                    optimizer.state.pop(tensor, None)
            self._let_go()

    @contextlib.contextmanager
    def imagined(self) -> Iterator[None]:
        """Within it tensors have the forms of whole ones and no values, for tracing."""
        for tensor in self._others:
            shape, stride = self._forms[id(tensor)]
            tensor.data = tensor.new_empty_strided(shape, stride)
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for tensor in self._others:
            tensor.data = tensor.new_empty(0)

    def _gather_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, owner in self._owned:
            own = optimizer.state.get(parameter, {}) if owner == self._rank else {}
            forms = self._told(_forms_of(own), owner)
            kept = optimizer.state[parameter] if forms else {}
            for key, form in forms.items():
                if isinstance(form, dict) and key not in kept:
                    kept[key] = _empty(**form)
                if isinstance(form, dict):
                    self._tell(kept[key], owner)
                else:
                    kept[key] = form

    def _tell(self, tensor: torch.Tensor, owner: int) -> None:
        """Fill it with what the owner has."""
        flat = tensor.detach().contiguous().view(-1)
        given = flat.view(torch.uint8) if flat.numel() else flat
        dist.broadcast(given, dist.get_global_rank(self._group, owner), group=self._group)
        if owner != self._rank:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))

    def _told(self, words: Mapping[str, Any], owner: int) -> dict[str, Any]:
        """What the owner says."""
        text = json.dumps(words).encode() if owner == self._rank else b""
        length = torch.tensor([len(text)], device=CPU)
        self._tell(length, owner)
        said = torch.zeros(int(length), dtype=torch.uint8, device=CPU)
        if text:
            said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._tell(said, owner)
        found: dict[str, Any] = json.loads(bytes(said.tolist()))
        return found


class ShardedTensorsOfLayers:
    """A model in ``parts``, cut first, of which each rank then holds some ``layers``. To make it
    whole, ranks first tell each other their layers, and then put the parts together."""

    def __init__(self, parts: ShardedTensors, layers: ShardedLayers) -> None:
        self._parts, self._layers = parts, layers

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """As that of both."""
        with self._layers.whole(optimizer), self._parts.whole(optimizer):
            yield

    @contextlib.contextmanager
    def imagined(self) -> Iterator[None]:
        with self._layers.imagined(), self._parts.imagined():
            yield


def _forms_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for each entry; numbers stand for themselves."""
    return {
        key: {
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            # Counts of steps lie on the host, whatever GPU the parameter is on.
            "device": value.device.type,
        }
        if isinstance(value, torch.Tensor)
        else value
        for key, value in sorted(state.items())
    }


def _empty(*, shape: list[int], stride: list[int], dtype: str, device: str) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
