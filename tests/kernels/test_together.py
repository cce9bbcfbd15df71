"""Several weights in one call, and a gate with its partner: bit for bit equal to their single products, which other
tests prove."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels import linear as products
from kernels.quantize_rows import Activations, QuantizedActivations, quantize_rows
from kernels.swiglu import swiglu
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.integer_weights import FORMATS, make
from tests.helpers.poison import poisoned
from tests.helpers.tiers import tiers
from tests.helpers.ways import any_way, compiled

ROWS = [1, 2, 5, 13, 65]
OUTPUTS = [(1, 17, 100), (64, 15), (130,)]
INPUTS = [31, 64, 257]
NARROW = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def biases_of(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor | None]:
    """Return a bias for every second weight."""
    return [randn(size, dtype=dtype) if i % 2 == 0 else None for i, size in enumerate(sizes)]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


@any_way
@each("dtype", NARROW)
@poisoned()
def test_dense_weights_together(dtype: torch.dtype) -> None:
    for num_inputs in INPUTS:
        for sizes in OUTPUTS:
            weights = [products.pack(randn(size, num_inputs, dtype=dtype)) for size in sizes]
            biases = biases_of(sizes, dtype)
            for num_rows in ROWS:
                x = randn(num_rows, num_inputs, dtype=dtype)
                alone = [products.matmul(x, *pair) for pair in zip(weights, biases, strict=True)]
                assert equal(products.matmul_together(x, weights, biases), alone)


@any_way
@each("dtype", NARROW)
@poisoned()
def test_dense_gate_and_up(dtype: torch.dtype) -> None:
    for num_inputs in INPUTS:
        for size in (1, 17, 64, 100, 130):
            gate, up = (products.pack(randn(size, num_inputs, dtype=dtype) * scale) for scale in (1, 2))
            for biases in [(None, None), (randn(size, dtype=dtype), None), (None, randn(size, dtype=dtype))]:
                for num_rows in ROWS:
                    x = randn(num_rows, num_inputs, dtype=dtype)
                    expected = swiglu(products.matmul(x, gate, biases[0]), products.matmul(x, up, biases[1]))
                    assert equal([products.matmul_swiglu(x, gate, up, *biases)], [expected])


@any_way
def test_gate_and_up_equal_the_formula() -> None:
    x, gate, up = (randn(rows, 65, dtype=torch.float32) for rows in (9, 33, 34))
    up = up[:33]
    a, b = x.double() @ gate.double().T, x.double() @ up.double().T
    result = products.matmul_swiglu(x, products.pack(gate), products.pack(up))
    # Two sums of 65 products of size 1, each off by some 2^-22, times factors of up to 30.
    torch.testing.assert_close(result.double(), a / (1 + (-a).exp()) * b, rtol=1e-5, atol=1e-4)


def rows_of(x: Tensor, kind: str) -> Activations:
    if kind == "floats":
        return x
    codes, scales = quantize_rows(x)
    return QuantizedActivations(codes, scales[:1] if kind == "one scale" else scales, x.dtype)


def product(rows: Activations, weight: products.IntWeight, bias: Tensor | None) -> Tensor:
    """Compute with the single functions; the bias is added in the rows' dtype."""
    y = products.matmul(rows, weight)
    return y if bias is None else y + bias


@pytest.mark.parametrize(("bits", "group", "zeros"), tiers(FORMATS, [(8, 0, False), (4, 32, True)], FORMATS))
@any_way
@poisoned()
def test_quantised_weights_together_and_as_gate_and_up(bits: int, group: int, zeros: bool) -> None:
    for num_inputs, dtype in [(31, torch.float32), (257, torch.bfloat16)]:
        for sizes in OUTPUTS:
            weights = [products.pack_codes(*make(size, num_inputs, bits, group, zeros)[:3], bits) for size in sizes]
            up = products.pack_codes(*make(sizes[0], num_inputs, bits, group, zeros)[:3], bits)
            biases = biases_of(sizes, dtype)
            for num_rows, kind in itertools.product(ROWS, ("floats", "int8", "one scale")):
                rows = rows_of(randn(num_rows, num_inputs, dtype=dtype) / num_inputs, kind)
                alone = [product(rows, *pair) for pair in zip(weights, biases, strict=True)]
                assert equal(products.matmul_together(rows, weights, biases), alone), (num_rows, kind)
                gated = products.matmul_swiglu(rows, weights[0], up, biases[0])
                assert equal([gated], [swiglu(alone[0], product(rows, up, None))]), (num_rows, kind)


