"""A step captured at a number of samples that tells, and written out for any other number.

The number is a prime that no size of the model is a multiple of, so that a size which is one holds
samples. Not for capturing it: see capture/deep/batch_template.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Graph, Node, Tensor

# Of sizes such as a sequence without its last token, what they are off by.
_NEAR = 2


def telling_number(sizes: set[int]) -> int:
    """A prime that neither these sizes nor their neighbours are multiples of."""
    near = {size + off for size in sizes for off in range(-_NEAR, _NEAR + 1) if size + off > 0}
    return next(n for n in _primes() if all(size % n for size in near))


def _primes() -> Iterator[int]:
    """Small ones, for losses that loop over samples; none that sizes are products of."""
    return (n for n in count(101, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTemplate:
    """``graph`` is that of ``samples`` samples."""

    graph: Graph
    samples: int

    def at(self, samples: int) -> Graph:
        """The same operators on so many samples: for pricing, as arguments stay as they were."""
        if samples == self.samples:
            return self.graph
        graph = self.graph
        storages = (replace(s, nbytes=self._scaled(s.nbytes, samples)) for s in graph.storages)
        return replace(
            graph,
            nodes=tuple(self._node(node, samples) for node in graph.nodes),
            storages=tuple(storages),
        )

    def _node(self, node: Node, samples: int) -> Node:
        outputs = tuple(self._tensor(tensor, samples) for tensor in node.outputs)
        held = any(self._holds(tensor) for tensor in node.outputs)
        return replace(
            node,
            outputs=outputs,
            # What was measured is of other sizes.
            signature=f"{node.signature} of {samples} for {self.samples} samples",
            flops=self._scaled(node.flops, samples),
            moved_bytes=self._moved_bytes(node, samples),
            collective=self._exchange(node.collective, samples) if held else node.collective,
        )

    def _tensor(self, tensor: Tensor, samples: int) -> Tensor:
        return replace(
            tensor,
            shape=tuple(self._scaled(size, samples) for size in tensor.shape),
            stride=tuple(self._scaled(step, samples) for step in tensor.stride),
        )

    def _moved_bytes(self, node: Node, samples: int) -> int:
        """Of what is read and written, only the tensors that hold samples change."""
        by_name = self.graph.by_name
        tensors = [t for name in node.inputs for t in by_name[name].outputs] + [*node.outputs]
        holding = sum(t.nbytes for t in tensors if self._holds(t))
        holding = min(holding, node.moved_bytes)
        return node.moved_bytes - holding + holding * samples // self.samples

    def _exchange(self, collective: Collective | None, samples: int) -> Collective | None:
        """What each rank sends is a share, rounded up, of what holds samples as a whole."""
        if collective is None:
            return None
        return replace(
            collective,
            sent_bytes=-(-collective.sent_bytes * samples // self.samples),
            held_bytes=collective.held_bytes * samples // self.samples,
        )

    def _holds(self, tensor: Tensor) -> bool:
        return tensor.numel > 0 and tensor.numel % self.samples == 0

    def _scaled(self, amount: int, samples: int) -> int:
        return amount // self.samples * samples if amount % self.samples == 0 else amount
