"""The changes that llama.cpp's converter makes to parameters: the inverse of reader.py's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.families.falcon_h1_config import FalconH1Config
from models.families.kimi_linear import KimiLinearConfig
from models.families.qwen3_next_config import HybridConfig
from models.formats.gguf.names import TensorLayout
from models.formats.gguf.orders import ROTARY_PAIRS, value_column_orders, value_row_orders
from models.formats.rotary_rows import interleave_rows
from models.layers.gated_delta import DeltaHeads
from models.layers.mamba2 import Mamba2Config

Change = Callable[[Tensor], Tensor]


def converter_change(name: str, architecture: str, layout: TensorLayout, shape: Any, part: int = 0) -> Change | None:
    """Return llama.cpp's change of a parameter, or None.

    `part`: the number of the tensor, if the file has several for the parameter.
    """
    *_, module, leaf = name.split(".")
    if architecture in ROTARY_PAIRS and module in ("q_proj", "k_proj"):
        heads = shape.num_attention_heads if module == "q_proj" else shape.num_key_value_heads
        return partial(interleave_rows, heads=heads)
    if architecture == "bloom" and module == "query_key_value":
        return partial(group_by_part, heads=shape.num_attention_heads)
    if layout.norm_offset and module.endswith("norm") and not name.endswith(layout.plain_norms):
        return lambda tensor: tensor.float() + layout.norm_offset
    if isinstance(shape, HybridConfig):
        if module == "in_proj_qkvz":
            return partial(split_by_key_head, heads=shape.heads, part=part)
        if architecture != "qwen3next":
            return _delta_change(module, leaf, shape.heads)
        if leaf == "A_log":
            return lambda tensor: -tensor.float().exp()
    elif isinstance(shape, KimiLinearConfig):
        return _kimi_change(module, leaf, shape, layout, part)
    elif isinstance(shape, FalconH1Config) and (factors := _falcon_factors(module, shape)):
        return partial(_scaled, factors=factors)
    elif len(layout.llama_cpp_names(name)) > 1:
        return lambda tensor: tensor.chunk(2)[part]
    if leaf == "weight" and module in layout.depthwise:
        return lambda tensor: tensor.squeeze(1)
    if name.endswith(layout.flat):
        return partial(_state_matrix, leaf=leaf, mamba=shape.mamba)
    return Tensor.t if leaf == "weight" and module in layout.transposed else None


def _delta_change(module: str, leaf: str, heads: DeltaHeads) -> Change | None:
    """Return llama.cpp's change of a parameter of Qwen3.5's Gated DeltaNet, or None."""
    rows = value_row_orders(heads.num_key_heads, heads.group, 2 * heads.key_size).get(module)
    columns = value_column_orders(heads.num_key_heads, heads.group).get(module)
    if columns is not None:
        return lambda tensor: columns.restore(tensor.T).T.contiguous()
    if rows is None:
        return None
    if leaf == "A_log":
        return lambda tensor: -rows.restore(tensor).float().exp()
    return lambda tensor: rows.restore(tensor.squeeze(1) if module == "conv1d" else tensor)


def _kimi_change(module: str, leaf: str, shape: KimiLinearConfig, layout: TensorLayout, part: int) -> Change | None:
    """Return llama.cpp's change of a parameter of Kimi Linear, or None."""
    if module == "kv_b_proj":
        sizes = shape.qk_nope_head_dim, shape.v_head_dim
        return partial(split_keys_and_values, heads=shape.num_attention_heads, sizes=sizes, part=part)
    if leaf == "A_log":
        return lambda tensor: -tensor.float().exp()
    return (lambda tensor: tensor.transpose(0, 1)[None]) if module in layout.depthwise else None


def split_keys_and_values(tensor: Tensor, heads: int, sizes: tuple[int, int], part: int) -> Tensor:
    """Return [H, L, N] for keys (part 0) or [H, D, L] for values (part 1) of kv_b_proj [H * (N + D), L]."""
    half: Tensor = tensor.unflatten(0, (heads, -1)).split(sizes, dim=1)[part]
    return half if part else half.transpose(1, 2).contiguous()


def _falcon_factors(module: str, shape: FalconH1Config) -> tuple[float | Tensor, ...]:
    """Return the factors that the file's weight contains, in the order of the products; empty for other parameters."""
    c, heads = shape.multipliers, shape.mamba.heads
    if module == "in_proj":
        sizes = torch.tensor((heads.size, heads.size, heads.group_size, heads.group_size, heads.num_heads))
        return c.mamba_input, torch.tensor(c.mamba_sections).repeat_interleave(sizes)[:, None]
    return {
        "embed_tokens": (c.embedding,),
        "lm_head": (c.logits,),
        "q_proj": (c.attention_input,),
        "k_proj": (c.key, c.attention_input),
        "v_proj": (c.attention_input,),
        "o_proj": (c.attention_output,),
        "out_proj": (c.mamba_output,),
        "gate_proj": (c.mlp_gate,),
        "down_proj": (c.mlp_output,),
    }.get(module, ())


def _scaled(tensor: Tensor, factors: Sequence[float | Tensor]) -> Tensor:
    if tensor.is_meta:
        return tensor
    for factor in factors:
        tensor = tensor.float() * factor
    return tensor


def _state_matrix(tensor: Tensor, leaf: str, mamba: Mamba2Config) -> Tensor:
    """Return a vector of a Mamba-2 layer as llama.cpp's matrix: a row for each head, or of the norm for each group."""
    if leaf == "A_log":
        tensor = -tensor.float().exp()
    return tensor.view(mamba.heads.num_groups if leaf == "weight" else mamba.heads.num_heads, -1)


def split_by_key_head(tensor: Tensor, heads: DeltaHeads, part: int) -> Tensor:
    """Return the rows of all queries, keys and values (part 0), or of all output gates (part 1).

    `tensor`: Qwen3-Next's in_proj_qkvz, which has q, k, v and gate of one key head after the other.
    """
    values = heads.group * heads.value_channels
    widths = (heads.key_channels, heads.key_channels, values, values)
    *qkv, gate = tensor.unflatten(0, (heads.num_key_heads, -1)).split(widths, dim=1)
    return torch.cat([rows.flatten(0, 1) for rows in (qkv, [gate])[part]])


def group_by_part(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows with all queries first, then keys, then values.

    `tensor`: [heads * 3 * D, ...] grouped by head.
    """
    ordered: Tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return ordered
