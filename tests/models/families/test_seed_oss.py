"""Seed-OSS against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import SeedOssForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.seed_oss import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "other_biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, SeedOssForCausalLM, **{"head_dim": 16, **CASES[name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"head_dim": 16, "attention_out_bias": 1}, "attention_out_bias=1 is not of type bool"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, "rms_norm_eps": 1e-6, **changes}, "config.json"))
