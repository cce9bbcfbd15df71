"""bfloat16 in 12 bits: the same values, and the same bits of every product, as without compression."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import build
from kernels.linear import FloatWeight, WeightGroup, grouped_matmul, matmul, matmul_swiglu, matmul_together, pack
from kernels.linear import compressed as compression
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.ways import compiled

ROWS = [
    *range(1, 26),
    48,
    49,
    96,
    97,
    121,
    600,
]  # one panel of each height, few panels, many, and several chunks of them


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def any_bits(*shape: int) -> Tensor:
    """Return numbers with uniform upper bytes: most are exceptions, among them NaN, infinity and denormals."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**15), 2**15, shape, generator=generator).short().view(torch.bfloat16)


def compress(matrix: FloatWeight) -> FloatWeight:
    """Compress a weight of any size, whether or not it becomes smaller."""
    tiles = compression.compress_with(*compression.common_upper_bytes(matrix.memory), matrix.memory)
    return FloatWeight(tiles, matrix.num_outputs, matrix.num_inputs)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@compiled
@each("make", [random, any_bits])
@each("num_inputs", [1, 2, 7, 8, 9, 31, 64, 321])
@each("num_outputs", [1, 16, 17, 50])
def test_it_is_without_loss(num_outputs: int, num_inputs: int, make: Callable[..., Tensor]) -> None:
    weight = make(num_outputs, num_inputs)
    matrix = compress(pack(weight))
    assert matrix.is_compressed
    assert equal_bits(matrix.unpack(), weight)
    num_tiles, num_steps = -(-num_outputs // 16), -(-num_inputs // 2)
    tiles = compression.decompress_portably(matrix.memory, num_tiles, num_steps)
    assert equal_bits(tiles, compression.decompress(matrix.memory, num_tiles, num_steps))


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 1), (17, 31), (80, 128), pytest.param(100, 323, marks=pytest.mark.long)]
)
@compiled
def test_products_have_the_bits_of_those_without_it(num_outputs: int, num_inputs: int) -> None:
    plain = pack(random(num_outputs, num_inputs))
    matrix, x, bias = compress(plain), random(max(ROWS), num_inputs), random(num_outputs)
    for num_rows in ROWS:
        rows = x[:num_rows]
        expected, gated = matmul(rows, plain, bias), matmul_swiglu(rows, plain, plain)
        for num_threads in (1, 2, 3, 4):
            set_threads(num_threads)
            assert equal_bits(matmul(rows, matrix, bias), expected), (num_threads, num_rows)
            assert equal_bits(matmul_swiglu(rows, matrix, plain), gated), (num_threads, num_rows)
            assert equal_bits(matmul_swiglu(rows, plain, matrix), gated), (num_threads, num_rows)


@compiled
def test_some_of_several_weights_may_be_compressed() -> None:
    plain, others = [pack(random(outputs, 70)) for outputs in (33, 16, 5)], [pack(random(40, 70)) for _ in range(3)]
    mixed, x = [compress(plain[0]), plain[1], compress(plain[2])], random(7, 70)
    for one, other in zip(matmul_together(x, mixed, [None] * 3), matmul_together(x, plain, [None] * 3), strict=True):
        assert equal_bits(one, other)
    starts, gates = torch.tensor([0, 3, 3, 7]), WeightGroup([others[0], compress(others[1]), compress(others[2])])
    expected = grouped_matmul(x, WeightGroup(others), starts)
    assert equal_bits(grouped_matmul(x, gates, starts), expected)
    expected = grouped_matmul(x, WeightGroup(others), starts, WeightGroup(others[::-1]))
    ups = WeightGroup([compress(others[2]), others[1], others[0]])
    assert equal_bits(grouped_matmul(x, gates, starts, ups), expected)


@compiled
def test_exceptions_are_multiplied_too() -> None:
    """Every number except those with 16 of the upper bytes is an exception, and the reference is float64."""
    weight = any_bits(64, 200)
    weight = torch.where(weight.isfinite() & (weight.abs() < 2**20) & (weight.abs() > 2**-60), weight, 0)
    x, matrix = random(5, 200), compress(pack(weight))
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert ((matmul(x, matrix) - expected).abs() <= 2**-8 * size).all()  # the result is rounded once


@compiled
def test_only_weights_that_become_smaller_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "instruction_set", lambda: "avx512")  # whichever function compresses them
    weight = random(512, 1024)
    assert pack(weight).memory.nbytes == pytest.approx(weight.nbytes * 0.75, rel=0.003)  # exceptions are few
    assert not pack(weight[:256]).is_compressed  # small
    assert not pack(any_bits(512, 1024)).is_compressed
    assert not pack(weight.float()).is_compressed
    monkeypatch.setattr(build, "instruction_set", lambda: "avx2")
    assert not pack(weight).is_compressed


@compiled
def test_memory_that_cannot_be_one_is_refused() -> None:
    matrix = compress(pack(random(20, 30)))
    for wrong in (matrix.memory[:-1], matrix.memory[:-16], matrix.memory.repeat(2)[::2], matrix.memory[None]):
        with pytest.raises(
            ValueError, match=r"compressed weights of \d+ bytes, and 8 for each exception, cannot be \["
        ):
            FloatWeight(wrong, 20, 30)
    matrix.check()
    for place in (-8, -4 * len(matrix.memory.view(torch.int32)) + 4 * (64 + 2 * 4 * 192) // 4):
        endless = matrix.memory.clone()
        endless[place:][:4] = torch.tensor([9, 0, 0, 0])
        with pytest.raises(ValueError, match="compressed weights whose exceptions have no end"):
            FloatWeight(endless, 20, 30).check()
