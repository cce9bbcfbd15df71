"""InternLM2 against transformers' Llama with rearranged weights, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from models.config import ConfigReader
from models.families.internlm2 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.family_twins import InternLM2Twin
from tests.helpers.oracle import check_equals_transformers

DYNAMIC = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1e6}
CASES: dict[str, dict[str, Any]] = {
    "published": {"rope_parameters": DYNAMIC, "max_position_embeddings": 24},
    "biases": {"attention_bias": True, "rope_theta": 5e4},
    "one_key": {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 66},
    "a_key_for_each_query": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_llama(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, InternLM2Twin, **CASES[name])


def test_the_code_has_biases_where_the_file_does_not_say() -> None:
    assert read_config(ConfigReader(dict(SMALL), "config.json")).bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": 1}, "bias=1 is not of type bool"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"rope_scaling": {"type": "su"}}, "type='su' is not supported"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
