"""OLMo 2 against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Olmo2ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.olmo2 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "tied_biases": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Olmo2ForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"attention_bias": 1}, "attention_bias=1 is not of type bool"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
