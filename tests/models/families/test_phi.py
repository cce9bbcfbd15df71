"""Phi against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PhiForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.phi import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "half": {},
    "quarter": {"partial_rotary_factor": 0.25, "num_key_value_heads": 4, "layer_norm_eps": 1e-3},
    "all": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, PhiForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'gelu_new', 'gelu_pytorch_tanh'"),
        ({"head_dim": 32}, "head_dim=32 is not supported: only None, 16"),
        ({"qk_layernorm": True}, "qk_layernorm=True is not supported: only False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported: only False"),
        ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels, not an even number"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
