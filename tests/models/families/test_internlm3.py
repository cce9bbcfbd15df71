"""InternLM3 against transformers' Seed-OSS, and what is refused.

transformers has no InternLM3. Its own code computes Llama's layers with the bias of queries, keys and values under `qkv_bias`, and that of
every other projection under `bias`: Seed-OSS's with these alike.
"""

from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from models.config import ConfigReader
from models.families.internlm3 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.family_twins import InternLM3Twin
from tests.helpers.oracle import check_equals_transformers

DYNAMIC = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e4}
CASES: dict[str, tuple[bool, bool, dict[str, Any]]] = {  # qkv_bias, bias, and what both configs say
    "published": (False, False, {"max_position_embeddings": 24, "rope_parameters": DYNAMIC, "num_key_value_heads": 1}),
    "bias_of_heads": (True, False, {"rope_theta": 1e6}),
    "other_biases": (False, True, {"head_dim": 24, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    qkv_bias, bias, changes = CASES[name]
    biases = {"attention_bias": qkv_bias, "attention_out_bias": bias, "mlp_bias": bias}
    check_equals_transformers(tmp_path, InternLM3Twin, **{"head_dim": 16, **biases, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": 1}, "qkv_bias=1 is not of type bool"),
        ({"bias": "no"}, "bias='no' is not of type bool"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
