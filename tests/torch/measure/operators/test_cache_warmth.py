import torch

from steelyard.ir.graph import Graph, Node, Ref, Role, Storage, Tensor
from steelyard.measure.operators.cache_warmth import distances, preparation

MIB = 1 << 20


def chain() -> Graph:
    """x -> a -> b, and c reads both x and b; each call moves 10 bytes."""

    def tensor(storage: int) -> Tensor:
        return Tensor(shape=(1,), stride=(1,), dtype="float32", storage=storage)

    def call(name: str, inputs: tuple[str, ...], storage: int) -> Node:
        return Node(
            name=name,
            op=f"op {name}",
            args=tuple(Ref(i) for i in inputs),
            inputs=inputs,
            outputs=(tensor(storage),),
            signature=name,
            moved_bytes=10,
        )

    view = Node(
        name="v", op="view", args=(Ref("b"),), inputs=("b",), outputs=(tensor(2),), is_view=True
    )
    nodes = (
        Node(name="x", op="input", outputs=(tensor(0),)),
        call("a", ("x",), 1),
        call("b", ("a",), 2),
        view,
        call("c", ("x", "v"), 3),
    )
    storages = tuple(Storage(nbytes=4, role=Role.ACTIVATION) for _ in range(4))
    return Graph(nodes=nodes, storages=storages, outputs=(), decomposition="none")


def test_reuse_distance_is_the_bytes_moved_since_the_last_use() -> None:
    found = distances([chain()])
    assert found["b"] == (0,)
    # a was the last reader of x, and b has moved 10 bytes since then; the view moved nothing.
    assert found["c"] == (10, 0)
    assert found["a"][0] > 1 << 60


def test_warming_the_cache_changes_no_value() -> None:
    near, far, never = (torch.rand(300), torch.rand(2, 5).expand(3, 2, 5), torch.rand(4))
    before = [t.clone() for t in (near, far, never)]
    preparation([(near, 0), (far, 2 * MIB), (never, 1 << 62)])()
    assert all(torch.equal(a, b) for a, b in zip((near, far, never), before))


def test_every_dtype_can_be_made_warm() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.int8, torch.complex64, torch.float8_e4m3fn):
        preparation([(torch.zeros(3, dtype=dtype), 0), (torch.zeros(0, dtype=dtype), 0)])()
