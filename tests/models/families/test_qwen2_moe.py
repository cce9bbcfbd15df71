"""Qwen 2's mixtures of experts against transformers, their exactness, and what config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families.qwen2_moe import read_config
from tests.helpers.builders import complete, engine_of
from tests.helpers.oracle import check_equals_transformers, write_model

SIZES: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalised": {"norm_topk_prob": True},
    "top4": {"num_experts": 9, "num_experts_per_tok": 4},
    "second_layer_only": {"decoder_sparse_step": 2},
    "first_layer_only": {"mlp_only_layers": [1]},
    "no_biases": {"qkv_bias": False},
    "tied": {"tie_word_embeddings": True, "rope_theta": 1e6},
    "window": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_only_layers": [0],
    },
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
    check_equals_transformers(tmp_path, Qwen2MoeForCausalLM, **{**SIZES, **CASES[name]})


def test_log_probabilities_are_the_same_to_the_bit_in_any_company(tmp_path: Path) -> None:
    write_model(tmp_path, Qwen2MoeForCausalLM, **SIZES)
    engine = engine_of(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 96, (length,), generator=generator).tolist() for length in (5, 1, 40, 17, 2, 16)]
    decode = DecodeConfig(max_new_tokens=12, logprobs=5, prefix_cache=False)
    alone = [complete(engine, [prompt], decode)[0] for prompt in prompts]
    assert complete(engine, prompts, decode) == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"use_sliding_window": True, "sliding_window": 8}, "layer_types is missing, but use_sliding_window is true"),
        ({"layer_types": ["sliding_attention"] * 2}, "but use_sliding_window is not true"),
        ({"num_experts": 0}, "num_experts=0 is not a number above 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not a number above 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1 is not a list of layers from 0 to 1"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\] is not a list of layers from 0 to 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 is not of type bool"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
