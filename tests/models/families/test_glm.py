"""GLM and GLM-4-0414 against transformers, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families.glm import read_config
from tests.helpers.builders import SMALL, all_logits, complete, engine_of

NEW_TOKENS = 32
FAMILIES = {"glm": (GlmConfig, GlmForCausalLM), "glm4": (Glm4Config, Glm4ForCausalLM)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group per head, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "one group, no bias": {"num_key_value_heads": 1, "attention_bias": False},
    "wide heads": {"head_dim": 40},
    "all channels": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    "a quarter": {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 32,
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        }
    },
}


def write(folder: Path, family: str, **config: Any) -> Any:
    """A random float32 model of transformers, saved. Every parameter is random, also the biases."""
    torch.manual_seed(0)
    make_config, make_model = FAMILIES[family]
    values = {**SMALL, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 95, **config}
    model = make_model(make_config(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def ragged_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 95, (length,), generator=generator).tolist() for length in (5, 1, 40, 17, 2, 33)]


def reference_greedy(model: Any, prompt: list[int]) -> list[int]:
    # A fresh copy, because transformers' dynamic scaling keeps the longest length of earlier calls.
    ids = torch.tensor([prompt])
    output = copy.deepcopy(model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, family: str, tmp_path: Path) -> None:
    reference = write(tmp_path, family, **CASES[name])
    engine = engine_of(tmp_path)
    prompts = ragged_prompts()
    for prompt in prompts[:4]:
        with torch.no_grad():
            expected = copy.deepcopy(reference)(torch.tensor([prompt])).logits[0]
        # 1e-4: float32 sums in another order; the logits are of order 1 to 10
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=1e-4, rtol=0)
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    expected_ids = [reference_greedy(reference, prompt) for prompt in prompts]
    assert [complete(engine, [prompt], decode)[0].token_ids for prompt in prompts] == expected_ids
    assert [completion.token_ids for completion in complete(engine, prompts, decode)] == expected_ids
    chunked = engine_of(tmp_path, max_batched_tokens=5, block_size=4)
    assert [completion.token_ids for completion in complete(chunked, prompts, decode)] == expected_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_older_spelling_is_the_same_model(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.25})
    prompt = ragged_prompts()[3]
    logits = all_logits(engine_of(tmp_path), prompt)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    del config["rope_parameters"]
    file.write_text(json.dumps(config | {"rope_theta": 500.0, "partial_rotary_factor": 0.25}), encoding="utf-8")
    assert all_logits(engine_of(tmp_path), prompt).equal(logits)
    reader = ConfigReader.from_folder(tmp_path)
    read_config(reader)
    assert reader.unread() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported: only 'silu'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels, not an even number"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1\.5 turns 24 of 16 channels"),
        ({"partial_rotary_factor": 1e30}, r"partial_rotary_factor=1e\+30 turns 32 of 16 channels"),
        ({"partial_rotary_factor": 0.01}, r"partial_rotary_factor=0\.01 turns 0 of 16 channels"),
        ({"partial_rotary_factor": 0}, r"partial_rotary_factor=0\.0 is not a number from 1e-30"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels"),
        ({"rope_scaling": {"type": "su"}}, r"type='su' is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], message: str) -> None:
    config = SMALL | {"model_type": "glm", "head_dim": 16} | changes
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(config, "config.json"))
