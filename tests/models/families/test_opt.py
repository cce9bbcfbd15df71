"""OPT against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from models.config import ConfigReader
from models.families import opt
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 72,
    "eos_token_id": None,
}
PROJECTED = {"do_layer_norm_before": False, "word_embed_proj_dim": 32}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "norm_after": {"do_layer_norm_before": False},
    "projected": PROJECTED,
    "projected_norm_before_untied": {"word_embed_proj_dim": 64, "tie_word_embeddings": False},
    "no_final_norm": {"_remove_final_layer_norm": True},
    "galactica": {"activation_function": "gelu", "enable_bias": False},
    "no_weights_in_norms": {"layer_norm_elementwise_affine": False},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    config = transformers.OPTConfig(**{**SMALL, **CASES[name]})
    reference = write_random(tmp_path, transformers.OPTForCausalLM(config))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def test_names_of_the_350m_checkpoint(tmp_path: Path) -> None:
    reference = write_random(tmp_path, transformers.OPTForCausalLM(transformers.OPTConfig(**{**SMALL, **PROJECTED})))
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    assert_equals_transformers(tmp_path, reference, random_prompts(96, (7,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "silu"}, "activation_function='silu' is not supported: only 'relu', 'gelu'"),
        ({"num_attention_heads": 5}, "hidden_size=48 is not a multiple of num_attention_heads=5"),
        ({"ffn_dim": None}, "ffn_dim is missing"),
        ({"do_layer_norm_before": 1}, "do_layer_norm_before=1 is not of type bool"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        opt.read_config(ConfigReader({**SMALL, **changes}, "config.json"))
