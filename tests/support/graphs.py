"""Small training steps made up at random, for laws that must hold on any graph.

Not for real models: see tests/zoo.
"""

import random
from dataclasses import replace

from steelyard.ir.graph import (
    BlockRun,
    Graph,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    Role,
    Storage,
    Tensor,
)

KIB = 1024


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.storages: list[Storage] = []
        self.outputs: list[Output] = []

    def tensor(self, nbytes: int, role: Role) -> Tensor:
        self.storages.append(Storage(nbytes=nbytes, role=role))
        return Tensor(shape=(nbytes,), stride=(1,), dtype="uint8", storage=len(self.storages) - 1)

    def input(self, name: str, nbytes: int, role: Role) -> str:
        self.nodes.append(Node(name=name, op="input", outputs=(self.tensor(nbytes, role),)))
        return name

    def call(
        self,
        name: str,
        op: str,
        inputs: list[str],
        sizes: list[int],
        *,
        phase: Phase,
        path: str = "",
        flops: int = 0,
        is_random: bool = False,
    ) -> str:
        outputs = tuple(self.tensor(n, Role.ACTIVATION) for n in sizes)
        self.nodes.append(
            Node(
                name=name,
                op=op,
                args=tuple(Ref(i) for i in inputs),
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=outputs,
                phase=phase,
                path=path,
                signature=f"{op}({name})",
                flops=flops,
                moved_bytes=sum(sizes),
                is_random=is_random,
            )
        )
        return name

    def alias(self, name: str, op: str, source: str, which: int, phase: Phase, path: str) -> str:
        """Return an operator's view of a value or, with ``getitem``, one of its several results."""
        node = next(n for n in self.nodes if n.name == source)
        getitem = op == "getitem"
        self.nodes.append(
            Node(
                name=name,
                op=op,
                args=(Ref(source), which) if getitem else (Ref(source),),
                inputs=(source,),
                outputs=(node.outputs[which],),
                phase=phase,
                path=path,
                is_view=True,
            )
        )
        return name

    def graph(self, **more: object) -> Graph:
        numbered, calls = [], dict[tuple[str, str], int]()
        for node in self.nodes:
            nth = 0
            if node.phase is Phase.FORWARD and not node.is_input:
                nth = calls.get((node.path, node.op), 0)
                calls[node.path, node.op] = nth + 1
            numbered.append(Node(**{**{f: getattr(node, f) for f in node.__slots__}, "nth": nth}))
        return Graph(
            nodes=tuple(numbered),
            storages=tuple(self.storages),
            outputs=tuple(self.outputs),
            decomposition="made up",
            **more,  # type: ignore[arg-type]
        )


def random_step(seed: int, *, num_values: int = 10) -> Graph:
    """A forward pass of about ``num_values`` values with its mirrored backward pass.

    Holds views, operators of several results, random masks, weights with and without gradient,
    values read by several others, and backward operators that read arguments, results or neither.
    """
    rng = random.Random(seed)
    b = _Builder()
    b.input("batch:x", 8 * KIB, Role.BATCH)
    b.input("tangent", 4, Role.TANGENT)
    values, reads, made_by = ["batch:x"], {}, {}
    flops = [0, 10**5, 10**6, 10**7]
    for number in range(num_values):
        sources = [values[-1] if rng.random() < 0.7 else rng.choice(values)]
        if rng.random() < 0.4:
            sources.append(rng.choice(values))
        path, kind = f"layers.{number // 4}", rng.random()
        size = rng.randint(1, 16) * KIB
        name = f"f{number}"
        weight = None
        if rng.random() < 0.5:
            weight = b.input(f"parameter:w{number}", rng.randint(1, 4) * KIB, Role.PARAMETER)
        inputs = [*sources, weight] if weight else sources
        if kind < 0.15:
            b.call(f"{name}_op", "aten.pair", inputs, [size, rng.randint(1, 4) * KIB],
                   phase=Phase.FORWARD, path=path, flops=rng.choice(flops))  # fmt: skip
            value = b.alias(name, "getitem", f"{name}_op", 0, Phase.FORWARD, path)
            extra = b.alias(f"{name}_stat", "getitem", f"{name}_op", 1, Phase.FORWARD, path)
        else:
            value = b.call(name, "aten.op", inputs, [size], phase=Phase.FORWARD, path=path,
                           flops=rng.choice(flops), is_random=kind > 0.9)  # fmt: skip
            extra = None
        if rng.random() < 0.2:
            value = b.alias(f"{name}_view", "aten.view", value, 0, Phase.FORWARD, path)
        values.append(value)
        saved = [v for v in (*sources, value) if rng.random() < 0.6]
        reads[value] = (sources, weight, saved + ([extra] if extra else []), size)
        made_by[value] = number
    loss = b.call("loss", "aten.sum", [values[-1], values[-2]], [4], phase=Phase.FORWARD)
    b.outputs.append(Output(kind=OutputKind.LOSS, node=loss))
    _backward(b, rng, values, reads, flops)
    return b.graph()


