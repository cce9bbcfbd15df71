"""Ernie 3.5 SE compared with its formulas in float64, from checkpoints in PaddleNLP's layout."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from models.config import ConfigReader
from models.families.ernie3_5 import read_config
from models.formats import open_checkpoint
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import greedy
from tests.helpers.conversion import convert
from tests.helpers.divided import assert_same_bits, divided_steps, stage_steps, whole_steps
from tests.helpers.ernie3_5 import CONFIG, FUSED, HEADS, HIDDEN, LAYERS, OUT, WIDE, make_arrays, write
from tests.helpers.huggingface_files import load
from tests.helpers.paddle_files import Arrays, rank_of, save_pdparams

VARIANTS: list[dict[str, Any]] = [
    {},
    {"parallel_attn_hatf": False},
    {"enable_random_position_ids": False},
    {"use_bias": False},
    {"weight_share_add_bias": False},
]
SECTIONS = {"qkv_gate_up_proj": (3 * HIDDEN, WIDE, WIDE), "o_proj": (WIDE, HIDDEN)}
PROMPT = [7, 0, 60, 3, 3, 19, 44, 5, 11]
TOLERANCE = 1e-4  # float32 compared with float64; the logits are of order 1 to 10


Weights = dict[str, Tensor]


def norm(w: Weights, x: Tensor, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / (variance + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w: Weights, x: Tensor, name: str) -> Tensor:
    return x @ w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [T, D] rotated."""
    half = positions[:, None] * 10000.0 ** (-torch.arange(0, x.shape[1], 2).double() / x.shape[1])
    angles = torch.cat([half, half], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Return attention [T, H, D] of inputs with the same shape."""
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    heads = []
    for head in range(HEADS):
        scores = turned(q[:, head], positions) @ turned(k[:, head], positions).T / math.sqrt(q.shape[-1])
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, head])
    return torch.cat(heads, -1)


def expected_logits(config: dict[str, Any], arrays: Arrays, prompt: list[int]) -> Tensor:
    """Return logits [T, V] of Ernie35ForCausalLM in float64, layer by layer."""
    w = {name.removeprefix("ernie."): torch.from_numpy(array).double() for name, array in arrays.items()}
    shape = len(prompt), HEADS, -1
    positions = torch.arange(len(prompt)).double()
    if config["enable_random_position_ids"]:
        positions = 8 * positions + 7
    x = w["embed_tokens.weight"][prompt]
    for i in range(LAYERS):
        layer = f"layers.{i}"
        if f"{layer}.{FUSED}.weight" in w:
            fused = linear(w, norm(w, x, f"{layer}.input_layernorm"), f"{layer}.{FUSED}")
            mixed, up, gate = fused.split((3 * HIDDEN, WIDE, WIDE), -1)
            attended = attention(*mixed.reshape(shape).chunk(3, -1), positions)
            x = x + linear(w, torch.cat([silu(up) * gate, attended], -1), f"{layer}.{OUT}")
        elif i == 0:
            normed = norm(w, x, f"{layer}.input_layernorm")
            q, k, v = (linear(w, normed, f"{layer}.self_attn.{name}_proj").reshape(shape) for name in "qkv")
            x = x + linear(w, attention(q, k, v, positions), f"{layer}.self_attn.o_proj")
        else:
            normed = norm(w, x, f"{layer}.post_attention_layernorm")
            gated = silu(linear(w, normed, f"{layer}.mlp.gate_proj")) * linear(w, normed, f"{layer}.mlp.up_proj")
            x = x + linear(w, gated, f"{layer}.mlp.down_proj")
    return linear(w, norm(w, x, "norm"), "lm_head")


def assert_formulas(folder: Path, config: dict[str, Any], arrays: Arrays) -> None:
    """Compare logits at every position, and greedy tokens, also of a prompt in chunks."""
    expected = expected_logits(config, arrays, PROMPT)
    assert 1 < expected.abs().max() < 100
    torch.testing.assert_close(
        all_logits(engine_of(folder, allow_pickle=True), PROMPT).double(), expected, atol=TOLERANCE, rtol=0
    )
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(int(expected_logits(config, arrays, tokens)[-1].argmax()))
    for settings in ({}, {"max_batched_tokens": 5, "block_size": 4}):
        engine = engine_of(folder, allow_pickle=True, **settings)
        assert greedy(engine, [PROMPT, PROMPT[:3]], 12)[0] == tokens[len(PROMPT) :]


@each("changes", VARIANTS)
def test_formulas(changes: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIG | changes
    arrays = make_arrays(config)
    write(tmp_path, arrays, config)
    assert_formulas(tmp_path, config, arrays)


@each("is_hatf", [True, False])
def test_ranks(is_hatf: bool, tmp_path: Path) -> None:
    config = CONFIG | {"parallel_attn_hatf": is_hatf}
    arrays = make_arrays(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(2):
        part = rank_of({name: array for name, array in arrays.items() if OUT not in name}, rank, 2, SECTIONS)
        for name in (name for name in arrays if OUT in name):
            pieces = np.split(arrays[name], [WIDE])
            part[name] = (
                np.concatenate([np.split(piece, 2)[rank] for piece in pieces])
                if arrays[name].ndim == 2
                else arrays[name]
            )
        save_pdparams(tmp_path / f"model_state.tp{rank:02}.pdparams", part)
    assert_formulas(tmp_path, config, arrays)


def test_the_context(tmp_path: Path) -> None:
    """Positions are 8 apart up to 4,096 tokens; in longer texts they would depend on the length."""
    write(tmp_path, make_arrays(CONFIG), CONFIG)
    values = open_checkpoint(tmp_path, False).config.values
    for length, random, expected in ((1024, True, 128), (32768, True, 4096), (65536, True, 4096), (1024, False, 1024)):
        changed = values | {"max_position_embeddings": length, "enable_random_position_ids": random}
        reader = ConfigReader(changed, "config.json")
        assert read_config(reader).context_length == expected
        assert reader.unread() == []


def test_missing_keys_have_the_defaults_of_its_code() -> None:
    defaults: dict[str, Any] = {
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-6,
        "use_bias": False,
        "weight_share_add_bias": True,
        "parallel_attn_hatf": True,
        "enable_random_position_ids": False,
    }
    values = {key: value for key, value in CONFIG.items() if key not in defaults}
    left_out, said = ConfigReader(values, "config.json"), ConfigReader(values | defaults, "config.json")
    assert read_config(left_out) == read_config(said)


@each(
    "changes, message",
    [
        ({"architectures": ["ErnieForMaskedLM"]}, r"architectures=\['ErnieForMaskedLM'\] is not supported"),
        ({"weight_share": True}, "weight_share=True is not supported: only False, None"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=1 with parallel_attn_hatf: expected a first and a last one"),
        ({"hidden_size": 26, "num_attention_heads": 2}, "hidden_size / num_attention_heads=13 is odd"),
        ({"num_attention_heads": 5}, "hidden_size=24 is not a multiple of num_attention_heads=5"),
        ({"intermediate_size": 44}, "has 64 inputs, which cannot be divided into mlp.down_proj, self_attn.o_proj"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, make_arrays(CONFIG), CONFIG | changes)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


@each("is_hatf", [True, False])
def test_a_converted_folder_divided(is_hatf: bool, tmp_path: Path) -> None:
    """task=convert keeps every number, and ranks and stages have the bits of one process."""
    (tmp_path / "paddle").mkdir()
    config = CONFIG | {"parallel_attn_hatf": is_hatf}
    write(tmp_path / "paddle", make_arrays(config), config)
    folder = convert(tmp_path / "paddle", tmp_path / "made")
    logits = all_logits(engine_of(folder), PROMPT)
    assert logits.equal(all_logits(engine_of(tmp_path / "paddle"), PROMPT))
    run = run_config(folder)
    expected = whole_steps(run, [PROMPT])
    assert_same_bits(expected, divided_steps(run, 2, [PROMPT]))
    assert_same_bits(expected, stage_steps(run, 1, 3, [PROMPT]))


@each("kv_cache", ["none", "int8", "fp8"])
def test_quantised(kv_cache: str, tmp_path: Path) -> None:
    """Rounded int8 weights, and a quantised cache, give results near the float model's."""
    write(tmp_path, make_arrays(CONFIG), CONFIG)
    floats = all_logits(engine_of(tmp_path), PROMPT)
    quant = QuantConfig(scheme=QuantScheme.int8, kv_cache=KVCacheFormat[kv_cache])
    logits = all_logits(load_engine(replace(run_config(tmp_path), quant=quant), 3), PROMPT)
    assert not logits.equal(floats)
    # int8 rounds a weight by up to 1/254 of its row's largest; 4 layers change logits of order 10 by tenths
    assert (logits - floats).abs().mean() < 0.3
