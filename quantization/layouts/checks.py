"""Checks of the tensors that layouts read and write. All checks raise UserError."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader

# Keys about AutoRound's tuning and version, without effect here (`SerializedCompressorConfig` of
# auto_round/compressors/base.py).
TUNING = """
    amp autoround_version batch_size dataset enable_alg_ext enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    gradient_accumulate_steps iters low_cpu_mem_usage low_gpu_mem_usage lr minmax_lr not_use_best_mse nsamples provider quant_block_list
    scale_dtype seqlen supported_types to_quant_block_names train_bs act_data_type act_dynamic act_group_size act_sym
    static_attention_granularity static_kv_granularity packing_format model_free
""".split()
# AutoRound's keys that can change the meaning of a weight, with the values that do not change it.
MEANINGS: dict[str, tuple[Any, ...]] = {
    "act_bits": (None, 16, 32),
    "data_type": (None, "int", "int_sym", "int_asym"),
    "super_bits": (None,),
    "super_group_size": (None,),
    "rotation_configs": (None, []),
    "static_attention_dtype": (None,),
    "static_kv_dtype": (None,),
}


def check_autoround(config: ConfigReader) -> None:
    """Read the keys that AutoRound adds to the `quantization_config` of GPTQ and AWQ.

    Raises UserError if a key changes the weights.
    """
    for key in TUNING:
        config.raw(key)
    for key, values in MEANINGS.items():
        config.expect(key, values, None)


def of_type(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if tensors[name].dtype != dtype:
        raise UserError(f"{name} is {tensors[name].dtype}, expected {dtype}")
    return tensors[name]


def finite(scales: Tensor, name: str) -> Tensor:
    """Return weight scales as float32.

    Negative scales are valid (AutoRound writes them), and so is 0 (some tools write it for a group of zeros).
    """
    values = scales.float()
    if not values.isfinite().all():
        raise UserError(f"{name} has values that are not finite: the file is damaged, quantise again")
    return values


def positive(scales: Tensor, name: str) -> Tensor:
    """Return activation scales as float32. Activations are divided by them, so they must be positive."""
    values = scales.float()
    if not (values.isfinite() & (values > 0)).all():
        raise UserError(f"{name} has values that are not finite numbers above 0: the file is damaged, quantise again")
    return values


def scalar_shape(tensor_shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Return the shape of a scalar in the file: some tools write [], some [1]."""
    return () if tensor_shapes.get(name) == () else (1,)


def channel_order(group_index: Tensor, group_size: int | None, name: str) -> Tensor | None:
    """Return the input channels [I] int64 sorted by group, or None if they are sorted already.

    group_index: the group of each input channel [I].
    """
    groups = group_index.long()
    order = groups.argsort(stable=True)
    size = group_size or len(order)
    if not groups[order].equal(torch.arange(len(order)) // size):
        raise UserError(f"{name} does not put the {len(order)} input channels into groups of {size}")
    return None if groups.equal(groups[order]) else order


def divided(shape: tuple[int, int], group_size: int | None) -> int:
    """Return the number of groups of input channels of a weight of shape [O, I]."""
    size = group_size or shape[1]
    if shape[1] % size:
        raise UserError(
            f"groups of {size} do not divide the {shape[1]} input channels of a weight {list(shape)}, which is not supported"
        )
    return shape[1] // size


def as_float16(scales: Tensor) -> Tensor:
    if not scales.half().float().equal(scales):
        raise UserError(
            "this layout holds scales in float16, but these were chosen in float32: quantise for this layout"
        )
    return scales.half()
