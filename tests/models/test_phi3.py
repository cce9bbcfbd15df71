"""Phi-3 against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models import phi3
from models.config import ConfigReader
from tests.builders import complete, engine_of
from tests.oracle import NEW_TOKENS, assert_equals_transformers, random_prompts, write_random

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 240,
    "original_max_position_embeddings": 60,
    "pad_token_id": 0,
    "eos_token_id": None,
}
SHORT = [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5]
LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied_window": {"tie_word_embeddings": True, "sliding_window": 7, "rope_theta": 500.0},
    "all_heads": {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "partial": {"partial_rotary_factor": 0.5},
    "longrope": {"rope_scaling": LONGROPE},
    "longrope_window": {"rope_scaling": LONGROPE, "sliding_window": 20},
    "longrope_factors": {"rope_scaling": {**LONGROPE, "attention_factor": 1.3, "factor": 2.0}},
    "longrope_factor": {"rope_scaling": {**LONGROPE, "factor": 8.0}},
    "longrope_as_long_as_before": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 240},
    "longrope_partial": {
        "rope_scaling": {**LONGROPE, "short_factor": SHORT[2:], "long_factor": LONG[2:]},
        "partial_rotary_factor": 0.75,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = write_random(
        tmp_path, transformers.Phi3ForCausalLM(transformers.Phi3Config(**{**SMALL, **CASES[name]}))
    )
    # 17 + 32 tokens stay below the original length of 60, prompts of 61 and 70 are above it from the first token on.
    assert_equals_transformers(tmp_path, reference, random_prompts(96, (5, 1, 70, 17, 61)))


def test_growing_beyond_the_original_length_equals_transformers_with_a_cache(tmp_path: Path) -> None:
    config = transformers.Phi3Config(**SMALL, rope_scaling=LONGROPE)
    reference = write_random(tmp_path, transformers.Phi3ForCausalLM(config))
    (prompt,) = random_prompts(96, (45,))
    cache = transformers.DynamicCache(config=config)
    expected, ids = [], prompt
    for _ in range(NEW_TOKENS):  # not generate(), which computes the cache anew at the original length
        with torch.no_grad():
            logits = reference(torch.tensor([ids]), past_key_values=cache).logits
        ids = [int(logits[0, -1].argmax())]
        expected += ids
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS)
    for engine in (engine_of(tmp_path), engine_of(tmp_path, max_batched_tokens=7, block_size=4)):
        for _ in range(2):
            assert complete(engine, [prompt], decode)[0].token_ids == expected


def read(**changes: Any) -> phi3.Phi3Config:
    return phi3.read_config(ConfigReader({**SMALL, **changes}, "config.json"))


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_older_spellings_of_longrope(kind: str) -> None:
    scaling = {"type": kind, "short_factor": SHORT, "long_factor": LONG}
    assert read(rope_scaling=scaling) == read(rope_scaling=LONGROPE)
    assert read(rope_scaling=scaling).keys_depend_on_length
    assert not read().keys_depend_on_length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"lm_head_bias": True}, "lm_head_bias=True is not supported"),
        ({"full_attn_mod": 2}, "full_attn_mod=2 is not supported: only 1"),
        ({"interpolate_factor": 4}, "interpolate_factor=4 is not supported: only 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"num_attention_heads": 6}, "hidden_size=64 is not a multiple of num_attention_heads=6"),
        ({"sliding_window": 0}, "sliding_window=0 is not a number above 0"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 turns 3 of 16 channels"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor=2.0 turns 32 of 16 channels"),
        ({"partial_rotary_factor": 1e308}, "turns 32 of 16 channels"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type='linear' is not supported: only 'default', 'longr"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor is not a list of 8 numbers"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is not a list of 8 numbers"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0] * 8}}, "short_factor holds what is not a number above 0"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [True] * 8}}, "short_factor holds what is not a number above 0"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [10**400] * 8}}, "not a number above 0 and below 2"),
        ({"rope_scaling": {**LONGROPE, "long_mscale": 1.2}}, "fields that are not supported: long_mscale"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(**changes)
