"""The numbers of KV cache blocks and state slots, with other ranks on the same machine and on other machines."""

import pytest
import torch

from conf.errors import UserError
from kernels.kv_format import FORMATS
from models.causal_lm import CacheContent
from models.layers.attention import Heads
from pipelines.engine.kv_cache import AUTO_SHARE, CacheRoom, allocate_kv_cache, cache_room, choose_sizes

LAYERS = [CacheContent(Heads(4, 2, 8, 8))] * 3
BLOCK = 3 * 2 * 16 * 2 * 8 * 4  # bytes: layers, keys and values, tokens, heads, channels, float32
FREE = 1200 * BLOCK


def num_blocks(memory: str, *ranks: int) -> int:
    formats, meta = [FORMATS["none"]] * 3, torch.device("meta")
    one = allocate_kv_cache(LAYERS, 1, 16, formats, torch.float32, meta, num_state_slots=1)
    number, num_slots = choose_sizes([cache_room(one, memory, FREE, *ranks)], 16, 10**6, 32, memory)
    assert num_slots == 0
    return number


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


def test_slots_of_sequences_come_first_then_snapshots_then_blocks() -> None:
    """Two stages, of which one has no recurrent layer; a stage without attention; an automatic cache of few tokens."""
    with_states, without = CacheRoom(10**6, 100, 10_000), CacheRoom(10**6, 200, 0)
    # 8 slots; of the remaining 920,000 bytes 25,600 + 10,000 per snapshot are 25 snapshots
    assert choose_sizes([with_states], 16, 10**9, 8, "1MB") == ((10**6 - 33 * 10_000) // 1600, 33)
    assert choose_sizes([with_states, without], 16, 10**9, 8, "1MB") == (10**6 // 3200, 33)
    assert choose_sizes([CacheRoom(10**6, 0, 10_000), without], 16, 10**9, 8, "1MB") == (10**6 // 3200, 8 + 30)
    only_states = CacheRoom(10**6, 0, 10_000)  # as in Mamba-2
    assert choose_sizes([only_states], 16, 10**9, 8, "1MB") == (2**18, 100)
    assert choose_sizes([only_states], 16, 30, 8, "auto") == (30, 8 + 1)
    assert choose_sizes([with_states], 16, 10**9, 64, "1MB")[1] == 50 + 14  # half of the memory, then as above
    assert choose_sizes([CacheRoom(1_200_000, 12_288, 81_920)], 64, 10**9, 32, "1.2MB") == (1, 5)
    assert choose_sizes([with_states], 16, 48, 8, "auto") == (48, 8 + 48 * 16 // 256)
