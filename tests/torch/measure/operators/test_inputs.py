import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.ir.graph import Tensor
from steelyard.measure.operators.inputs import InputFactory, extent_of, index_bounds
from steelyard.operators import operator_named, torch_object
from tests.support.calls import described, graph_of

SOURCE = InputFactory(torch.device("cpu"))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """Permuted, sliced, expanded, empty and scalar tensors."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    x = torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)))
    x = x.permute(draw(st.permutations(range(len(shape)))))
    if x.dim() and draw(st.booleans()):
        x = x[..., ::2]
    if draw(st.booleans()):
        x = x.unsqueeze(0).expand(3, *x.shape)
    return x


@settings(deadline=None)
@given(layouts())
def test_an_input_has_the_strides_of_the_graph(like: torch.Tensor) -> None:
    made = SOURCE.tensor(described(like, 0))
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert made.untyped_storage().nbytes() <= like.untyped_storage().nbytes()
    if made.dtype.is_floating_point and made.numel():
        # These values are valid as probability, variance, divisor, and argument of a logarithm.
        assert 0 < made.min() <= made.max() <= 1


def test_an_expanded_input_takes_its_storage_only() -> None:
    like = Tensor(shape=(1000, 1000, 3), stride=(0, 0, 1), dtype="float32", storage=0)
    assert extent_of(like) == 3
    assert SOURCE.tensor(like).untyped_storage().nbytes() == 12


FLOATS = torch.zeros(6, 10)
INDEX = torch.zeros(6, 4, dtype=torch.int64)
ROWS = torch.zeros(7, dtype=torch.int64)
LOOKUPS = {
    "embedding": ("aten.embedding.default", [FLOATS, ROWS], 6),
    "embedding backward": (
        "aten.embedding_dense_backward.default",
        [torch.zeros(7, 10), ROWS, 6, -1, False],
        6,
    ),
    "gather": ("aten.gather.default", [FLOATS, 1, INDEX], 10),
    "scatter add": ("aten.scatter_add.default", [FLOATS, 1, INDEX, torch.zeros(6, 4)], 10),
    "index select": ("aten.index_select.default", [FLOATS, 0, ROWS], 6),
    "index": ("aten.index.Tensor", [FLOATS, [None, ROWS]], 10),
    "index put": ("aten.index_put.default", [FLOATS, [ROWS], torch.zeros(7, 10)], 6),
    "nll loss": (
        "aten.nll_loss_forward.default",
        [FLOATS, torch.zeros(6, dtype=torch.int64), None, 1, -100],
        10,
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_drawn_indices_are_valid_and_spread(name: str) -> None:
    op, args, below = LOOKUPS[name]
    graph = graph_of((op, args, []))
    node = graph.nodes[-1]
    (bound,) = index_bounds(graph, node).items()
    assert bound[1] == below
    given = SOURCE.arguments(graph, node)
    drawn = given.tensors[bound[0]]
    assert drawn.dtype == torch.int64
    assert 0 <= drawn.min() < drawn.max() < below
    operator_named(op)(*given.args, **given.kwargs)


def test_integers_of_other_operators_are_zero() -> None:
    graph = graph_of(("aten.add.Tensor", [ROWS, ROWS], []))
    (tensor,) = SOURCE.arguments(graph, graph.nodes[-1]).tensors.values()
    assert not tensor.any()


def test_one_value_given_twice_is_one_tensor() -> None:
    x = torch.zeros(3)
    graph = graph_of(("aten.stack.default", [[x, x]], []))
    ((first, second),) = SOURCE.arguments(graph, graph.nodes[-1]).args
    assert first is second


def test_names_of_torch_objects_are_read_not_evaluated() -> None:
    assert torch_object("torch.bfloat16") is torch.bfloat16
    assert torch_object("torch.strided") is torch.strided
    assert torch_object("torch.device('cpu')") == torch.device("cpu")
    with pytest.raises((AttributeError, RuntimeError)):
        torch_object("torch.device('cpu').type")


def test_drawing_leaves_the_random_stream_alone() -> None:
    before = torch.get_rng_state()
    InputFactory(torch.device("cpu")).tensor(
        described(torch.zeros(5, dtype=torch.int64), 0), below=9
    )
    assert torch.equal(before, torch.get_rng_state())
