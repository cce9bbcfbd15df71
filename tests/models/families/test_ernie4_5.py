"""Ernie 4.5, dense, against transformers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Ernie4_5ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.ernie4_5 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "biases": {"use_bias": True, "tie_word_embeddings": False},
    "wide_heads": {"head_dim": 32, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Ernie4_5ForCausalLM, **{"head_dim": 16, **CASES[name]})


def test_what_files_leave_out() -> None:
    given = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"}
    config = read_config(ConfigReader({**given, "head_dim": 16}, "config.json"))
    assert (config.tie_word_embeddings, config.use_bias) == (True, False)
    assert (config.rotary.theta, config.context_length) == (500000.0, 131072)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"use_bias": 1}, "use_bias=1 is not of type bool"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, "head_dim": 16, **changes}, "config.json"))
