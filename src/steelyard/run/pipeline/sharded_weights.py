"""Weights that are sharded over data-parallel replicas of a stage. They are gathered once per step,
and stay gathered until its end.

Not for weights that are gathered layer by layer, whose collectives are nodes of a program.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from steelyard.comm.gloo.direct_collectives import all_gather_into, reduce_scatter_rows


class ShardedParameters:
    """Row-sharded ``parameters``; each rank of the group owns its rows."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within this context, the parameters, and the gradients that they get, are whole.

        On exit each gradient is reduce-scattered to this rank's rows. Gradients start as None.
        """
        rows = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = self._whole(parameter.data)
        try:
            yield
            gradients = [parameter.grad for parameter in self._parameters]
        finally:
            for parameter, own in zip(self._parameters, rows, strict=True):
                parameter.grad = None
                parameter.data = own
        for parameter in self._parameters:
            parameter.grad = self._own_rows(gradients.pop(0))

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        whole = rows.new_empty((rows.shape[0] * self._group.size(), *rows.shape[1:]))
        all_gather_into(whole, rows, self._group)
        return whole

    def _own_rows(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else reduce_scatter_rows(gradient, self._group)
