"""Gather a sharded tensor on rank 0 of a stage, and scatter it back."""

import torch
from torch import Tensor

from kernels.collectives import Group
from models.formats.sliced import slice_shard
from models.sharding import Shard


def gather_on_first(part: Tensor, shard: Shard | None, group: Group) -> Tensor:
    """Return the whole tensor on rank 0; all other ranks return their part. Every rank of the group calls it.

    `shard`: this rank's shard, or None for a replicated tensor. If several ranks hold an index, as for a
    replicated key head, the last of these ranks provides its values.
    """
    if shard is None or group.size == 1:
        return part
    ones = (1,) * group.size
    indices = torch.cat([torch.arange(r.start, r.stop, device=part.device) for r in shard.ranges])  # [O]
    counts = group.gather(indices.new_full((1, 1), len(indices)), ones)[0].tolist()
    places = group.gather(_padded(indices[:, None], max(counts)), ones)  # [most, p]
    transposed = part.movedim(shard.axis, 0)
    rows = transposed.reshape(len(indices), -1)  # [O, the other axes]
    width = rows.shape[1]
    gathered = group.gather_first(_padded(rows, max(counts)), (width,) * group.size)  # [most, p * width]
    if gathered is None:
        return part
    joined = rows.new_empty(int(places.max()) + 1, width)
    for rank, count in enumerate(counts):
        joined[places[:count, rank]] = gathered[:count, rank * width : (rank + 1) * width]
    return joined.view(-1, *transposed.shape[1:]).movedim(0, shard.axis).contiguous()


def scatter_from_first(full_matrix: Tensor, part: Tensor, shard: Shard | None, group: Group) -> Tensor:
    """Return this rank's part of a matrix that rank 0 holds whole. Every rank of the group calls it.

    full_matrix: the matrix on rank 0. On other ranks only its shape is read.
    part: any tensor of the rank's current part; it defines the dtype and device.
    shard: as in `gather_on_first`.
    """
    rows, columns = full_matrix.shape
    piece = full_matrix if group.rank == 0 else part.new_empty(rows, 0)
    matrix = group.gather(piece, (columns, *(0,) * (group.size - 1)))
    return (
        matrix if shard is None else slice_shard(matrix, shard).clone()
    )  # a copy, so that the whole matrix can be freed


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), rows.shape[1])])