@pytest.mark.long
@compiled
@each("dtype", NARROW)
def test_bits_do_not_depend_on_rows_or_threads(dtype: torch.dtype) -> None:
    sizes, x = (100, 17, 200), randn(130, 321, dtype=dtype)
    dense = [products.pack(randn(size, 321, dtype=dtype)) for size in sizes]
    coded = [products.pack_codes(*make(size, 321, 4, 32, True)[:3], 4) for size in sizes]
    biases = biases_of(sizes, dtype)

    def results(x: Tensor) -> list[Tensor]:
        rows = rows_of(x, "int8")
        return [
            *products.matmul_together(x, dense, biases),
            *products.matmul_together(x, coded, biases),
            *products.matmul_together(rows, coded, biases),
            products.matmul_swiglu(x, dense[0], dense[0], None, biases[0]),
            products.matmul_swiglu(x, coded[0], coded[0], None, biases[0]),
            products.matmul_swiglu(rows, coded[0], coded[0], None, biases[0]),
        ]

    set_threads(1)
    batch_result = results(x)
    for num_threads in (1, 2, 3, 4):
        set_threads(num_threads)
        for count in (1, 2, 7, 64, 130):
            assert equal(results(x[-count:]), [result[-count:] for result in batch_result]), (num_threads, count)


@any_way
def test_no_rows_and_strided_rows() -> None:
    weights = [products.pack(randn(size, 32, dtype=torch.float32)) for size in (17, 5)]
    coded = [products.pack_codes(*make(size, 32, 8, 0, False)[:3], 8) for size in (17, 5)]
    x = randn(4, 64, dtype=torch.float32)[:, ::2]
    none = [None, None]
    assert [y.shape for y in products.matmul_together(x[:0], weights, none)] == [(0, 17), (0, 5)]
    assert [y.shape for y in products.matmul_together(x[:0], coded, none)] == [(0, 17), (0, 5)]
    assert products.matmul_swiglu(x[:0], weights[0], weights[0]).shape == (0, 17)
    copied = x.contiguous()
    assert equal(products.matmul_together(x, weights, none), products.matmul_together(copied, weights, none))
    together = products.matmul_together
    assert equal(together(x, coded, none), together(copied, coded, none))


@any_way
def test_weights_that_cannot_share_one_call_are_refused() -> None:
    dense, x = (
        [products.pack(randn(size, 32, dtype=torch.float32)) for size in (17, 5)],
        randn(2, 32, dtype=torch.float32),
    )
    with pytest.raises(ValueError, match="4 weights: at most 3 are multiplied together"):
        products.matmul_together(x, dense * 2, [None] * 4)
    with pytest.raises(ValueError, match="a weight of 31 inputs"):
        products.matmul_together(x, [dense[0], products.pack(randn(4, 31, dtype=torch.float32))], [None] * 2)
    with pytest.raises(ValueError, match="a gate of 17 outputs for 5"):
        products.matmul_swiglu(x, *dense)
    with pytest.raises(ValueError, match=r"a bias \[2\] of torch.float32 for 5 outputs of torch.float32"):
        products.matmul_swiglu(x, dense[1], dense[1], x[0, :2])
    coded = [products.pack_codes(*make(17, 32, bits, 0, False)[:3], bits) for bits in (8, 4)]
    with pytest.raises(ValueError, match="4 weights: at most 3 are multiplied together"):
        products.matmul_together(x, coded * 2, [None] * 4)
    with pytest.raises(
        ValueError, match=r"weights of .*codes=.int8.* and .*codes=.int4.* cannot be multiplied together"
    ):
        products.matmul_together(x, coded, [None] * 2)
    with pytest.raises(ValueError, match=r"a bias \[17\] of torch.bfloat16 for 17 outputs of torch.float32"):
        products.matmul_together(x, coded[:1], [torch.zeros(17, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="no product computes in torch.float64, only in torch.float32, torch.bfl"):
        products.matmul_together(x.double(), coded[:1], [None])
    rows = QuantizedActivations(torch.zeros(3, 32, dtype=torch.int8), torch.ones(2, 1), x.dtype)
    with pytest.raises(ValueError, match=r"scales \[2, 1\] for 3 rows: one of each, or \[1, 1\] of all"):
        products.matmul_together(rows, coded[:1], [None])
    rows = QuantizedActivations(torch.zeros(3, 32, dtype=torch.float8_e4m3fn), torch.ones(3, 1), x.dtype)
    with pytest.raises(
        ValueError, match="rows of torch.float8_e4m3fn: weights of integers are multiplied by floats or"
    ):
        products.matmul(rows, coded[0])
    other = products.pack_codes(*make(5, 32, 8, 0, False)[:3], 8)
    with pytest.raises(ValueError, match="a gate of 17 outputs for 5"):
        products.matmul_swiglu(x, coded[0], other)
