"""Matrix products with a quantised weight on a GPU: weights of 8 or 4 bits with 16-bit activations, or with 8-bit
activations.

M rows, K inputs, N outputs, G groups of inputs that share a scale, C inputs per chunk: the part of a weight that a
program reads at a time.

The product of one row is a sum in registers, limited by memory bandwidth. More rows use matrix units. The weight is the
left operand, because Hopper's matrix units read the left operand from registers, where the codes have just been
converted. A few rows give too few programs: then the inputs are split, and `_add` adds the partial sums (arXiv
2402.00025) in a fixed order, so that results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import Launch, tuned_launch
from kernels.linear.gpu_weight import BLOCK, GPUWeight
from kernels.quantize_rows.rows import Activations, QuantizedActivations

FULL_GPU = 264  # programs that keep an H200 busy: two per multiprocessor (132)
EPILOGUE_SIZE = 1024

LAUNCHES = {1: Launch(16, 1, 4, 3), 16: Launch(64, 16, 4, 4), 32: Launch(64, 32, 4, 4), 64: Launch(64, 64, 4, 4)}
"""The default launches, by the largest number of rows. More rows use LARGE. A launch that was measured on this GPU
replaces the default."""
LARGE = Launch(128, 128, 8, 3)


def matmul(x: Activations, weight: GPUWeight) -> Tensor:
    """Compute the same as `kernels.linear.matmul`, with float32 sums. Sums of int8 are exact at least within a chunk."""
    if isinstance(x, QuantizedActivations):
        return _multiply(x.codes, x.scales, weight, x.dtype, x.group_size)
    return _multiply(x, None, weight, x.dtype)


def _multiply(
    x: Tensor, x_scales: Tensor | None, weight: GPUWeight, dtype: torch.dtype, x_group_size: int | None = None
) -> Tensor:
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"rows {list(x.shape)} cannot be multiplied by a weight of {weight.num_inputs} inputs")
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, outputs = x.shape[0], weight.num_outputs
    output = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return output
    chunks = triton.cdiv(weight.num_inputs, weight.chunk)
    default = next((launch for most, launch in LAUNCHES.items() if rows <= most), LARGE)
    launch = tuned_launch("product", rows, x, weight) or default
    programs = triton.cdiv(rows, launch.rows) * triton.cdiv(outputs, launch.outputs)
    splits = 1 if rows == 1 else min(triton.cdiv(FULL_GPU, programs), triton.cdiv(chunks, 4))
    parts = output if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    shared = format_of(weight, x_scales, x_group_size) | launch.options
    tensors = (x, x_scales, *tensors_of(weight))
    if rows == 1:
        _one_row[(programs,)](*tensors, output, CHUNKS=chunks_at_once(weight), **shared)
        return output
    stride = 0 if x_scales is None or x_scales.shape[0] == 1 else x_scales.stride(0)
    grid = (programs, splits)
    _rows[grid](*tensors, parts, rows, x.stride(0), stride, splits, ROWS=launch.rows, **shared)
    if splits > 1:
        size = rows * outputs
        _add[(triton.cdiv(size, EPILOGUE_SIZE),)](parts, output, size, splits, SIZE=EPILOGUE_SIZE)
    return output


def tensors_of(weight: GPUWeight) -> tuple[Tensor | None, ...]:
    """Return the codes, scales, group scales and zero points, as the kernels take them."""
    # All but the codes are not contiguous after `GPUWeight.slice_outputs`.
    parts = weight.scales, weight.group_scales, weight.zero_points
    return weight.codes, *(None if part is None else part.contiguous() for part in parts)


def format_of(weight: GPUWeight, x_scales: Tensor | None, x_group_size: int | None) -> dict[str, int]:
    """Return the constants that `multiply_row` and `multiply_rows` are compiled for."""
    return {
        "outputs": weight.num_outputs,
        "inputs": weight.num_inputs,
        "CHUNK": weight.chunk,
        "GROUPED": weight.num_groups > 1,
        "SCALE_OUTPUTS": BLOCK if weight.has_blocks else 1,
        "X_CHUNKS": _chunks_of_a_scale(x_scales, x_group_size, weight),
    }


def chunks_at_once(weight: GPUWeight) -> int:
    """Return CHUNKS of `multiply_row`."""
    return max(1, 1024 // (weight.chunk * weight.codes.itemsize))


def _chunks_of_a_scale(x_scales: Tensor | None, x_group_size: int | None, weight: GPUWeight) -> int:
    """Return the chunks that share a scale of the rows; 0 if a row has one scale."""
    if x_scales is not None and weight.group_scales is not None:
        raise ValueError("an NVFP4 weight is multiplied by rows of floats, not of codes with scales")
    if x_scales is None or x_scales.shape[1] == 1:
        return 0
    size = x_group_size or 0
    if (
        weight.num_groups == 1
        or not size
        or size % weight.chunk
        or triton.cdiv(weight.num_inputs, size) != x_scales.shape[1]
    ):
        raise ValueError(
            f"scales {list(x_scales.shape)} of groups of {size} inputs for a weight with groups of {weight.chunk}: "
            "a group of the rows' has one or several of the weight's"
        )
    return size // weight.chunk


@triton.jit
def _doubled_fp4(codes):
    """Return twice the values of FP4 codes, int8."""
    magnitudes = (codes & 7).to(tl.int8)
    doubled = tl.where(magnitudes < 4, magnitudes, tl.where(magnitudes < 6, 2 * magnitudes - 4, 4 * magnitudes - 16))
    return tl.where(codes < 8, doubled, -doubled)


@triton.jit
def _load_scales(place, mask):
    """Load scales, float32. e8m0 are halved, because values of FP4 are doubled."""
    scales = tl.load(place, mask=mask, other=0)
    if place.dtype.element_ty == tl.uint8:
        scales = tl.maximum(scales.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True) * 0.5
    return scales


@triton.jit
def _load_group_scales(place, mask):
    """Load e4m3 scales without a sign, float32, halved, because values of FP4 are doubled. As bits of a float16 they
    are 2^8 times smaller, denormal numbers included."""
    bits = tl.load(place, mask=mask, other=0).to(tl.uint16) << 7
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 128


@triton.jit
def multiply_row(
    expert,
    x,
    x_scales,
    codes,
    scales,
    group_scales,
    zero_points,
    n,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    X_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return outputs `n` of the row at `x` times an expert's weight, float32. It reads CHUNKS chunks at a time, so that
    neighbouring threads read contiguous codes."""
    inside = n < outputs
    chunks: tl.constexpr = (inputs + CHUNK - 1) // CHUNK
    PAIRED: tl.constexpr = codes.dtype.element_ty == tl.uint8
    FP4: tl.constexpr = PAIRED and (group_scales is not None or scales.dtype.element_ty == tl.uint8)
    width: tl.constexpr = CHUNK // 2 if PAIRED else CHUNK
    stride: tl.constexpr = inputs if scales is None else chunks * width  # floats are not padded
    groups: tl.constexpr = chunks if GROUPED else 1
    scales_of_group: tl.constexpr = (outputs + SCALE_OUTPUTS - 1) // SCALE_OUTPUTS
    codes += expert * outputs * stride
    if scales is not None:
        scales += expert * groups * scales_of_group
    if group_scales is not None:
        group_scales += expert * outputs * 2 * chunks
    if zero_points is not None:
        zero_points += expert * groups * outputs
    unit = tl.arange(0, width)
    wide: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([n.shape[0], CHUNKS], tl.float32)
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        known = inside[:, None] & (c < chunks)[None, :]
        k = (c * CHUNK)[:, None] + unit[None, :]
        mask = inside[:, None, None] & (k < inputs)[None, :, :] if scales is None else known[:, :, None]
        place = n.to(tl.int64)[:, None, None] * stride + (c * width)[None, :, None] + unit[None, None, :]
        tile = tl.load(codes + place, mask=mask, other=0.0)  # [outputs, CHUNKS, width]
        x_low = tl.load(x + k, mask=k < inputs, other=0.0).to(wide)[None, :, :]
        if PAIRED:
            zero = 8
            if zero_points is not None:
                place = c[None, :] * (outputs if GROUPED else 0) + n[:, None]
                zero = tl.load(zero_points + place, mask=known, other=0).to(wide)[:, :, None]
            k += CHUNK // 2
            x_high = tl.load(x + k, mask=k < inputs, other=0.0).to(wide)[None, :, :]
            if FP4:
                low, high = _doubled_fp4(tile & 15).to(wide), _doubled_fp4(tile >> 4).to(wide)
            else:
                low, high = (tile & 15).to(wide) - zero, (tile >> 4).to(wide) - zero
            if group_scales is not None:
                place = group_scales + 2 * c[None, :] * outputs + n[:, None]
                low *= _load_group_scales(place, known)[:, :, None]
                high *= _load_group_scales(place + outputs, known)[:, :, None]
            products = low * x_low + high * x_high
        else:
            products = tile.to(wide) * x_low
        part = tl.sum(products, 2).to(tl.float32)
        if GROUPED:
            place = c[None, :] * scales_of_group + (n // SCALE_OUTPUTS)[:, None]
            part *= _load_scales(scales + place, known)
            if X_CHUNKS > 0:
                part *= tl.load(x_scales + c // X_CHUNKS, mask=c < chunks, other=0.0)[None, :]
        total += part
    result = tl.sum(total, 1)
    if scales is not None and not GROUPED:
        result *= _load_scales(scales + n // SCALE_OUTPUTS, inside)
    if x_scales is not None and X_CHUNKS == 0:
        result *= tl.load(x_scales)
    return result


@triton.jit
def multiply_rows(
    expert,
    row,
    inside,
    x_scale,
    codes,
    scales,
    group_scales,
    zero_points,
    n,
    first,
    last,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    X_CHUNKS: tl.constexpr,
):
    """Return outputs `n` of the rows at the addresses `row`, masked by `inside`, over chunks `first` to `last` - 1 of
    an expert's weight: float32 [outputs, rows]. `x_scale`: addresses of the rows' scales."""
    known = n < outputs
    chunks: tl.constexpr = (inputs + CHUNK - 1) // CHUNK
    PAIRED: tl.constexpr = codes.dtype.element_ty == tl.uint8
    FP4: tl.constexpr = PAIRED and (group_scales is not None or scales.dtype.element_ty == tl.uint8)
    width: tl.constexpr = CHUNK // 2 if PAIRED else CHUNK
    stride: tl.constexpr = inputs if scales is None else chunks * width  # floats are not padded
    groups: tl.constexpr = chunks if GROUPED else 1
    scales_of_group: tl.constexpr = (outputs + SCALE_OUTPUTS - 1) // SCALE_OUTPUTS
    codes += expert * outputs * stride
    if scales is not None:
        scales += expert * groups * scales_of_group
    if group_scales is not None:
        group_scales += expert * outputs * 2 * chunks
    if zero_points is not None:
        zero_points += expert * groups * outputs
    dtype: tl.constexpr = row.dtype.element_ty
    sums: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    # Hopper accumulates float8 products with 14 bits. The sum is moved to float32 after each chunk.
    imprecise: tl.constexpr = CHUNK if dtype == tl.float8e4nv else 0
    unit = tl.arange(0, width)
    weight = codes + n.to(tl.int64)[:, None] * stride + unit[None, :]
    total = tl.zeros([n.shape[0], inside.shape[0]], tl.float32 if GROUPED else sums)
    for c in range(first, last):
        k = c * CHUNK + unit
        mask = known[:, None] & (k < inputs)[None, :] if scales is None else known[:, None]
        tile = tl.load(weight + c * width, mask=mask, other=0.0)
        x_low = tl.load(row[:, None] + k[None, :], mask=inside[:, None] & (k < inputs)[None, :], other=0.0)
        part = tl.zeros([n.shape[0], inside.shape[0]], sums) if GROUPED else total
        if PAIRED:
            low, high = (tile & 15).to(tl.int8), (tile >> 4).to(tl.int8)
            if FP4:
                low, high = _doubled_fp4(low), _doubled_fp4(high)
            elif zero_points is not None:
                zero = tl.load(zero_points + c * (outputs if GROUPED else 0) + n, mask=known, other=0)[:, None]
                low, high = low - zero, high - zero
            else:
                low, high = low - 8, high - 8
            if group_scales is not None:
                place = group_scales + 2 * c * outputs + n
                # exact in 16 bits: the product of two and four significant bits
                low = low.to(tl.float32) * _load_group_scales(place, known)[:, None]
                high = high.to(tl.float32) * _load_group_scales(place + outputs, known)[:, None]
            k += CHUNK // 2
            x_high = tl.load(row[:, None] + k[None, :], mask=inside[:, None] & (k < inputs)[None, :], other=0.0)
            part = tl.dot(low.to(dtype), tl.trans(x_low), part, input_precision="ieee", out_dtype=sums)
            part = tl.dot(high.to(dtype), tl.trans(x_high), part, input_precision="ieee", out_dtype=sums)
        else:
            part = tl.dot(
                tile.to(dtype),
                tl.trans(x_low),
                part,
                input_precision="ieee",
                out_dtype=sums,
                max_num_imprecise_acc=imprecise,
            )
        if GROUPED:
            place = c * scales_of_group + n // SCALE_OUTPUTS
            part = part.to(tl.float32) * _load_scales(scales + place, known)[:, None]
            if X_CHUNKS > 0:
                part *= tl.load(x_scale + c // X_CHUNKS, mask=inside, other=0.0)[None, :]
            total += part
        else:
            total = part
    result = total.to(tl.float32)
    if scales is not None and not GROUPED:
        result *= _load_scales(scales + n // SCALE_OUTPUTS, known)[:, None]
    if x_scale is not None and X_CHUNKS == 0:
        result *= tl.load(x_scale, mask=inside, other=0.0)[None, :]
    return result


@triton.jit
def _one_row(
    x,
    x_scales,
    codes,
    scales,
    group_scales,
    zero_points,
    output,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    X_CHUNKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    result = multiply_row(
        0,
        x,
        x_scales,
        codes,
        scales,
        group_scales,
        zero_points,
        n,
        outputs,
        inputs,
        CHUNK,
        GROUPED,
        SCALE_OUTPUTS,
        X_CHUNKS,
        CHUNKS,
    )
    tl.store(output + n, result.to(output.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["rows", "splits"])
def _rows(
    x,
    x_scales,
    codes,
    scales,
    group_scales,
    zero_points,
    output,
    rows,
    x_stride,
    x_scale_stride,
    splits,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    X_CHUNKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute OUTPUTS outputs of ROWS rows, for one split of the inputs. Programs that run at the same time share a
    weight tile."""
    row_tiles = tl.cdiv(rows, ROWS)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = m < rows
    x_scale = None
    if x_scales is not None:
        x_scale = x_scales + m * x_scale_stride
    chunks: tl.constexpr = (inputs + CHUNK - 1) // CHUNK
    chunks_per_split = tl.cdiv(chunks, splits)
    first = tl.program_id(1) * chunks_per_split
    result = multiply_rows(
        0,
        x + m.to(tl.int64) * x_stride,
        inside,
        x_scale,
        codes,
        scales,
        group_scales,
        zero_points,
        n,
        first,
        tl.minimum(first + chunks_per_split, chunks),
        outputs,
        inputs,
        CHUNK,
        GROUPED,
        SCALE_OUTPUTS,
        X_CHUNKS,
    )
    place = (tl.program_id(1) * rows.to(tl.int64) + m)[None, :] * outputs + n[:, None]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=(n < outputs)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["splits"])
def _add(parts, output, size, splits, SIZE: tl.constexpr):
    """Add parts [splits, size], float32."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=place < size, other=0.0)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=place < size)
