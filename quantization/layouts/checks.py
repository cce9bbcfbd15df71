"""Checks of the tensors that layouts read and write. All raise UserError."""

from collections.abc import Mapping

import torch
from torch import Tensor

from conf.errors import UserError


def of_type(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if tensors[name].dtype != dtype:
        raise UserError(f"{name} is {tensors[name].dtype}, expected {dtype}")
    return tensors[name]


def positive(scales: Tensor, name: str) -> Tensor:
    """Return scales of any float dtype as float32, all of them finite and above 0."""
    values = scales.float()
    if not (values.isfinite() & (values > 0)).all():
        raise UserError(f"{name} has values that are not finite numbers above 0: the file is damaged, quantise again")
    return values


def scalar_shape(found: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Return the shape of a scalar in the file: some tools write [], some [1]."""
    return () if found.get(name) == () else (1,)


def channel_order(group_index: Tensor, group_size: int | None, name: str) -> Tensor | None:
    """Return the input channels [I] int64 sorted by group, or None where they are sorted. group_index: the group of each channel [I]."""
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
