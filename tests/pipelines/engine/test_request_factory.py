"""Requests checked with numbers alone equal the requests of an engine with these numbers, and are refused alike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.thinking import ThinkingConfig
from models.capabilities import ModelCapabilities
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.request import ContextLimit
from pipelines.engine.request_factory import RequestFactory
from tests.helpers.builders import engine_of, write_llama
from tests.helpers.cases import each

CONFIG = EngineConfig(
    context=ContextLimit(128, "max_position_embeddings"),
    eos_token_ids=frozenset(),
    decode_defaults={},
    max_num_requests=3,
    max_batched_tokens=6,
    num_graph_sequences=3,
)
FACTORY = RequestFactory(None, 96, ModelCapabilities(), CONFIG, num_blocks=11, block_size=4)
BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * 4


def test_an_engine_makes_its_requests_with_such_a_factory(tmp_path: Path) -> None:
    write_llama(tmp_path)
    engine = engine_of(tmp_path, block_size=4, max_batched_tokens=6, kv_cache_memory=str(11 * BLOCK_BYTES))
    assert replace(engine.config, unavailable_proposers={}) == CONFIG
    assert replace(engine.requests, config=CONFIG) == FACTORY
    decode = DecodeConfig(max_new_tokens=5, seed=3)
    assert engine.request(7, [5, 6], decode) == FACTORY.make(7, [5, 6], decode)


@each(
    "changed, prompt, decode, message",
    [
        ({}, [96], {}, "prompt token id 96 is not in the vocabulary: give ids from 0 to 95"),
        ({}, [], {}, "the prompt has no tokens"),
        ({}, [5] * 10, {"max_new_tokens": 35}, "prompt and new tokens are 45, but the KV cache holds 44"),
        ({}, [5], {"max_new_tokens": 3, "num_beams": 7}, "7 sequences, but device.max_batched_tokens=6: ask for fewer"),
        ({}, [5], {"max_new_tokens": 3, "stop": ["x"]}, "decode.stop=.'x'. needs a tokenizer"),
        ({}, [5], {"thinking": ThinkingConfig(max_tokens=3)}, "decode.thinking.max_tokens needs a tokenizer: give"),
        (
            {"capabilities": ModelCapabilities(needs_whole_prompt=True)},
            [5] * 4,
            {"max_new_tokens": 3},
            "prompt and new tokens are 7, but this model's prompts cannot be computed in chunks and device.max_batched_tokens=6",
        ),
    ],
)
def test_requests_that_could_never_run_are_refused(
    changed: dict[str, Any], prompt: list[int], decode: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        replace(FACTORY, **changed).make(0, prompt, DecodeConfig(**decode))


def test_prompts_that_share_no_keys_do_without_the_prefix_cache() -> None:
    decode = DecodeConfig(max_new_tokens=3)
    assert FACTORY.make(0, [5], decode).params.prefix_cache
    scaled = replace(FACTORY, capabilities=ModelCapabilities(keys_depend_on_length=True))
    assert not scaled.make(0, [5], decode).params.prefix_cache
