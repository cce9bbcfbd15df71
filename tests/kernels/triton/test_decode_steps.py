"""Padded decode steps of a whole model over the GPU's kernels, in which rows that pad must be stored nowhere and disturb nobody."""

from pathlib import Path

import pytest
import torch

import kernels.kv_store.triton
import kernels.paged_attention.triton
import kernels.rms_norm.triton
import models.decoder
import models.layers.attention
import models.layers.norm
from conf.decoding import DecodeConfig
from pipelines.engine.padded_decode import PaddedDecodeSteps
from tests.builders import complete, engine_of, write_llama
from tests.kernels.triton.cases import DEVICE
from tests.pipelines.engine.test_padded_decode import AgainPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_engine.py has true graphs")


def test_an_engine_gives_the_cpus_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    prompts, decode = [[3, 4, 5], [6], [7, 8]], DecodeConfig(max_new_tokens=4, prefix_cache=False)
    expected = [c.token_ids for c in complete(engine_of(tmp_path, block_size=4), prompts, decode)]
    engine = engine_of(tmp_path, block_size=4)
    for module, kernel in (
        (models.layers.attention, kernels.paged_attention.triton.paged_attention),
        (models.layers.norm, kernels.rms_norm.triton.rms_norm),
        (models.layers.norm, kernels.rms_norm.triton.add_rms_norm),
        (models.decoder, kernels.kv_store.triton.rope_and_store),
    ):
        monkeypatch.setattr(module, kernel.__name__, kernel)
    steps = PaddedDecodeSteps(engine.runner._forward, AgainPool(), 4, 3, 0, torch.device("cpu"))
    engine.runner._decode_steps = steps
    assert [c.token_ids for c in complete(engine, prompts, decode)] == expected
    assert sorted(steps._graphs) == [1, 2, 4]
