"""Granite against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.granite import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "factors": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.7,
    },
    "tied": {"tie_word_embeddings": True, "logits_scaling": 8, "embedding_multiplier": 12},
    "biases": {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.22},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, GraniteForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"logits_scaling": 0}, r"logits_scaling=0\.0 is not a number from 1e-30"),
        ({"residual_multiplier": "x"}, "residual_multiplier='x' is not of type float"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, "rms_norm_eps": 1e-6, **changes}, "config.json"))
