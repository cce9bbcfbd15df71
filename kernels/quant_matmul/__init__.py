"""Matrix products with quantised weights."""

from kernels.quant_matmul.reference import PackedWeight, pack, quant_matmul, quant_matmul_int8, quantize_rows

__all__ = ["PackedWeight", "pack", "quant_matmul", "quant_matmul_int8", "quantize_rows"]
