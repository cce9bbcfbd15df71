"""Mixtral against transformers, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.mixtral import read_config
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "top2": {"num_local_experts": 5},
    "top1": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "all_experts": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "window": {"sliding_window": 8},
    "wide_heads": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True, "rope_theta": 500.0},
}
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, MixtralForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 is not a number above 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
        ({"sliding_window": -1}, "sliding_window=-1 is not a number above 0"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
