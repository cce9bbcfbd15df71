"""Soft prefixes of families with their own way of counting positions or distances, compared with formulas in
float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.decoding import DecodeConfig
from tests.helpers.builders import all_logits
from tests.helpers.cases import each
from tests.helpers.oracle import random_prompts
from tests.helpers.soft_prefixes import engine_with
from tests.helpers.written_models import GMASK, HEAD_DIM, HEADS, LAYERS, NO_PREFIX, SOP, WRITTEN, qwen, write_written

LENGTHS = (1, 5, 17)  # of prefixes: within a block, and more than a block of 4
GREEDY = DecodeConfig(max_new_tokens=10, ignore_eos=True)
# float32 compared with float64: the logits are of order 1 to 10, and two float32 builds differ by up to 3e-5
TOLERANCE = 1e-4


def prompts_of(family: str) -> list[list[int]]:
    """Return prompts of several lengths: Qwen's base would grow from 17 tokens on, and again from 33 on."""
    prompts = random_prompts(96, (3, 1, 40, 17))
    return [[*prompt, GMASK, SOP] for prompt in prompts] if family == "chatglm" else prompts


def write_prefixes(folder: Path) -> dict[str, Tensor]:
    """Write a pre_caches.npy of each length. Returns values [L, 2, H, P, D] in float64 by file."""
    generator, prefixes = torch.Generator().manual_seed(3), {}
    for length in LENGTHS:
        values = torch.randn(LAYERS, 2, HEADS, length, HEAD_DIM, generator=generator)
        np.save(folder / f"{length}.npy", values.numpy())
        prefixes[f"{length}.npy"] = values.double()
    return prefixes


@each("family", WRITTEN)
def test_families_equal_their_formulas(family: str, tmp_path: Path) -> None:
    """Logits of prompts of any length; then rows of one batch, each with a prefix of its own or none, whole and in
    chunks."""
    weights, prefixes, written = write_written(tmp_path, family), write_prefixes(tmp_path), WRITTEN[family]
    prompts, paths = prompts_of(family), {name: tmp_path / name for name in prefixes}
    engine = engine_with(tmp_path, paths)
    for prompt in prompts:
        actual = [all_logits(engine, prompt, name).double() for name in prefixes]
        for logits, values in zip(actual, prefixes.values(), strict=True):
            torch.testing.assert_close(logits, written(weights, prompt, values), atol=TOLERANCE, rtol=0)
        assert (actual[0] - actual[1]).abs().max() > 100 * TOLERANCE  # the prefix matters
    rows = [(prompt, name) for prompt in prompts for name in (*prefixes, None)]
    expected: list[list[int]] | None = None
    chunks: dict[str, Any] = {"max_batched_tokens": 60 if family == "chatglm" else 5}
    for each_engine in (engine, engine_with(tmp_path, paths, block_size=4, batch_size=5, **chunks)):
        requests = [each_engine.request(i, prompt, GREEDY, prefix=name) for i, (prompt, name) in enumerate(rows)]
        outputs = {output.request_id: output for output in each_engine.generate(requests)}
        tokens = [outputs[i].completions[0].token_ids for i in range(len(rows))]
        expected = expected or tokens
        assert tokens == expected
    for (prompt, name), answer in zip(rows, expected or [], strict=True):
        if name is not None:
            logits = written(weights, [*prompt, *answer], prefixes[name])[len(prompt) - 1 : -1]
            assert logits.argmax(1).tolist() == answer


def test_qwen_behind_a_prefix_of_peft(tmp_path: Path) -> None:
    """Positions begin at P; the base does not grow, and the scale of late queries counts the virtual tokens."""
    weights, prefixes = write_written(tmp_path, "qwen"), write_prefixes(tmp_path)
    values, folder = prefixes["17.npy"], tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 17}))
    flat = values.permute(3, 0, 1, 2, 4).reshape(17, -1).float()  # [P, L * 2 * G * D]
    save_file({"prompt_embeddings": flat.contiguous()}, folder / "adapter_model.safetensors")
    engine = engine_with(tmp_path, {"p": folder})
    for prompt in prompts_of("qwen"):
        expected = qwen(weights, prompt, values, first=17)
        torch.testing.assert_close(all_logits(engine, prompt, "p").double(), expected, atol=TOLERANCE, rtol=0)
    without = qwen(weights, prompt, NO_PREFIX, len(prompt))
    torch.testing.assert_close(all_logits(engine, prompt).double(), without, atol=TOLERANCE, rtol=0)
