"""GPT-2 against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from conf.errors import UserError
from models.config import ConfigReader
from models.families import gpt2
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 72,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "inner": {"n_inner": 100, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_pytorch_tanh"},
    "exact_gelu": {"activation_function": "gelu"},
    "unscaled": {"scale_attn_weights": False},
    "inverse_layer_idx": {"scale_attn_by_inverse_layer_idx": True},
    "upcast": {
        "reorder_and_upcast_attn": True,
        "_attn_implementation": "eager",
    },  # another order of the same in float32
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    config = transformers.GPT2Config(**{**SMALL, **CASES[name]})
    reference = write_random(tmp_path, transformers.GPT2LMHeadModel(config))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function='relu' is not supported: only 'gelu_new', 'gelu_py"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported: only False"),
        ({"n_head": 5}, "n_embd=48 is not a multiple of n_head=5"),
        ({"n_layer": None}, "n_layer is missing"),
        ({"n_positions": 0}, "n_positions=0 is not a number above 0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gpt2.read_config(ConfigReader({**SMALL, **changes}, "config.json"))
