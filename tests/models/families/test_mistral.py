"""Mistral against transformers, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.mistral import read_config
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "full": {"sliding_window": None},
    "window": {"sliding_window": 8},
    "window_of_two": {"sliding_window": 2},
    "wide_heads": {"sliding_window": 8, "head_dim": 24},
    "tied": {"sliding_window": None, "tie_word_embeddings": True, "rope_theta": 500.0},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, MistralForCausalLM, **CASES[name])


def test_a_config_without_a_window_has_that_of_transformers() -> None:
    default = MistralConfig().sliding_window
    assert default == 4096
    assert read_config(ConfigReader(CONFIG, "config.json")).sliding_window == default
    assert read_config(ConfigReader(CONFIG | {"sliding_window": None}, "config.json")).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"sliding_window": 0}, "sliding_window=0 is not a number above 0"),
        ({"sliding_window": "8"}, "sliding_window='8' is not of type int"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 33}, "hidden_size=33 is not a multiple of num_attention_heads=4"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
