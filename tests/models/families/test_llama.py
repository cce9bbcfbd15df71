"""Llama against transformers, against golden logits, and on real weights."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from tests.helpers.builders import REPOSITORY, SHARED, all_logits, complete, engine_of, write_llama

GOLDENS = REPOSITORY / "tests" / "goldens"
NEW_TOKENS = 64
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa1": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
    "gqa4": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "wide_heads": {"head_dim": 80},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied_biases_theta": {"tie_word_embeddings": True, "attention_bias": True, "rope_theta": 500.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn_mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        }
    },
}


def ragged_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 96, (length,), generator=generator).tolist() for length in (5, 1, 40, 17, 2, 33, 16)]


def reference_greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    # A fresh copy, because transformers' dynamic scaling keeps the longest length of earlier calls.
    ids = torch.tensor([prompt])
    output = copy.deepcopy(model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = write_llama(tmp_path, **CASES[name])
    engine = engine_of(tmp_path, batch_size=3)
    prompts = ragged_prompts()
    for prompt in prompts[:4]:
        with torch.no_grad():
            expected = copy.deepcopy(reference)(torch.tensor([prompt])).logits[0]
        # 1e-4: float32 sums in another order; the logits are of order 1 to 10
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=1e-4, rtol=0)
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS)
    expected_ids = [reference_greedy(reference, prompt) for prompt in prompts]
    alone = [complete(engine, [prompt], decode)[0].token_ids for prompt in prompts]
    together = [output.token_ids for output in complete(engine, prompts, decode)]
    assert alone == expected_ids
    assert together == expected_ids
    chunked = engine_of(tmp_path, batch_size=3, max_batched_tokens=5, block_size=4)
    assert [output.token_ids for output in complete(chunked, prompts, decode)] == expected_ids


needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real small models stand beside the repository")


@needs_shared
def test_stories260k_tells_its_published_story() -> None:
    folder = SHARED / "data" / "models" / "stories260K"
    engine = engine_of(folder, tokenizer="")
    assert engine.tokenizer is not None
    output = complete(engine, [[1]], DecodeConfig(max_new_tokens=200))[0]
    assert output.text == (folder / "expected_200_steps.txt").read_text(encoding="utf-8")
    assert len(output.token_ids) == 200


@needs_shared
@pytest.mark.parametrize("name", ["stories260K", "babyllama_tok105"])
def test_real_model_equals_its_golden_ids(name: str) -> None:
    folder = SHARED / "data" / "models" / name
    engine = engine_of(folder, tokenizer="", batch_size=2)
    cases = json.loads((folder / "golden.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) > 1
    assert engine.tokenizer is not None
    for case in cases:
        assert engine.tokenizer.encode(case["prompt"], add_special_tokens=True) == case["prompt_ids"]
        top = all_logits(engine, case["prompt_ids"])[-1].topk(5)
        assert top.indices.tolist() == case["top5_ids"]
        # 2e-4: the golden values are printed with five decimals, computed elsewhere in float32
        torch.testing.assert_close(top.values, torch.tensor(case["top5_logits"]), atol=2e-4, rtol=0)
        output = complete(engine, [case["prompt_ids"]], DecodeConfig(max_new_tokens=len(case["greedy_ids"])))[0]
        assert output.token_ids == case["greedy_ids"]
