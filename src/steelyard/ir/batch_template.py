"""A step captured at a recognizable number of samples, and its graph for any other number.

That number is a prime that divides no size of the model, so that a size divisible by it must
contain the batch. Not for capturing it: see capture/deep/batch_template.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Graph, Node, Tensor

# The largest difference of derived sizes, such as the length of a sequence without its last token.
_MAX_OFFSET = 2


def telling_number(sizes: set[int]) -> int:
    """Return a prime that divides neither these sizes nor their neighbours."""
    avoided = {
        size + offset
        for size in sizes
        for offset in range(-_MAX_OFFSET, _MAX_OFFSET + 1)
        if size + offset > 0
    }
    return next(n for n in _primes() if all(size % n for size in avoided))


def _primes() -> Iterator[int]:
    """Yield primes larger than the factors of usual sizes; small ones, since some losses loop over
    samples.
    """
    return (n for n in count(101, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTemplate:
    """``graph`` is the one captured with ``samples`` samples."""

    graph: Graph
    samples: int

    def at(self, samples: int) -> Graph:
        """Return the graph for another batch size, for pricing only: its arguments do not
        change.
        """
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
        has_batch = any(self._has_batch(tensor) for tensor in node.outputs)
        return replace(
            node,
            outputs=outputs,
            # The measured cost with this signature is for other sizes.
            signature=f"{node.signature} of {samples} for {self.samples} samples",
            flops=self._scaled(node.flops, samples),
            moved_bytes=self._moved_bytes(node, samples),
            collective=self._exchange(node.collective, samples) if has_batch else node.collective,
        )

    def _tensor(self, tensor: Tensor, samples: int) -> Tensor:
        return replace(
            tensor,
            shape=tuple(self._scaled(size, samples) for size in tensor.shape),
            stride=tuple(self._scaled(step, samples) for step in tensor.stride),
        )

    def _moved_bytes(self, node: Node, samples: int) -> int:
        """Return the bytes that are moved; only tensors that contain the batch are scaled."""
        by_name = self.graph.by_name
        tensors = [t for name in node.inputs for t in by_name[name].outputs] + [*node.outputs]
        batch_bytes = sum(t.nbytes for t in tensors if self._has_batch(t))
        batch_bytes = min(batch_bytes, node.moved_bytes)
        return node.moved_bytes - batch_bytes + batch_bytes * samples // self.samples

    def _exchange(self, collective: Collective | None, samples: int) -> Collective | None:
        """Return the collective with scaled bytes, rounded up to equal parts."""
        if collective is None:
            return None
        return replace(
            collective,
            sent_bytes=-(-collective.sent_bytes * samples // self.samples),
            held_bytes=collective.held_bytes * samples // self.samples,
        )

    def _has_batch(self, tensor: Tensor) -> bool:
        return tensor.numel > 0 and tensor.numel % self.samples == 0

    def _scaled(self, amount: int, samples: int) -> int:
        return amount // self.samples * samples if amount % self.samples == 0 else amount