def in_floats(graph: Graph) -> Graph:
    """The same step, of as many bytes, with numbers that could be kept in 8 bits."""

    def floats(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=(tensor.nbytes // 4,), dtype="float32")

    nodes = (replace(n, outputs=tuple(map(floats, n.outputs))) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _backward(b: _Builder, rng: random.Random, values: list[str], reads: dict, flops: list[int]):
    gradient: dict[str, str] = {}
    sizes = {v: reads[v][3] for v in values[1:]}
    for value in (values[-1], values[-2]):
        if value in sizes:
            gradient[value] = b.call(f"d_{value}", "aten.expand", ["tangent"], [sizes[value]],
                                     phase=Phase.BACKWARD)  # fmt: skip
    for value in reversed(values[1:]):
        if value not in gradient:
            continue
        sources, weight, saved, _ = reads[value]
        if weight is not None:
            nbytes = next(n for n in b.nodes if n.name == weight).outputs[0].shape[0]
            made = b.call(f"dw_{value}", "aten.dw", [gradient[value], *saved], [nbytes],
                          phase=Phase.BACKWARD, flops=rng.choice(flops))  # fmt: skip
            b.outputs.append(Output(kind=OutputKind.GRADIENT, node=made, target=weight))
        for source in dict.fromkeys(sources):
            if source == "batch:x":
                continue
            read, size = [gradient[value], *saved], sizes[source]
            part = b.call(f"d_{value}_{source}", "aten.dx", read, [size],
                          phase=Phase.BACKWARD, flops=rng.choice(flops))  # fmt: skip
            if source in gradient:
                both = [gradient[source], part]
                part = b.call(f"add_{value}_{source}", "aten.add", both, [size],
                              phase=Phase.BACKWARD)  # fmt: skip
            gradient[source] = part


class Whole:
    """A source whose batch cannot be split."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        assert micro_batches == share == 1
        return self._graph

    def rewritten(self, graph: Graph) -> Graph:
        return graph

    def divisors(self) -> tuple[int, ...]:
        return (1,)

    sharers = divisors

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        return False

    @property
    def split_doubt(self) -> float:
        return 0.0

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        del micro_batches, share
        return True

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        pass

    def why_not_split(self) -> str | None:
        return None

    why_not_shared = why_not_split

    def leaner_settings(self) -> tuple[str, ...]:
        return ()


class Split:
    """A source that can be split: activations, the batch and the work shrink with each part."""

    def __init__(self, graph: Graph, divisors: tuple[int, ...], *, reason: str = "") -> None:
        self._graph = graph
        self._divisors = divisors
        self._reason = reason
        self.asked: list[int] = []

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        assert share == 1
        self.asked.append(micro_batches)
        if micro_batches == 1:
            return self._graph
        outputs = {s for o in self._graph.outputs for s in self._graph.storages_of(o.node)}
        storages = tuple(
            replace(storage, nbytes=-(-storage.nbytes // micro_batches))
            if storage.role in (Role.ACTIVATION, Role.BATCH) and number not in outputs
            else storage
            for number, storage in enumerate(self._graph.storages)
        )
        nodes = tuple(
            replace(
                node,
                flops=node.flops // micro_batches,
                moved_bytes=node.moved_bytes // micro_batches,
                signature=f"{node.signature}/{micro_batches}",
            )
            for node in self._graph.nodes
        )
        return replace(self._graph, nodes=nodes, storages=storages)

    def rewritten(self, graph: Graph) -> Graph:
        return graph

    def divisors(self) -> tuple[int, ...]:
        return self._divisors

    sharers = divisors

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        return False

    @property
    def split_doubt(self) -> float:
        return 0.0

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        del micro_batches, share
        return True

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        pass

    def why_not_split(self) -> str | None:
        return self._reason or None

    why_not_shared = why_not_split

    def leaner_settings(self) -> tuple[str, ...]:
        return ()


def tower(height: int) -> Graph:
    """Equal blocks, each a product and an activation that is cheap to make and large to keep."""
    b = _Builder()
    b.input("batch:x", 8 * KIB, Role.BATCH)
    b.input("tangent", 4, Role.TANGENT)
    below = "batch:x"
    for index in range(height):
        path = f"blocks.{index}"
        weight = b.input(f"parameter:{path}", 2 * KIB, Role.PARAMETER)
        up = b.call(f"{path}:up", "aten.mm", [below, weight], [16 * KIB], phase=Phase.FORWARD,
                    path=path, flops=10**6)  # fmt: skip
        below = b.call(f"{path}:act", "aten.gelu", [up], [32 * KIB], phase=Phase.FORWARD, path=path)
    loss = b.call("loss", "aten.sum", [below], [4], phase=Phase.FORWARD)
    b.outputs.append(Output(kind=OutputKind.LOSS, node=loss))
    gradient = b.call("d_loss", "aten.expand", ["tangent"], [32 * KIB], phase=Phase.BACKWARD)
    for index in reversed(range(height)):
        path = f"blocks.{index}"
        read = f"blocks.{index - 1}:act" if index else "batch:x"
        gradient = b.call(f"{path}:d_act", "aten.gelu_backward", [gradient, f"{path}:up"],
                          [16 * KIB], phase=Phase.BACKWARD)  # fmt: skip
        made = b.call(f"{path}:d_weight", "aten.mm", [gradient, read], [2 * KIB],
                      phase=Phase.BACKWARD, flops=10**6)  # fmt: skip
        target = f"parameter:{path}"
        b.outputs.append(Output(kind=OutputKind.GRADIENT, node=made, target=target))
        if index:
            gradient = b.call(f"{path}:d_up", "aten.mm", [gradient, target], [32 * KIB],
                              phase=Phase.BACKWARD, flops=10**6)  # fmt: skip
    return b.graph(runs=(BlockRun(prefix="blocks", first=0, count=height),))
