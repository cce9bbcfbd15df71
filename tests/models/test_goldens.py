"""Every family compared with logits and greedy tokens of its original code (tests/goldens: random weights). A new
family is a new row."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.decoding import DecodeConfig
from kernels import build
from pipelines.engine import executor
from tests.helpers.builders import all_logits, engine_of, generate
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, TOLERANCE, WHOLE_PROMPTS, greedy, link


def spellings(family: str) -> list[str]:
    return [file.name for file in sorted((GOLDENS / family).glob("config*.json"))]


QUICK = ("baichuan-7b", "baichuan2-13b", "chatglm", "chatglm3", "qwen")  # transformers has no class for it


@each(
    "family, spelling",
    [(family, spelling) for family in GOLDEN_FAMILIES for spelling in spellings(family)],
    quick=[(family, "config.json") for family in QUICK],
)
def test_equals_the_original_code(family: str, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_file(GOLDENS / family / "golden.safetensors")
    folder = link(family, tmp_path, spelling)
    engine = engine_of(folder, allow_pickle=True)
    prompt = golden["input_ids"][0].tolist()
    torch.testing.assert_close(all_logits(engine, prompt), golden["logits"][0], atol=TOLERANCE, rtol=0)
    expected = golden["greedy_ids"][0].tolist()
    assert greedy(engine, [prompt], len(expected)) == [expected]
    lengths = golden["batch_attention_mask"].sum(-1).tolist()
    prompts = [row[-length:].tolist() for row, length in zip(golden["batch_input_ids"], lengths, strict=True)]
    if build.library():
        assert engine.executor.decode_steps.can_record
    expected_batch = golden["batch_greedy_ids"].tolist()
    assert greedy(engine, prompts, len(expected_batch[0])) == expected_batch
    small_blocks = engine_of(folder, allow_pickle=True, block_size=4)
    for knows_the_prompt in (False, True):  # the second time with a prefix cache, if allowed
        request = small_blocks.request(0, prompt, DecodeConfig(max_new_tokens=len(expected), ignore_eos=True))
        (output,) = small_blocks.generate([request])
        assert output.completions[0].token_ids == expected
        can_share = small_blocks.capabilities.shares_prefixes
        assert (output.num_cached_tokens > 0) == (knows_the_prompt and can_share)
    if family in WHOLE_PROMPTS:
        return
    monkeypatch.setattr(executor, "PROMPTS_BEFORE_RECORDING", 1)
    chunked = engine_of(folder, allow_pickle=True, max_batched_tokens=5)
    assert greedy(chunked, [prompt], len(expected)) == [expected]
    assert greedy(chunked, prompts, len(expected_batch[0])) == expected_batch
    if build.library():
        assert chunked.executor.prompt_steps.can_record


@each("family", GOLDEN_FAMILIES, quick=QUICK)
def test_beams_of_every_family(family: str, tmp_path: Path) -> None:
    """Each score is the mean log probability of the beam's tokens, computed again in one prefill. Beams do not depend
    on the batch."""
    engine = engine_of(link(family, tmp_path), allow_pickle=True)
    prompt = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    decode = DecodeConfig(
        temperature=0, num_beams=3, num_return_sequences=3, max_new_tokens=5, ignore_eos=True, prefix_cache=False
    )
    alone, *others = generate(engine, [prompt], decode) + generate(engine, [prompt, prompt], decode)
    for other in others:
        assert [beam.token_ids for beam in other.completions] == [beam.token_ids for beam in alone.completions]
    for beam in alone.completions:
        log_probabilities = all_logits(engine, prompt + beam.token_ids[:-1])[-5:].log_softmax(-1)
        score = log_probabilities[range(5), beam.token_ids].mean().item()
        assert beam.score == pytest.approx(score, abs=1e-4)  # float32 sums in other orders
    scores = [beam.score or 0.0 for beam in alone.completions]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
