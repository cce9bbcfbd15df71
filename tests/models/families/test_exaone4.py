"""EXAONE 4 against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Exaone4ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.exaone4 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "hybrid": {"num_hidden_layers": 5, "sliding_window": 7},
    "pattern": {"sliding_window": 9, "sliding_window_pattern": 2, "num_key_value_heads": 1, "rope_theta": 1e6},
    "named_pattern": {
        "sliding_window": 9,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "no_window": {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    "nothing_turns": {"sliding_window": 9, "layer_types": ["full_attention"] * 2, "head_dim": 24},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Exaone4ForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' is not of type int"),
        (
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "layer_types=.* is not supported: only None",
        ),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
