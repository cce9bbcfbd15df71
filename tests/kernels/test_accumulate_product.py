"""accumulate_product compared with float64; equal bits with any number of threads and, in float32, any instruction
set."""

import torch

from kernels.accumulate_product import accumulate_product
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.random_tensors import random
from tests.helpers.ways import any_way, computing, instruction_sets

SHAPES = [(0, 3, 5), (1, 1, 1), (3, 5, 7), (257, 37, 129), (300, 200, 200)]  # 300: several blocks of steps


@any_way
@each("shape", SHAPES)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("upper", [False, True])
@each("subtract", [False, True])
def test_equals_float64(shape: tuple[int, int, int], dtype: torch.dtype, upper: bool, subtract: bool) -> None:
    k, m, n = shape
    a, b = random(k, m + 2).to(dtype)[:, 1:-1], random(k, n, seed=1).to(dtype)  # rows of `a` have a stride
    memory = torch.full((m + 1, n + 3), torch.nan)  # `out` is a part of it
    out = memory[:m, 1 : n + 1].copy_(random(m, n, seed=2))
    before, product = out.double(), a.double().T @ b.double()
    expected = before + (product.triu() if upper else product) * (-1 if subtract else 1)
    accumulate_product(out, a, b, subtract, upper)
    # float32 sums of k products, whose size is the root of k
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6 * max(k, 1) ** 0.5)
    assert int(memory.isnan().sum()) == memory.numel() - out.numel()
    if upper:
        assert torch.equal(out.tril(-1).double(), before.tril(-1))


def test_bits_in_float32_depend_neither_on_threads_nor_on_instruction_sets() -> None:
    x, results = random(300, 250), []
    for way in instruction_sets():
        with computing(way):
            for num_threads in (1, 2, 3):
                set_threads(num_threads)
                results.append(torch.zeros(250, 250))
                accumulate_product(results[-1], x, x, subtract=False, upper=False)
    assert all(torch.equal(result, results[0]) for result in results)
