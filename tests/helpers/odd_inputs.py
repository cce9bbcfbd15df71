"""Every operator on inputs of unusual sizes and memory layouts."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import linear as products
from kernels.all_finite import all_finite
from kernels.gated_delta import gated_delta, state_shape
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gelu import gelu, gelu_tanh
from kernels.kv_format import FORMATS, PagedVectors, allocate
from kernels.kv_store import kv_store, rope_and_store
from kernels.layer_norm import layer_norm
from kernels.mask_logits import mask_logits
from kernels.moe import combine_rows, group_rows, route, route_corrected
from kernels.paged_attention import paged_attention
from kernels.quantize_rows import QuantizedActivations, quantize_rows
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope, rope_angles
from kernels.sampling import draw
from kernels.short_conv import short_conv
from kernels.sigmoid_gate import sigmoid_gate
from kernels.soft_cap import soft_cap
from kernels.ssd import ssd
from kernels.swiglu import swiglu
from kernels.take_channels import take_channels

Place = Callable[[Tensor], Tensor]
"""Copies an argument into another memory layout."""


def apart(x: Tensor) -> Tensor:
    """Return a copy with another number between any two numbers. A kernel that reads contiguous memory then computes
    something else."""
    return torch.stack((x, x.flip(0)), -1)[..., 0]


def waves(*shape: int) -> Tensor:
    return (torch.arange(math.prod(shape)) + sum(shape)).sin().view(shape)


def caches(channels: int) -> tuple[PagedVectors, PagedVectors]:
    """Return caches of two heads, with three blocks of four slots, all zeros."""
    keys, values = (
        allocate(format, (3, 4, 2), channels, torch.float32, torch.get_default_device()) for format in FORMATS["none"]
    )
    for cache in (keys, values):
        cache.tensors[0].zero_()
    return keys, values


def stored(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    keys, values = caches(channels)
    slots = torch.arange(rows).flip(0) + 2
    kv_store(at(waves(rows, 2, channels)), at(waves(rows, 2, channels)), keys, values, at(slots))
    return keys.tensors + values.tensors


def turned_and_stored(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    keys, values = caches(channels)
    slots, angles = torch.arange(rows).flip(0) + 2, waves(2, rows, channels // 2)
    vectors = (at(waves(rows, heads, channels)) for heads in (4, 2, 2))
    norms = at(waves(channels)), at(waves(channels).abs())
    query = rope_and_store(*vectors, at(angles[0]), at(angles[1]), keys, values, at(slots), False, *norms, 1e-5)
    return query, *keys.tensors, *values.tensors


def attended(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    keys, values = caches(channels)
    for cache in (keys, values):
        cache.tensors[0].copy_(waves(3, 4, 2, channels))
    tables = torch.tensor([[2, 0]] * rows).view(rows, 2)
    starts, lengths = torch.arange(rows + 1), torch.arange(rows) + 4
    return [paged_attention(at(waves(rows, 4, channels)), keys, values, at(tables), at(starts), at(lengths), 0.3)]


def float_products(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    x, starts = at(waves(rows, channels)), at(torch.tensor([0, rows // 2, rows]))
    gate, up = (products.pack(waves(20, channels) + number) for number in range(2))
    both = products.WeightGroup([gate, up])
    grouped = products.grouped_matmul(x, both, starts), products.grouped_matmul(x, both, starts, both)
    plain = (
        products.linear(x, at(waves(20, channels))),
        products.linear_per_head(at(waves(rows, 2, channels)), at(waves(2, 20, channels))),
    )
    heads = products.matmul_per_head(at(waves(rows, 2, channels)), both)
    return (
        *plain,
        heads,
        *products.matmul_together(x, [gate, up], [None, None]),
        products.matmul_swiglu(x, gate, up),
        *grouped,
    )


def coded_products(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    codes = (10 * waves(20, channels)).to(torch.int8)
    gate, up = (products.pack_codes(codes - number, waves(20, 1).abs(), None, 8) for number in range(2))
    x, starts, both = (
        at(waves(rows, channels)),
        at(torch.tensor([0, rows // 2, rows])),
        products.WeightGroup([gate, up]),
    )
    row_codes, scales = quantize_rows(x)
    outs = [row_codes, scales]
    for operand in (x, QuantizedActivations(at(row_codes), at(scales), x.dtype)):
        outs += products.matmul_together(operand, [gate, up], [None, None])
        outs.append(products.matmul_swiglu(operand, gate, up))
        outs.append(products.grouped_matmul(operand, both, starts, both))
    return outs


def drawn(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    settings = torch.tensor([[0.7, 5, 0.9, 0.1, 0.4]], dtype=torch.float64).expand(rows, 5)
    return [draw(at(waves(rows, channels)), at(settings))]


def masked(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    logits, words = at(waves(rows, channels)), torch.arange(rows * -(-channels // 32), dtype=torch.int32) * 0x5A5A5A5
    mask_logits(logits, at(words.view(rows, -(-channels // 32))))
    return [logits]


def grouped_and_combined(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    chosen = torch.stack((torch.arange(rows) % 3, torch.arange(rows) % 3 + 1), -1)
    grouped, starts, places = group_rows(at(waves(rows, channels)), at(chosen), 5)
    return grouped, starts, places, combine_rows(at(grouped), at(waves(rows, 2).abs()), at(places))


Case = Callable[[int, int, Place], Sequence[Tensor]]


def convolved(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    states, starts = torch.zeros(2, 2, channels), at(torch.tensor([0, rows]))
    weight, slots = at(waves(3, channels)), (at(torch.tensor([-1])), at(torch.tensor([1])), starts[1:])
    return short_conv(at(waves(rows, 3 * channels)), weight, at(waves(channels)), states, starts, *slots), states


def recurred(rows: int, channels: int, at: Place) -> Sequence[Tensor]:
    states, starts = torch.zeros(2, 2, *state_shape(1, 9, channels)[1:]), at(torch.tensor([0, rows]))
    slots = at(torch.tensor([-1])), at(torch.tensor([1])), starts[1:]
    inputs = (
        at(waves(rows, 18 + 2 * channels)),
        at(waves(rows, 2)),
        at(waves(rows, 2) / 2),
        at(waves(2)),
        at(waves(2) / 2),
    )
    steps, of_heads = (starts, *slots, starts[1:]), inputs[3:]
    other_states, states_of_rows = torch.zeros_like(states), torch.zeros_like(states)
    of_rows = inputs[0], at(waves(rows, 18)), inputs[2], inputs[3], at(waves(18))
    return (
        gated_delta(*inputs, states, 2, channels, *steps),
        gated_delta(*of_rows, states_of_rows, 2, channels, *steps),
        ssd(*inputs[:2], *of_heads, at(waves(2)), other_states, 2, channels, 0.1, 2.0, *steps),
        states,
        other_states,
        states_of_rows,
    )


CASES: dict[str, Case] = {
    "all_finite": lambda rows, channels, at: [all_finite(at(waves(rows, channels)))],
    "rms_norm": lambda rows, channels, at: [rms_norm(at(waves(rows, channels)), at(waves(channels)), 1e-5)],
    "add_rms_norm": lambda rows, channels, at: add_rms_norm(
        at(waves(rows, channels)), at(waves(rows, channels) / 2), at(waves(channels)), 1e-5
    ),
    "gated_rms_norm": lambda rows, channels, at: [
        gated_rms_norm(at(waves(rows, channels)), at(waves(rows, channels) / 2), at(waves(channels)), 8, 1e-5, output)
        for output in (False, True)
    ],
    "gelu": lambda rows, channels, at: [
        gelu(at(waves(rows, channels))),
        gelu_tanh(at(waves(rows, channels)), at(waves(rows, channels) / 2)),
    ],
    "layer_norm": lambda rows, channels, at: [
        layer_norm(at(waves(rows, channels)), at(waves(channels)), at(waves(channels) / 2), 1e-5)
    ],
    "short_conv": lambda rows, channels, at: convolved(rows, channels, at),
    "gated_delta and ssd": recurred,
    "soft_cap": lambda rows, channels, at: [soft_cap(at(waves(rows, channels)), 0.5)],
    "take_channels": lambda rows, channels, at: [
        take_channels(at(waves(rows, channels)), at(torch.arange(channels).flip(0)))
    ],
    "swiglu": lambda rows, channels, at: [swiglu(at(waves(rows, channels)), at(waves(rows, channels) / 2))],
    "sigmoid_gate": lambda rows, channels, at: [
        sigmoid_gate(at(waves(rows, channels)), at(waves(rows, gates) / 2)) for gates in (1, channels)
    ],
    "rope": lambda rows, channels, at: [
        rope(at(waves(rows, 3, channels)), at(waves(rows, channels // 2)), at(waves(rows, channels // 2)))
    ],
    "rope_angles": lambda rows, channels, at: rope_angles(
        at(torch.arange(rows)), at(waves(channels // 2)), 1.0, torch.float32
    ),
    "kv_store": stored,
    "rope_and_store": turned_and_stored,
    "group_rows and combine_rows": grouped_and_combined,
    "paged_attention": attended,
    "matmul": float_products,
    "matmul of codes": coded_products,
    "draw": drawn,
    "mask_logits": masked,
    "route": lambda rows, channels, at: route(at(waves(rows, channels)), 2, True),
    "route_corrected": lambda rows, channels, at: route_corrected(
        at(waves(rows, channels)), at(waves(channels)), 2, True
    ),
}
NEED_CHANNELS = {
    "paged_attention",
    "matmul",
    "matmul of codes",
    "draw",
    "route",
    "route_corrected",
}  # or there is no weight, token or expert
EMPTY = [(name, *size) for name in CASES for size in ((0, 16), (3, 0), (0, 0)) if size[1] or name not in NEED_CHANNELS]
