"""Copies of blocks: exactly the targets change, and a block that is both source and target is read before it is
written."""

import torch

from kernels.copy_blocks import copy_blocks
from kernels.kv_format import PagedVectors, Unquantised


def test_targets_become_what_sources_were() -> None:
    keys, values = torch.randn(7, 3, 2, 5), torch.randn(7, 3, 2, 5)
    before_keys, before_values = keys.clone(), values.clone()
    caches = [PagedVectors((cache,), Unquantised(), 5, torch.float32) for cache in (keys, values)]
    copy_blocks(*caches, torch.tensor([4, 1, 1]), torch.tensor([0, 4, 6]))
    source_of = [4, 1, 2, 3, 1, 5, 1]
    assert keys.equal(before_keys[source_of])
    assert values.equal(before_values[source_of])
