"""StarCoder 2 against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Starcoder2ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.starcoder2 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 9, "norm_epsilon": 1e-3},
    "untied_plain": {"tie_word_embeddings": False, "use_bias": False, "num_key_value_heads": 1},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Starcoder2ForCausalLM, **CASES[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'gelu_pytorch_tanh'"),
        ({"mlp_type": "gated"}, "mlp_type='gated' is not supported: only None, 'default'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **changes}, "config.json"))
