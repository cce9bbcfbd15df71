"""PaddleNLP's GPT (GPT-2 and GPT-3 with its own names) compared with the formulas of its code, in float64."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from models.formats import open_checkpoint
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.cases import each
from tests.helpers.paddle_files import Arrays, rank_of, save_pdparams, save_safetensors

VOCAB, HIDDEN, WIDE, LAYERS, HEADS, CONTEXT = 63, 24, 42, 3, 3, 32
CONFIG = {
    "model_type": "gpt",
    "architectures": ["GPTForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "hidden_activation": "gelu",
    "normalize_before": True,
    "fuse_attention_qkv": True,
    "scale_qk_coeff": 1.0,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "eol_token_id": 3,
    "paddlenlp_version": "3.0.0",
}
PROMPT = [7, 0, 60, 3, 3, 19, 44]
TOLERANCE = 1e-4  # float32 compared with float64; the logits are of order 1 to 10


def make_arrays() -> Arrays:
    random = np.random.default_rng(3)
    shapes = {"embeddings.word_embeddings": (VOCAB, HIDDEN), "embeddings.position_embeddings": (CONTEXT, HIDDEN)}
    norms = ["decoder.norm"]
    for i in range(LAYERS):
        layer = f"decoder.layers.{i}"
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
        shapes[f"{layer}.self_attn.qkv_proj"] = (HIDDEN, 3 * HIDDEN)
        shapes[f"{layer}.self_attn.out_proj"] = (HIDDEN, HIDDEN)
        shapes |= {f"{layer}.linear1": (HIDDEN, WIDE), f"{layer}.linear2": (WIDE, HIDDEN)}
    arrays = {f"gpt.{name}.weight": random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in norms:
        arrays[f"gpt.{name}.weight"] = random.normal(1, 0.3, HIDDEN).astype(np.float32)
    with_bias = [*norms, *(name for name in shapes if "embeddings" not in name)]
    for name in with_bias:
        arrays[f"gpt.{name}.bias"] = random.normal(0, 0.3, arrays[f"gpt.{name}.weight"].shape[-1]).astype(np.float32)
    return arrays


def expected_logits(arrays: Arrays, prompt: list[int]) -> torch.Tensor:
    """Return logits [T, V] of GPTModel and GPTLMHead in float64, layer by layer."""
    w = {name.removeprefix("gpt."): torch.from_numpy(array).double() for name, array in arrays.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][prompt] + w["embeddings.position_embeddings.weight"][: len(prompt)]
    later = torch.ones(len(prompt), len(prompt), dtype=torch.bool).triu(1)
    for i in range(LAYERS):
        layer = f"decoder.layers.{i}"
        mixed = linear(norm(x, f"{layer}.norm1"), f"{layer}.self_attn.qkv_proj")
        head_dim = HIDDEN // HEADS
        heads = []
        for head in mixed.reshape(len(prompt), HEADS, 3 * head_dim).unbind(1):
            q, k, v = head.split(head_dim, -1)
            scores = (q @ k.T / math.sqrt(head_dim)).masked_fill(later, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"{layer}.self_attn.out_proj")
        h = linear(norm(x, f"{layer}.norm2"), f"{layer}.linear1")
        gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(gelu, f"{layer}.linear2")
    return norm(x, "decoder.norm") @ w["embeddings.word_embeddings.weight"].T


def split(arrays: Arrays) -> Arrays:
    """Split queries, keys and values: fuse_attention_qkv=False."""
    result = {}
    for name, array in arrays.items():
        if "qkv_proj" not in name:
            result[name] = array
            continue
        parts = array.reshape(*array.shape[:-1], HEADS, 3, -1)
        for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
            result[name.replace("qkv_proj", part)] = np.ascontiguousarray(parts[..., i, :]).reshape(
                *array.shape[:-1], -1
            )
    return result


def write(folder: Path, arrays: Arrays, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_pdparams(folder / "model_state.pdparams", arrays)


def assert_formulas(folder: Path, arrays: Arrays) -> None:
    logits = all_logits(engine_of(folder, allow_pickle=True), PROMPT)
    expected = expected_logits(arrays, PROMPT)
    assert 1 < expected.abs().max() < 100
    torch.testing.assert_close(logits.double(), expected, atol=TOLERANCE, rtol=0)


def test_fused(tmp_path: Path) -> None:
    arrays = make_arrays()
    write(tmp_path, arrays)
    assert_formulas(tmp_path, arrays)


def test_apart_in_safetensors(tmp_path: Path) -> None:
    arrays = make_arrays()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"fuse_attention_qkv": False}))
    save_safetensors(tmp_path / "model.safetensors", split(arrays))
    assert_formulas(tmp_path, arrays)


@each("head", ["lm_head.weight", "lm_head.decoder_weight", "lm_head.decoder.weight"])
def test_a_stored_head(head: str, tmp_path: Path) -> None:
    """A copy of the embedding with the names of three versions."""
    arrays = make_arrays()
    write(tmp_path, arrays | {head: arrays["gpt.embeddings.word_embeddings.weight"]})
    assert_formulas(tmp_path, arrays)


@each("is_fused", [True, False])
def test_ranks(is_fused: bool, tmp_path: Path) -> None:
    arrays = make_arrays()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    stored = arrays if is_fused else split(arrays)
    for rank in range(HEADS):
        save_pdparams(tmp_path / f"model_state.tp{rank:02}.pdparams", rank_of(stored, rank, HEADS, {}))
    assert_formulas(tmp_path, arrays)


def test_a_model_config_of_older_versions(tmp_path: Path) -> None:
    arrays = make_arrays()
    save_pdparams(tmp_path / "model_state.pdparams", arrays)
    keys = ("architectures", "model_type", "hidden_activation", "paddlenlp_version", "fuse_attention_qkv")
    inner = {key: value for key, value in CONFIG.items() if key not in keys}
    inner |= {"hidden_act": "gelu", "init_class": "GPTModel", "topo": None}
    nested = {"init_args": [inner], "init_class": "GPTLMHeadModel"}
    (tmp_path / "model_config.json").write_text(json.dumps(nested))
    assert_formulas(tmp_path, arrays)


def test_no_setting_stays_unread(tmp_path: Path) -> None:
    write(tmp_path, make_arrays())
    engine_of(tmp_path, allow_pickle=True)
    config = open_checkpoint(tmp_path, True).config
    assert config.raw("model_type") == "gpt2"
    assert not {"scale_qk_coeff", "hidden_activation", "type_vocab_size", "normalize_before"} & config.values.keys()


@each(
    "changes, message",
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported: only 'gelu'"),
        ({"normalize_before": False}, "normalize_before=False is not supported: only True"),
        ({"scale_qk_coeff": 2.0}, r"scale_qk_coeff=2\.0 is not supported: only 1\.0"),
        ({"num_experts": 4}, "num_experts=4 is not supported: only 1"),
    ],
)
def test_other_formulas(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, make_arrays(), **changes)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path, True)
