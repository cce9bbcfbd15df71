"""Qwen 3 against transformers, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.qwen3 import read_config
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "wide_heads": {"head_dim": 32},
    "tied": {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e6},
    "biases": {"head_dim": 16, "attention_bias": True},
    "no_groups": {"head_dim": 8, "num_key_value_heads": 4},
    "window": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "yarn": {
        "head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Qwen3ForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"attention_bias": 1}, "attention_bias=1 is not of type bool"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_window is missing"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "but use_sliding_window is not true"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
