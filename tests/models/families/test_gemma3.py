"""Gemma 3 against transformers, in configs of old and new spelling."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from conf.errors import UserError
from models.config import ConfigReader
from models.families import gemma3
from models.families.gemma2 import FULL, SLIDING
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"rope_parameters": {FULL: SCALED, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}},
    "seven_layers": {"num_hidden_layers": 7, "sliding_window_pattern": 6},
    "untied_biases": {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-3},
    "final_cap": {"final_logit_softcapping": 2.0, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
    "one_group": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**{**SMALL, **CASES[name]})
    model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager")
    assert_equals_transformers(tmp_path, write_random(tmp_path, model), random_prompts(96))


def test_settings_of_the_first_files(tmp_path: Path) -> None:
    """Which name the speeds of rotation and the pattern of windows one by one."""
    old = {**SMALL, "sliding_window_pattern": 3, "rope_theta": 3e4, "rope_local_base_freq": 100.0}
    new = {FULL: SCALED, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}
    config = transformers.Gemma3TextConfig(**{**SMALL, "sliding_window_pattern": 3, "rope_parameters": new})
    reference = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager")
    reference = write_random(tmp_path, reference)
    scaling = {"rope_type": "linear", "factor": 8.0}
    settings = {**old, "model_type": "gemma3_text", "rope_scaling": scaling, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def read(**changes: Any) -> gemma3.Gemma3Config:
    return gemma3.read_config(ConfigReader({**SMALL, **changes}, "config.json"))


def test_what_the_hubs_files_leave_out() -> None:
    """google/gemma-3-4b-it names sizes of its layers alone; its context is that after scaling."""
    given = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = gemma3.read_config(ConfigReader(given, "config.json"))
    reference = transformers.Gemma3TextConfig(**given)
    assert config.windows == tuple(1024 if kind == SLIDING else None for kind in reference.layer_types)
    names = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar")
    assert [getattr(config, name) for name in names] == [getattr(reference, name) for name in names]
    assert (config.rotary.theta, config.rotary.factor) == (1e6, 8.0)
    assert (config.sliding_rotary.theta, config.sliding_rotary.factor) == (1e4, 1.0)
    assert config.context_length == reference.max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported: only 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported: only None"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"sliding_window": None}, "sliding_window is null, but layers slide: give its length, or layer_types"),
        (
            {
                "rope_parameters": {FULL: {"rope_type": "default"}},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "has rope_parameters and rope_scaling: leave one of them out",
        ),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not a number above 0"),
        ({"layer_types": ["chunked"] * 4}, "is not 4 times 'sliding_attention' or 'full_attention'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has rope_type: expected full_attention, slid"),
        ({"rope_parameters": {FULL: {"rope_type": "su"}}}, "rope_type='su' is not supported: only 'default', 'linear'"),
        ({"rope_parameters": {SLIDING: {"rope_type": "su"}}}, "rope_type='su' is not supported"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(**changes)
