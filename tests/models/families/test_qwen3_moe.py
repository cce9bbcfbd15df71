"""Qwen 3's mixtures of experts against transformers, and what their config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.qwen3_moe import read_config
from tests.helpers.oracle import check_equals_transformers

SIZES: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalised": {"norm_topk_prob": True},
    "top4": {"num_experts": 9, "num_experts_per_tok": 4},
    "second_layer_only": {"decoder_sparse_step": 2},
    "first_layer_only": {"mlp_only_layers": [1]},
    "biases": {"attention_bias": True},
    "wide_heads": {"head_dim": 32, "norm_topk_prob": True},
    "tied": {"tie_word_embeddings": True, "rope_theta": 1e6},
    "window": {"use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": [0]},
}
CONFIG = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Qwen3MoeForCausalLM, **{**SIZES, **CASES[name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"use_sliding_window": True}, "sliding_window is missing"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers=1 is not supported: only 0, None"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.* is not supported: only .* None",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "but use_sliding_window is not true"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6"),
        ({"num_local_experts": 1}, "num_experts_per_tok=2 is more than num_local_experts=1"),
        ({"mlp_only_layers": ["a"]}, r"mlp_only_layers=\['a'\] is not a list of layers from 0 to 1"),
        ({"attention_bias": "no"}, "attention_bias='no' is not of type bool"),
        ({"num_experts": None}, "num_experts is missing"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
