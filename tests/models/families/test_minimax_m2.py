"""MiniMax-M2 against transformers, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MiniMaxM2ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.minimax_m2 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

SIZES: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "half_turning": {"head_dim": 12, "rotary_dim": 6},
    "most_experts": {"num_local_experts": 7, "num_experts_per_tok": 6},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, MiniMaxM2ForCausalLM, **{**SIZES, **CASES[name]})


CONFIG = {**SMALL, **SIZES, "rms_norm_eps": 1e-6}
HUB = {
    "attn_type_list": [1, 1],
    "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rotary_dim": 8,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


def test_keys_of_hub_configs_are_known() -> None:
    reader = ConfigReader(CONFIG | HUB, "config.json")
    config = read_config(reader)
    assert reader.unread() == []
    assert (config.rotary.head_dim, config.rotary.theta) == (8, 5e6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\] is not supported: only 1, softmax attention"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_local_experts=6"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not supported: only 'per_layer'"),
        ({"rotary_dim": 32}, "partial_rotary_factor=2.0 turns 32 of 16 channels"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: only 'sigmoid'"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported: only 0"),
        ({"use_routing_bias": False}, "use_routing_bias=False is not supported: only True"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
