"""Qwen of 2023 above its training context, where no golden set exists, compared with its formulas in float64; and
refused values of config.json."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families.qwen import read_config
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.cases import each
from tests.helpers.written_models import NO_PREFIX, QWEN, Weights, qwen, write_qwen

NEW_TOKENS = 24
LENGTHS = (5, 16, 17, 32, 33, 70)  # below, at and above the training context, twice and four times that


def reference_logits(w: Weights, ids: list[int], prompt_length: int, ntk: bool, logn: bool) -> Tensor:
    """Compute the whole sequence without a cache."""
    return qwen(w, ids, NO_PREFIX, prompt_length if ntk else 0, logn=logn)


def assert_greedy(w: Weights, prompt: list[int], answer: list[int], ntk: bool, logn: bool) -> None:
    """Check that each token of the answer is the most likely one after the tokens before it."""
    logits = reference_logits(w, prompt + answer, len(prompt), ntk, logn)
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == answer


@pytest.mark.long
@each("ntk, logn", [(False, False), (False, True), (True, False), (True, True)], quick=[(True, True)])
def test_equals_the_formulas_in_float64(ntk: bool, logn: bool, tmp_path: Path) -> None:
    weights = write_qwen(tmp_path, use_dynamic_ntk=ntk, use_logn_attn=logn)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, QWEN["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    engine = engine_of(tmp_path, block_size=4)
    for prompt in prompts:
        expected = reference_logits(weights, prompt, len(prompt), ntk, logn).float()
        # 1e-4: float32 compared with float64; the logits are of order 1 to 10
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=1e-4, rtol=0)
    # prefixes of other prompts, whose keys the cache must not return for them
    prompts += [prompts[-1][:20], prompts[-1][:40]]
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS)
    expected_ids = [complete(engine, [prompt], decode)[0].token_ids for prompt in prompts]
    for prompt, answer in zip(prompts, expected_ids, strict=True):
        assert_greedy(weights, prompt, answer, ntk, logn)
    chunked = engine_of(tmp_path, max_batched_tokens=5, block_size=4)
    for either in (engine, chunked):
        assert [output.token_ids for output in complete(either, prompts, decode)] == expected_ids


def test_prompts_share_their_beginnings_where_no_base_grows() -> None:
    def depends(**changes: Any) -> bool:
        return read_config(ConfigReader(QWEN | changes, "config.json")).capabilities.keys_depend_on_length

    assert depends()
    assert not depends(use_dynamic_ntk=False)
    assert not depends(max_position_embeddings=QWEN["seq_length"])  # as on the hub: 8192 and 8192


@each(
    "changes, message",
    [
        ({"no_bias": False}, "no_bias=False is not supported: only True"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported: only True"),
        ({"rotary_pct": 0.5}, "rotary_pct=0.5 is not supported: only 1.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported: only False"),
        ({"use_cache_quantization": True}, "use_cache_quantization=True is not supported: only False"),
        ({"kv_channels": 8}, "kv_channels=8 is not supported: only 16"),
        ({"hidden_size": 60}, "hidden_size=60 is not a multiple of twice num_attention_heads=4"),
        ({"hidden_size": 8}, "hidden_size=8 gives each of 4 heads 2 channels: at least 4 are needed"),
        ({"intermediate_size": 81}, "intermediate_size=81 is odd"),
        ({"seq_length": 1}, "use_logn_attn needs a seq_length above 1"),
        ({"use_dynamic_ntk": None}, "use_dynamic_ntk is missing"),
        ({"use_logn_attn": 1}, "use_logn_attn=1 is not of type bool"),
        ({"rotary_emb_base": 0}, "rotary_emb_base=0.0 is not a number from 1e-30"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(QWEN | changes, "config.json"))
