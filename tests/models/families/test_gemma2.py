"""Gemma 2 against transformers, with caps tight enough to matter."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conf.errors import UserError
from models.config import ConfigReader
from models.families import gemma2
from models.layers.norm import RMSNorm
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 2.0,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
CASES: dict[str, dict[str, Any]] = {
    "tight_caps": {},
    "no_caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "untied_biases": {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-3},
    "layer_types": {"layer_types": [gemma2.FULL, gemma2.FULL, gemma2.SLIDING]},
    "one_group": {"num_key_value_heads": 1, "rope_theta": 300.0},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 30},
}


def reference_model(**changes: Any) -> Any:
    config = transformers.Gemma2Config(**{**SMALL, **changes})
    return transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")  # others drop the soft cap


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = write_random(tmp_path, reference_model(**CASES[name]))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def read(**changes: Any) -> gemma2.Gemma2Config:
    return gemma2.read_config(ConfigReader({**SMALL, **changes}, "config.json"))


def test_norm_equals_transformers_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(48).bfloat16()
    theirs.weight.data.normal_(0, 0.3, generator=generator)
    ours = RMSNorm(48, 1e-6, gemma2.WEIGHT_OFFSET)
    ours.weight = theirs.weight
    x = torch.randn(7, 48, generator=generator).bfloat16()
    assert torch.equal(ours(x), theirs(x))


def test_caps_and_windows_that_the_config_does_not_name() -> None:
    given = {key: value for key, value in SMALL.items() if "softcapping" not in key and key != "sliding_window"}
    config = gemma2.read_config(ConfigReader(given, "config.json"))
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    assert config.windows == (4096, None, 4096)
    assert read(attn_logit_softcapping=None).attn_logit_softcapping is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported: only 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\] is not 3 times 'sliding_attention'"),
        ({"layer_types": [1, 2, 3]}, r"layer_types=\[1, 2, 3\] is not 3 times"),
        ({"layer_types": "full"}, "layer_types='full' is not 3 times"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping=0.0 is not a number from 1e-30"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping='x' is not of type float"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1.0 is not a number from 1e-30"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(**changes)
