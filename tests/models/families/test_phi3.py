"""Phi-3 at its long RoPE threshold, beyond which every key of a text differs. test_families.py tests it below and
above."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from models.config import ConfigReader
from models.families import phi3
from pipelines.engine import Engine
from pipelines.engine.request import SequenceGroup
from tests.helpers.builders import all_logits, complete, engine_of, generate
from tests.helpers.cases import each
from tests.helpers.catalog import ROWS
from tests.helpers.dense_families import LONG, LONGROPE, SHORT
from tests.helpers.expert_families import LONGROPE as MOE_LONGROPE
from tests.helpers.observed_steps import look_ahead
from tests.helpers.oracle import TOLERANCE, assert_equals_transformers, contrastive_search, random_prompts

BORDER = 60  # original_max_position_embeddings
BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * 4  # of 4 tokens: keys and values, layers, heads, channels, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("longrope")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return ROWS["phi3"].write(folder, rope_scaling=LONGROPE)


@pytest.fixture(scope="module")
def engine(folder: Path, reference: Any) -> Engine:
    return engine_of(folder)


# The first new token, the second, one in the middle and the last one cross the threshold; 61 is beyond it from the
# start.
CROSSING = random_prompts(96, (60, 59, 45, 29, 61))


def test_growing_past_the_border_equals_transformers(folder: Path, reference: Any) -> None:
    assert_equals_transformers(folder, reference, CROSSING)


def test_the_border_is_seen(folder: Path, reference: Any, engine: Engine) -> None:
    """Without recomputation the tokens would differ; otherwise the tests would prove nothing."""
    decode = DecodeConfig(max_new_tokens=32)
    crossed = [output.token_ids for output in complete(engine, CROSSING, decode)]
    stays = engine_of(folder)
    stays.scheduler._recompute_past_threshold = lambda group: None  # type: ignore[method-assign]
    assert [output.token_ids for output in complete(stays, CROSSING, decode)] != crossed


DECODES = {
    "greedy": DecodeConfig(max_new_tokens=32),
    "seeded": DecodeConfig(max_new_tokens=32, temperature=1.0, seed=3, logprobs=1),
    "n": DecodeConfig(max_new_tokens=32, temperature=1.0, seed=3, n=3),
    "beams": DecodeConfig(max_new_tokens=32, num_beams=3, num_return_sequences=3),
    "contrastive": DecodeConfig(max_new_tokens=32, penalty_alpha=0.6, top_k=3),
}
NUM_SEQUENCES = {"greedy": 1, "seeded": 1, "n": 3, "beams": 3, "contrastive": 3}


@each("name", DECODES, quick=("greedy",))
def test_chunks_company_cached_prefixes_and_preemption_change_nothing_across_the_border(
    name: str, folder: Path, engine: Engine, preempted: list[SequenceGroup]
) -> None:
    decode = DECODES[name]
    preempted.clear()

    def tokens(engine: Engine, prompts: list[list[int]]) -> list[list[list[int]]]:
        return [[c.token_ids for c in output.completions] for output in generate(engine, prompts, decode)]

    alone = [tokens(engine, [prompt])[0] for prompt in CROSSING]
    assert tokens(engine, CROSSING) == alone
    # One row fits at its full length, but three rows do not; and no prompt fits one step.
    num_blocks = 24 * NUM_SEQUENCES[name] + 13
    small = engine_of(folder, max_batched_tokens=11, block_size=4, kv_cache_memory=str(num_blocks * BLOCK_BYTES))
    assert tokens(small, CROSSING) == alone
    assert preempted
    assert (
        tokens(small, CROSSING) == alone
    )  # with a prefix cache that has the prompts, some of them on both sides of the threshold


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


@pytest.mark.long
def test_contrastive_search_across_the_border_equals_its_definition(reference: Any, engine: Engine) -> None:
    for prompt, output in zip(CROSSING, complete(engine, CROSSING, DECODES["contrastive"]), strict=True):
        assert output.token_ids == contrastive_search(reference, prompt, 0.6, 3, 32)


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
    return phi3.read_config(ConfigReader(ROWS["phi3"].json(changes), "config.json"))


@each("kind", ["longrope", "su", "yarn"])
def test_older_spellings_of_longrope(kind: str) -> None:
    scaling = {"type": kind, "short_factor": SHORT, "long_factor": LONG}
    assert read(rope_scaling=scaling) == read(rope_scaling=LONGROPE)
    assert read(rope_scaling=scaling).capabilities.long_rope_threshold == BORDER
    assert read().capabilities.long_rope_threshold is None


def test_long_texts_of_phimoe_use_the_long_factors(tmp_path: Path) -> None:
    """transformers uses the short factors for every length, so its model has the long ones as short ones."""
    reference = ROWS["phimoe"].write(tmp_path, rope_parameters=MOE_LONGROPE | {"short_factor": LONG})
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] |= {"short_factor": MOE_LONGROPE["short_factor"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = engine_of(tmp_path)
    for length, is_equal in ((60, False), (61, True)):
        (prompt,) = random_prompts(96, (length,))
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert torch.allclose(all_logits(engine, prompt), expected, atol=TOLERANCE, rtol=0) == is_equal
