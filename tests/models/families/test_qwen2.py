"""Qwen 2 against transformers, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.qwen2 import read_config
from tests.helpers.oracle import check_equals_transformers

WINDOW = {"use_sliding_window": True, "sliding_window": 8}
CASES: dict[str, dict[str, Any]] = {
    "full": {"sliding_window": 8},
    "tied": {"tie_word_embeddings": True, "rope_theta": 1e6},
    "no_groups": {"num_key_value_heads": 4},
    "window_from_second_layer": {**WINDOW, "max_window_layers": 1},
    "window_everywhere": {**WINDOW, "max_window_layers": 0},
    "window_nowhere": {**WINDOW, "max_window_layers": 2},
    "window_in_first_layer": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}
CONFIG = {
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
    check_equals_transformers(tmp_path, Qwen2ForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"use_sliding_window": "yes"}, "use_sliding_window='yes' is not of type bool"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding_window is missing"),
        ({**WINDOW, "max_window_layers": "0"}, "max_window_layers='0' is not of type int"),
        ({**WINDOW, "max_window_layers": 1, "sliding_window": 0}, "sliding_window=0 is not a number above 0"),
        ({"layer_types": ["full_attention"]}, "is not a list of num_hidden_layers=2 types"),
        ({"layer_types": "full_attention"}, "is not a list of num_hidden_layers=2 types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention', which is not supported: only"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "but use_sliding_window is not true"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
