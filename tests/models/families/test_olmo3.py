"""OLMo 3 against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Olmo3ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.olmo3 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "windows": {"num_hidden_layers": 5, "sliding_window": 7},
    "scaled": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 3000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "tied_biases": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    "wide_heads": {"head_dim": 24, "sliding_window": 9},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Olmo3ForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"hidden_size": 38}, "hidden_size=38 is not a multiple of num_attention_heads=4"),
        ({"layer_types": ["full_attention"]}, "is not 2 times 'sliding_attention' or 'full_attention'"),
        (
            {"rope_parameters": {"linear_attention": {}}},
            "rope_parameters has linear_attention: expected full_attention",
        ),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
