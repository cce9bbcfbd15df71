"""Llama with real weights. test_families.py compares it with transformers."""

import json

import pytest
import torch

from conf.decoding import DecodeConfig
from tests.helpers.builders import SHARED, all_logits, complete, engine_of
from tests.helpers.cases import each

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real small models of ../shared")


@needs_shared
def test_stories260k_tells_its_published_story() -> None:
    folder = SHARED / "data" / "models" / "stories260K"
    engine = engine_of(folder, tokenizer="")
    assert engine.tokenizer is not None
    output = complete(engine, [[1]], DecodeConfig(max_new_tokens=200))[0]
    assert output.text == (folder / "expected_200_steps.txt").read_text(encoding="utf-8")
    assert len(output.token_ids) == 200


@needs_shared
@each("name", ["stories260K", "babyllama_tok105"])
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
