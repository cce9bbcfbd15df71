"""BLOOM against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conf.errors import UserError
from models.config import ConfigReader
from models.families import bloom
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random

SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 4, "eos_token_id": None}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads_no_power_of_two": {"n_head": 6},
    "untied": {"tie_word_embeddings": False},
    "normed_residual": {"apply_residual_connection_post_layernorm": True, "layer_norm_epsilon": 1e-3},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    config = transformers.BloomConfig(**{**SMALL, **CASES[name]})
    reference = write_random(tmp_path, transformers.BloomForCausalLM(config))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def test_slopes_are_float32_on_the_cpu_whatever_the_model_is() -> None:
    config = bloom.read_config(ConfigReader(SMALL, "here"))
    with torch.device("meta"):
        model = bloom.Bloom(config)
    slopes = model.bfloat16().slopes.on(torch.device("cpu"))
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_inner": 100}, "n_inner=100 is not supported: only None, 192"),
        ({"n_head": 5}, "hidden_size=48 is not a multiple of n_head=5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"seq_length": 0}, "seq_length=0 is not a number above 0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bloom.read_config(ConfigReader({**SMALL, **changes}, "config.json"))
