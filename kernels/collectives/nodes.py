"""Collectives as graph nodes. A node does not contain its group; the program that runs the graph provides it.

T rows, p ranks, E channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kernels.collectives import Group

NAMES = ("gather", "gather_first", "owned_rows")


class Recordable:
    """A rank's side of a group. While a model is traced its collectives become nodes; otherwise they call the group."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        gathered: Tensor = torch.ops.quintet.gather(x, widths) if is_compiling() else self._group.gather(x, widths)
        return gathered

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Return the concatenated pieces on rank 0, None on other ranks. In a graph, other ranks return their own
        piece."""
        if not is_compiling():
            return self._group.gather_first(x, widths)
        gathered: Tensor = torch.ops.quintet.gather_first(x, widths, self.rank)
        return gathered

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        selected: Tensor = (
            torch.ops.quintet.owned_rows(rows, owners) if is_compiling() else self._group.owned_rows(rows, owners)
        )
        return selected

    def check(self) -> None:
        self._group.check()


def node_functions(group: Group) -> dict[str, Callable[..., Tensor]]:
    """Return the implementations of the nodes for a rank's group, by name. They raise ValueError for pieces of another
    rank."""

    def gather(x: Tensor, widths: list[int]) -> Tensor:
        _check_widths(widths)
        return group.gather(x, tuple(widths))

    def gather_first(x: Tensor, widths: list[int], rank: int) -> Tensor:
        _check_widths(widths)
        if rank != group.rank:
            raise ValueError(f"a node of rank {rank} for rank {group.rank}")
        gathered = group.gather_first(x, tuple(widths))
        return x if gathered is None else gathered

    def owned_rows(rows: Tensor, owners: Tensor) -> Tensor:
        return group.owned_rows(rows, owners)

    return dict(zip(NAMES, (gather, gather_first, owned_rows), strict=True))


def _check_widths(widths: list[int]) -> None:
    if min(widths, default=0) < 0:
        raise ValueError(f"pieces of widths {widths}")


def _gather(x: Tensor, widths: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], sum(widths))


def _gather_first(x: Tensor, widths: list[int], rank: int) -> Tensor:
    return x.new_empty(x.shape[0], widths[rank] if rank else sum(widths))


def _owned_rows(rows: Tensor, owners: Tensor) -> Tensor:
    return torch.empty_like(rows)


def _define(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Register `quintet::<name>` with torch, without an implementation, because it has no group."""
    torch.library.define(f"quintet::{name}", schema)
    torch.library.register_fake(f"quintet::{name}", fake)


_define("gather", "(Tensor x, int[] widths) -> Tensor", _gather)
_define("gather_first", "(Tensor x, int[] widths, int rank) -> Tensor", _gather_first)
_define("owned_rows", "(Tensor rows, Tensor owners) -> Tensor", _owned_rows)
