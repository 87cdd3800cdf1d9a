"""Values in 8 bits are decoded within half a scale, in any layout; non-finite values stay
non-finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.ir.graph import Tensor
from steelyard.ir.quantized_activation import BLOCK, DECODE, ENCODE, can_be_coded, coded_bytes
from steelyard.measure.operators.memory import meter_once
from steelyard.operators import decode8, encode8, operator_named, quantization_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The error of rounding to the value's own dtype, relative to the largest element of the block.
OWN = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    coded = encode8(x, x.stride())
    assert (coded.dtype, coded.numel()) == (torch.uint8, coded_bytes(x.numel(), dims=x.dim()))
    back = decode8(coded, x.shape, x.stride(), x.dtype)
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    return back


def scales_of(flat: torch.Tensor) -> torch.Tensor:
    """Return, for each element, the largest magnitude in its block over 127."""
    blocks = flat.float().abs().split(BLOCK)
    return torch.cat([b.max().expand_as(b) for b in blocks]) / 127


@settings(deadline=None, max_examples=60)
@given(
    numel=st.one_of(st.integers(1, 700), st.integers(65_000, 70_000)),
    spread=st.floats(0.0, 6.0),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_each_element_is_off_by_half_a_scale_at_most_and_keeps_its_sign(
    numel: int, spread: float, dtype: torch.dtype, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=drawn) * (torch.randn(numel, generator=drawn) * spread).exp()
    x = x.clamp(-6e4, 6e4).to(dtype)
    scales = scales_of(x)
    back = there_and_back(x)
    lost = (back.float() - x.float()).abs()
    # Only zero is encoded as zero: a smaller value than half a scale is decoded as a whole one.
    half = torch.where(x.float().abs() < 0.501 * scales, 1.0, 0.501)
    assert (lost <= scales * (half + 127 * OWN[dtype])).all()
    assert torch.equal(back.sign(), x.sign())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "laid_out",
    [
        lambda x: x,
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 3, 1),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[:1],
    ],
)
def test_any_dense_layout_is_restored(dtype: torch.dtype, laid_out: object) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(3, 5, 7, 11)).to(dtype)  # type: ignore[operator]
    assert torch.allclose(there_and_back(x).float(), x.float(), atol=0.06)
    # Blocks consist of neighbours in memory, whatever the order of the dims.
    flat = x.as_strided((x.numel(),), (1,))
    numbers = encode8(x, x.stride())[8 * x.dim() :]
    assert torch.equal(numbers, encode8(flat, (1,))[8:])
    assert torch.equal(quantization_error(x), quantization_error(flat))


def test_the_actual_layout_of_a_kernel_is_restored() -> None:
    """No copy is made for this, because none is planned."""
    x = torch.randn(64, 64, 512).to(torch.bfloat16)
    planned = (1, 64 * 512, 64)
    back = decode8(encode8(x, planned), x.shape, planned, x.dtype)
    assert back.stride() == x.stride()
    assert torch.allclose(back, x, atol=0.06)
    metered = meter_once(lambda: encode8(x, planned))
    assert metered.peak_bytes - metered.left_bytes <= 520 * 1024


def test_non_dense_tensors_get_the_planned_layout() -> None:
    x = torch.randn(8, 16)[:, ::2]
    back = decode8(encode8(x, (8, 1)), x.shape, (8, 1), x.dtype)
    assert back.stride() == (8, 1)
    assert torch.allclose(back, x, atol=0.06)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_non_finite(dtype: torch.dtype, odd: float) -> None:
    x = torch.randn(3 * BLOCK + 5).to(dtype)
    x[BLOCK + 3] = odd
    back = there_and_back(x)
    assert not back[BLOCK : 2 * BLOCK].isfinite().any()
    assert back[:BLOCK].isfinite().all()
    assert back[2 * BLOCK :].isfinite().all()
    assert not quantization_error(x).isfinite()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-30, 1e-42, 6e4])
def test_constant_blocks_are_exact(value: float) -> None:
    back = there_and_back(torch.full((2 * BLOCK + 1,), value))
    # A value smaller than the least scale is decoded as the least scale.
    assert torch.allclose(back, torch.full_like(back, value), rtol=1e-6, atol=1.2e-38)
    assert float(quantization_error(torch.zeros(BLOCK))) == 0.0


def test_quantization_is_deterministic_and_draws_no_numbers() -> None:
    x = torch.randn(100_000)
    state = torch.get_rng_state()
    assert torch.equal(there_and_back(x), there_and_back(x))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_workspace_does_not_grow_with_the_value(dtype: torch.dtype) -> None:
    held = []
    for numel in (1 << 18, 1 << 22):
        x = torch.randn(numel).to(dtype)
        coded = encode8(x, (1,))
        written = meter_once(lambda x=x: encode8(x, (1,)))
        read = meter_once(lambda c=coded, n=numel: decode8(c, (n,), (1,), dtype))
        assert written.left_bytes == coded_bytes(numel, dims=1)
        assert read.left_bytes == x.nbytes
        held.append((written.peak_bytes - written.left_bytes, read.peak_bytes - read.left_bytes))
    assert held[0] == held[1]
    assert max(held[0]) <= 520 * 1024


def test_the_error_is_the_share_of_the_norm_that_is_lost() -> None:
    x = torch.randn(70_001)
    lost = (there_and_back(x) - x).norm() / x.norm()
    assert float(quantization_error(x)) == pytest.approx(float(lost), rel=1e-3)


def test_our_operators_are_registered_and_pass_opcheck() -> None:
    x = torch.randn(6, 300)
    args = (encode8(x, (300, 1)), [6, 300], [300, 1], torch.float32)
    assert torch.equal(operator_named(ENCODE)(x, [300, 1]), args[0])
    assert torch.equal(operator_named(DECODE)(*args), decode8(*args))
    torch.library.opcheck(operator_named(ENCODE), (x, [300, 1]))
    torch.library.opcheck(operator_named(DECODE), args)


@pytest.mark.parametrize(
    ("shape", "stride", "dtype", "able"),
    [
        ((4, 6), (6, 1), "float32", True),
        ((4, 6), (1, 4), "bfloat16", True),
        ((4, 1, 6), (6, 99, 1), "float16", True),
        ((4, 6), (0, 1), "float32", False),
        ((4, 6), (3, 1), "float32", False),
        ((4, 6), (12, 2), "float32", False),
        ((4, 6), (6, 1), "float64", False),
        ((4, 6), (6, 1), "int64", False),
        ((4, 6), (6, 1), "bool", False),
    ],
)
def test_quantizable_tensors_are_recognized(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, able: bool
) -> None:
    assert can_be_coded(Tensor(shape=shape, stride=stride, dtype=dtype, storage=0)) is able
