"""SmolLM3 against transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import SmolLM3ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.smollm3 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

CASES: dict[str, dict[str, Any]] = {
    "every_second": {"no_rope_layer_interval": 2},
    "listed": {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]},
    "default_of_four": {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True},
    "untied_window": {
        "tie_word_embeddings": False,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, SmolLM3ForCausalLM, **{"pad_token_id": 0, **CASES[name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": 1e4, "no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not 2 times 0 or 1"),
        ({"rope_theta": 1e4, "no_rope_layers": [1, 2]}, r"no_rope_layers=\[1, 2\] is not 2 times 0 or 1"),
        ({"rope_theta": 1e4, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is not a number above 0"),
        ({"rope_theta": 1e4, "use_sliding_window": True}, "layer_types is missing, but use_sliding_window is true"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, "rms_norm_eps": 1e-6, **changes}, "config.json"))
