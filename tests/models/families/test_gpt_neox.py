"""GPT-NeoX against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPTNeoXForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.gpt_neox import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "parallel": {},
    "in_turn": {"use_parallel_residual": False, "tie_word_embeddings": True},
    "all_channels": {"rotary_pct": 1.0, "rotary_emb_base": 500, "attention_bias": False, "layer_norm_eps": 1e-3},
    "of_20b": {"hidden_act": "gelu_fast"},
    "fast_gelu": {"hidden_act": "gelu_new", "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, GPTNeoXForCausalLM, **{"num_key_value_heads": None, **CASES[name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_act": "relu"},
            "hidden_act='relu' is not supported: only 'gelu', 'gelu_fast', 'gelu_new', 'gelu_pytorch",
        ),
        ({"rotary_pct": 0.2}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels, not an even number"),
        ({"rope_theta": 5, "rotary_emb_base": 6}, r"rope_theta=5 is not supported: only None, 6\.0"),
        ({"num_attention_heads": 5}, "hidden_size=64 is not a multiple of num_attention_heads=5"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
