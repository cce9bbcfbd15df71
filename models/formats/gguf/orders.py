"""Restore Hugging Face's order of the heads in tensors that llama.cpp's converter permuted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from models.config import ConfigReader
from models.formats.rotary_rows import deinterleave_rows


@dataclass(frozen=True)
class RowOrder:
    """How to restore the row order of a tensor."""

    permute: Callable[[Tensor], Tensor]
    multiple: int
    """The number of permuted rows must be a multiple of this."""
    first: int = 0
    """The first permuted row."""

    def fits(self, num_rows: int) -> bool:
        return num_rows >= self.first and (num_rows - self.first) % self.multiple == 0

    def restore(self, tensor: Tensor) -> Tensor:
        return torch.cat((tensor[: self.first], self.permute(tensor[self.first :])))


ROTARY_PAIRS = (
    *("llama", "mistral3", "arcee", "smollm3", "olmo"),
    *("granite", "granitehybrid", "nemotron_h", "nemotron_h_moe"),
)
"""The architectures in whose q and k the channels of a rotary pair are adjacent."""
FUSED = ("bloom", "gptneox", "falcon", "internlm2", "baichuan")
"""The architectures whose converter reorders the rows of a fused projection of queries, keys and values."""


def row_orders(config: ConfigReader, architecture: str) -> dict[str, RowOrder]:
    """Return the orders of permuted parameters, by the last component of the module name.

    `config`: from read_gguf_config.
    """
    if architecture in FUSED:
        return _fused_orders(config, architecture)
    if architecture in ROTARY_PAIRS:
        counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        return {
            name: RowOrder(partial(deinterleave_rows, heads=config.count(key)), 2 * config.count(key))
            for name, key in counts.items()
        }
    numbers = _value_heads(config, architecture)
    return {} if numbers is None else value_row_orders(*numbers)


def _fused_orders(config: ConfigReader, architecture: str) -> dict[str, RowOrder]:
    """Return the order of the architecture's fused projection, as `row_orders` does."""
    heads = config.count("n_head" if architecture == "bloom" else "num_attention_heads")
    key_heads = {"falcon": "num_kv_heads", "internlm2": "num_key_value_heads"}.get(architecture)
    groups = heads if key_heads is None else config.count(key_heads)
    num_heads = heads + 2 * groups
    if architecture == "internlm2":
        return {"wqkv": RowOrder(partial(deinterleave_and_group, heads=heads, groups=groups), 2 * num_heads)}
    if architecture == "baichuan":
        return {"W_pack": RowOrder(partial(deinterleave_fused, heads=heads, groups=groups), 2 * num_heads)}
    return {"query_key_value": RowOrder(partial(group_fused, heads=heads, groups=groups), num_heads)}


def column_orders(config: ConfigReader, architecture: str) -> dict[str, RowOrder]:
    """Return the orders of the columns of permuted weights, as `row_orders` does."""
    return {} if (heads := _value_heads(config, architecture)) is None else value_column_orders(*heads[:2])


def _value_heads(config: ConfigReader, architecture: str) -> tuple[int, int, int] | None:
    """Return the arguments of `value_row_orders` for a file. None: its architecture permutes no value heads."""
    if architecture not in ("qwen35", "qwen35moe"):
        return None
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    return None if values % keys else (values // keys, keys, 2 * keys * config.count("linear_key_head_dim"))


def value_row_orders(group: int, num_keys: int, first_value: int) -> dict[str, RowOrder]:
    """Return the orders of Qwen3.5's rows of value heads, as `row_orders` does.

    Hugging Face groups value heads by key head. llama.cpp has head 0 of each key head, then head 1 of each, and so on.
    `group`: value heads per key head. `first_value`: the first row of values after queries and keys. With `group` and
    `num_keys` exchanged, the orders are llama.cpp's of Hugging Face's tensors.
    """
    order, values = _value_order(group, num_keys), ("in_proj_z", "in_proj_a", "in_proj_b", "linear_attn")
    after_keys = replace(order, first=first_value)
    # linear_attn has A_log and dt_bias
    return dict.fromkeys(values, order) | dict.fromkeys(("in_proj_qkv", "conv1d"), after_keys)


def value_column_orders(group: int, num_keys: int) -> dict[str, RowOrder]:
    """Return the orders of Qwen3.5's columns of value heads, as `value_row_orders` does."""
    return {"out_proj": _value_order(group, num_keys)}


def _value_order(group: int, num_keys: int) -> RowOrder:
    return RowOrder(partial(group_by_key, group=group, num_keys=num_keys), group * num_keys)


def group_fused(tensor: Tensor, heads: int, groups: int) -> Tensor:
    """Return the rows grouped by key head: its queries, key and value.

    `tensor`: [(heads + 2 * groups) * D, ...] with all queries first, then all keys.
    """
    by_head = tensor.unflatten(0, (heads + 2 * groups, -1))
    queries, keys = by_head[:heads].unflatten(0, (groups, -1)), by_head[heads:].unflatten(0, (2, groups))
    ordered: Tensor = torch.cat((queries, keys.transpose(0, 1)), dim=1).flatten(0, 2)
    return ordered


def deinterleave_fused(tensor: Tensor, heads: int, groups: int) -> Tensor:
    """Return the rows of `group_fused`'s tensor with the rotary pairs of queries and keys half a head apart."""
    num_turning = tensor.shape[0] // (heads + 2 * groups) * (heads + groups)
    return torch.cat((deinterleave_rows(tensor[:num_turning], heads + groups), tensor[num_turning:]))


def deinterleave_and_group(tensor: Tensor, heads: int, groups: int) -> Tensor:
    return group_fused(deinterleave_fused(tensor, heads, groups), heads, groups)


def group_by_key(tensor: Tensor, group: int, num_keys: int) -> Tensor:
    """Return the rows grouped by key head. `tensor`: [group * num_keys * D, ...] with head 0 of each key head first."""
    ordered: Tensor = tensor.unflatten(0, (group, num_keys, -1)).transpose(0, 1).flatten(0, 2)
    return ordered
