"""The number of KV cache blocks of a rank, with other ranks on the same machine and on other machines."""

import pytest
import torch

from conf.errors import UserError
from kernels.kv_format import FORMATS
from models.layers.attention import Heads
from pipelines.engine.kv_cache import AUTO_SHARE, choose_num_blocks

HEADS = [Heads(4, 2, 8, 8)] * 3
BLOCK = 3 * 2 * 16 * 2 * 8 * 4  # bytes: layers, keys and values, tokens, heads, channels, float32
FREE = 1200 * BLOCK


def num_blocks(memory: str, *ranks: int) -> int:
    formats = [FORMATS["none"]] * 3
    return choose_num_blocks(HEADS, 10**6, 16, memory, FREE, formats, torch.float32, *ranks)


def test_ranks_share_bytes_with_all_and_free_memory_with_those_of_their_machine() -> None:
    """One process; four ranks on one machine; four ranks, two on each of two machines."""
    ranks = (1, 1), (4, 4), (4, 2)
    assert [num_blocks("auto", *rank) for rank in ranks] == [int(1200 * AUTO_SHARE) // local for _, local in ranks]
    assert [num_blocks("0.5", *rank) for rank in ranks] == [600, 150, 300]
    assert [num_blocks(str(800 * BLOCK), *rank) for rank in ranks] == [800, 200, 200]


def test_more_than_is_free_on_all_machines_is_refused() -> None:
    assert num_blocks(str(2400 * BLOCK), 4, 2) == 600
    with pytest.raises(UserError, match=rf"does not fit: give from {BLOCK} .* to {FREE // 2} \(all free memory\)"):
        num_blocks(str(2404 * BLOCK), 4, 2)
