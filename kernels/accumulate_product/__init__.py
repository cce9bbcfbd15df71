"""Sums of outer products: x^T x of activations, and the updates of GPTQ and of a Cholesky factorisation.

K rows, M and N channels.
"""

from torch import Tensor

from kernels.accumulate_product import reference
from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator

__all__ = ["accumulate_product"]


@operator(reference.accumulate_product, fake=lambda *_: None, mutates_args=("out",))
def accumulate_product(cpp: Library, out: Tensor, a: Tensor, b: Tensor, subtract: bool, upper: bool) -> None:
    """Add a^T b to `out`, or subtract it, as `reference.accumulate_product` does. Only elements of a row of `out` must
    be adjacent.

    The bits do not depend on the number of threads. In float32 they are equal in all instruction sets.
    """
    dtype = DTYPES.get(a.dtype)
    if dtype is None or not out.is_cpu or out.stride(1) != 1:
        raise UnsupportedArguments
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    places = (a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), out.data_ptr(), out.stride(0))
    cpp.accumulate_product(*places, dtype, *a.shape, b.shape[1], subtract, upper)
