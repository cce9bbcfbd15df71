"""A CUDA graph can hold every family's decode step: the step does not synchronise, and padding rows change nothing."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from conf.decoding import DecodeConfig
from kernels.kv_store import kv_store, rope_and_store
from kernels.paged_attention import paged_attention
from models.batch import Batch, BatchShape
from pipelines.engine.batch import build_batch
from pipelines.engine.graph_steps import fill
from pipelines.engine.operations import Hidden
from tests.helpers.builders import engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, QUICK, link

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.unique_dim, aten.masked_select)


class NeverWaits(TorchDispatchMode):
    """Refuses operations that make a GPU's host wait: reads of values, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITS, func
        indices = args[1] if func.overloadpacket in (aten.index, aten.index_put_) else []
        assert all(index is None or index.dtype != torch.bool for index in indices), func
        return func(*args, **(kwargs or {}))


def store_own(key: Tensor, value: Tensor, keys: Any, values: Any, slots: Tensor) -> None:
    """Replaces kv_store as the GPU's kernel behaves: tokens without a slot are not stored."""
    with _disable_current_modes():
        count = int((slots >= 0).sum())
        kv_store(key[:count], value[:count], keys, values, slots[:count])


def turn_and_store_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Any,
    values: Any,
    slots: Tensor,
    *how: Any,
    **named: Any,
) -> Tensor:
    """Replaces rope_and_store in the same way; the query of a token without a slot is arbitrary."""
    with _disable_current_modes():
        count = int((slots >= 0).sum())
        true_rows = (part[:count] for part in (query, key, value, cos, sin))
        output = torch.full_like(query, torch.nan)
        output[:count] = rope_and_store(*true_rows, keys, values, slots[:count], *how, **named)
    return output


def attend_own(query: Tensor, keys: Any, values: Any, *where: Any) -> Tensor:
    """Replaces attention as the GPU's kernel behaves: tokens without a sequence get arbitrary values."""
    tables, starts, contexts, scale, soft_cap, window, slopes, prefixes, sinks, chunk = where
    with _disable_current_modes():
        count = int((starts.diff() > 0).sum())
        arguments = tables[:count], starts[: count + 1], contexts[:count], scale, soft_cap, window, slopes
        prefixes = None if prefixes is None else prefixes[:count]
        output = query.new_full((*query.shape[:2], values.channels), torch.nan)
        output[:count] = paged_attention(query[:count], keys, values, *arguments, prefixes, sinks, chunk)
    return output


OWN = {kv_store: store_own, rope_and_store: turn_and_store_own, paged_attention: attend_own}


@torch.inference_mode()
@each("family", GOLDEN_FAMILIES, quick=QUICK)
def test_a_step_of_two_sequences_in_one_of_four(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(link(family, tmp_path), allow_pickle=True)
    prompt = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    for i in range(2):
        engine.add(engine.request(i, prompt, DecodeConfig(max_new_tokens=9, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    batch = build_batch(engine.scheduler.plan(), engine.block_size)
    expected = engine.executor.run(Hidden(batch))
    num_prompt_features = engine.executor.model.num_prompt_features
    assert batch.prompt_features.shape == batch.token_ids.shape + (num_prompt_features,)
    width, num_windowed = batch.block_tables.shape[1] + 1, 4 if batch.shape.num_windowed else 0
    shape = BatchShape(4, 4, width, num_prompt_features, 4, num_windowed=num_windowed)
    padded = Batch(torch.full((shape.num_numbers,), 10**6), shape)
    fill(padded, batch)
    for module in [module for name, module in sys.modules.items() if name.startswith("models.")]:
        for function, replacement in OWN.items():
            if getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, replacement)
    with NeverWaits():
        hidden = engine.executor.run(Hidden(padded))
    assert torch.equal(hidden[:2], expected)
