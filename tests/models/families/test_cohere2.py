"""Cohere 2 against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Cohere2ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.cohere2 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "windows": {"num_hidden_layers": 5, "sliding_window": 7, "logit_scale": 0.3},
    "untied_biases": {"tie_word_embeddings": False, "attention_bias": True, "layer_norm_eps": 1e-3},
    "layer_types": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 9,
        "num_key_value_heads": 1,
        "rope_theta": 50000.0,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Cohere2ForCausalLM, **{"pad_token_id": 0, **CASES[name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported: only None, False"),
        ({"use_parallel_block": False}, "use_parallel_block=False is not supported: only None, True"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not supported"),
        ({"sliding_window": None}, "sliding_window is null, but layers slide: give its length, or layer_types"),
        ({"logit_scale": 0}, r"logit_scale=0\.0 is not a number from 1e-30"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
