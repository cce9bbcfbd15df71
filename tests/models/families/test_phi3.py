"""Phi-3 against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families import phi3
from pipelines.engine import Engine
from pipelines.engine.request import SequenceGroup
from tests.helpers.builders import complete, engine_of, generate
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random
from tests.pipelines.engine.test_contrastive_search import expected as contrastive
from tests.pipelines.engine.test_lookahead import look_ahead

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


BORDER = 60  # original_max_position_embeddings
BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * 4  # of 4 tokens: keys and values, layers, heads, channels, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("longrope")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    config = transformers.Phi3Config(**SMALL, rope_scaling=LONGROPE)
    return write_random(folder, transformers.Phi3ForCausalLM(config))


@pytest.fixture(scope="module")
def engine(folder: Path, reference: Any) -> Engine:
    return engine_of(folder)


# The first new token, the second, one in the middle and the last one take the text past the border; 61 is past it from the start.
CROSSING = random_prompts(96, (60, 59, 45, 29, 61))


def test_growing_past_the_border_equals_transformers(folder: Path, reference: Any) -> None:
    assert_equals_transformers(folder, reference, CROSSING)


def test_the_border_is_seen(folder: Path, reference: Any, engine: Engine) -> None:
    """Without the second computation the tokens would be others, so that the tests of it prove something."""
    decode = DecodeConfig(max_new_tokens=32)
    crossed = [output.token_ids for output in complete(engine, CROSSING, decode)]
    stays = engine_of(folder)
    stays.scheduler._recompute_past_border = lambda group: None  # type: ignore[method-assign]
    assert [output.token_ids for output in complete(stays, CROSSING, decode)] != crossed


DECODES = {
    "greedy": DecodeConfig(max_new_tokens=32),
    "seeded": DecodeConfig(max_new_tokens=32, temperature=1.0, seed=3, logprobs=1),
    "n": DecodeConfig(max_new_tokens=32, temperature=1.0, seed=3, n=3),
    "beams": DecodeConfig(max_new_tokens=32, num_beams=3, num_return_sequences=3),
    "contrastive": DecodeConfig(max_new_tokens=32, penalty_alpha=0.6, top_k=3),
}
NUM_SEQUENCES = {"greedy": 1, "seeded": 1, "n": 3, "beams": 3, "contrastive": 3}


@pytest.mark.parametrize("name", DECODES)
def test_chunks_company_cached_prefixes_and_preemption_change_nothing_across_the_border(
    name: str, folder: Path, engine: Engine, preempted: list[SequenceGroup]
) -> None:
    decode = DECODES[name]

    def tokens(engine: Engine, prompts: list[list[int]]) -> list[list[list[int]]]:
        return [[c.token_ids for c in output.completions] for output in generate(engine, prompts, decode)]

    alone = [tokens(engine, [prompt])[0] for prompt in CROSSING]
    assert tokens(engine, CROSSING) == alone
    # One row has room at its full length, but not the three that run at once; and no prompt goes through one step.
    num_blocks = 24 * NUM_SEQUENCES[name] + 13
    small = engine_of(folder, max_batched_tokens=11, block_size=4, kv_cache_memory=str(num_blocks * BLOCK_BYTES))
    assert tokens(small, CROSSING) == alone
    assert preempted
    assert (
        tokens(small, CROSSING) == alone
    )  # over a cache that knows the prompts, some of them on both sides of the border


def test_beams_across_the_border_equal_transformers(reference: Any, engine: Engine) -> None:
    for prompt in CROSSING:
        ids = torch.tensor([prompt])
        rows = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            pad_token_id=0,
        )
        (output,) = generate(engine, [prompt], DECODES["beams"])
        assert [completion.token_ids for completion in output.completions] == rows[:, len(prompt) :].tolist()


def test_contrastive_search_across_the_border_equals_its_definition(reference: Any, engine: Engine) -> None:
    for prompt, output in zip(CROSSING, complete(engine, CROSSING, DECODES["contrastive"]), strict=True):
        assert output.token_ids == contrastive(reference, prompt, 0.6, 3, 32)


def test_a_step_ahead_waits_at_the_border(folder: Path, engine: Engine) -> None:
    decode = DECODES["greedy"]
    ahead = engine_of(folder)
    launched = look_ahead(ahead)
    assert [output.token_ids for output in complete(ahead, CROSSING, decode)] == [
        output.token_ids for output in complete(engine, CROSSING, decode)
    ]
    assert any(launched)


def test_a_cached_block_serves_one_side_of_the_border(engine: Engine) -> None:
    long = [4 + i * i % 90 for i in range(75)]
    decode = DecodeConfig(max_new_tokens=4)
    for prompt, num_cached in ((long[:40], 0), (long, 0), (long, 64), (long[:40], 32)):
        (output,) = generate(engine, [prompt], decode)
        assert output.num_cached_tokens == num_cached


def read(**changes: Any) -> phi3.Phi3Config:
    return phi3.read_config(ConfigReader({**SMALL, **changes}, "config.json"))


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_older_spellings_of_longrope(kind: str) -> None:
    scaling = {"type": kind, "short_factor": SHORT, "long_factor": LONG}
    assert read(rope_scaling=scaling) == read(rope_scaling=LONGROPE)
    assert read(rope_scaling=scaling).key_border == BORDER
    assert read().key_border is None


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
        ({"partial_rotary_factor": 1e30}, "turns 32 of 16 channels"),
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
