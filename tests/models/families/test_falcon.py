"""Falcon against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import FalconForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.falcon import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "one_key": {},
    "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "grouped_one_norm": {
        "new_decoder_architecture": True,
        "num_kv_heads": 1,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
    },
    "in_turn": {"parallel_attn": False, "tie_word_embeddings": False, "ffn_hidden_size": 100},
    "every_key": {"multi_query": False, "bias": True, "layer_norm_epsilon": 1e-3},
    "every_key_in_turn": {"multi_query": False, "parallel_attn": False, "rope_theta": 500.0},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(
        tmp_path, FalconForCausalLM, **{"num_key_value_heads": None, "intermediate_size": None, **CASES[name]}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi": True}, "alibi=True is not supported: only False"),
        ({"activation": "relu"}, "activation='relu' is not supported: only 'gelu'"),
        ({"apply_residual_connection_post_layernorm": True}, "post_layernorm=True is not supported: only False"),
        ({"n_embed": 32}, "n_embed=32 is not supported: only None, 64"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 is not supported: only None, 1"),
        (
            {"new_decoder_architecture": True, "num_kv_heads": 3},
            "num_attention_heads=4 is not a multiple of num_kv_heads=3",
        ),
        (
            {"new_decoder_architecture": True, "parallel_attn": False},
            "new_decoder_architecture=true is not supported with parallel_attn=false",
        ),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
