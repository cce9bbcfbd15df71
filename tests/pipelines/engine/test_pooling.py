"""Requests for a vector of their prompt: transformers' hidden states and logits, and bits that depend only on the
prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from kernels import build
from pipelines.engine import Engine
from pipelines.engine.request import Pooling, SequenceGroup
from tests.helpers.builders import embedding_weight, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.oracle import random_prompts

LENGTHS = (5, 1, 40, 17, 16, 128)
NEEDS_KERNELS = pytest.mark.skipif(build.library() is None, reason="torch's sums may run in an order of their own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def vectors(engine: Engine, prompts: list[list[int]], pooling: Pooling, **decode: Any) -> list[Tensor]:
    settings = DecodeConfig(**decode)
    vectors_by_id = {}
    for output in engine.generate(engine.pooled_request(i, p, pooling, settings) for i, p in enumerate(prompts)):
        engine.scheduler.check_integrity()
        assert output.completions == []
        vectors_by_id[output.request_id] = output.pooled
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    return [vectors_by_id[i] for i in range(len(prompts))]


def test_vectors_match_transformers(tmp_path: Path) -> None:
    reference, prompts = write_llama(tmp_path), random_prompts(96, LENGTHS)
    engine = engine_of(tmp_path)
    actual = {pooling: vectors(engine, prompts, pooling) for pooling in Pooling}
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
            wanted = {
                Pooling.last: reference.lm_head(hidden[-1]),
                Pooling.mean: hidden.double().mean(0).float(),
                Pooling.cls: hidden[0],
            }
        for pooling in Pooling:
            assert actual[pooling][i].dtype == torch.float32
            # Logits are of order 10, with float32 sums in another order; hidden states are of order 1.
            torch.testing.assert_close(actual[pooling][i], wanted[pooling], atol=1e-5, rtol=1e-5)


def test_a_mean_is_added_up_in_float64(folder: Path) -> None:
    """In float32, ones would vanish next to 2**24."""
    engine, hidden = engine_of(folder), torch.tensor([[2.0**24], [1.0], [1.0], [1.0], [1.0]])
    group = engine.add(engine.pooled_request(0, [5], Pooling.mean, DecodeConfig()))
    assert group.search is not None
    for chunk in hidden.split(2):
        group.search.observe(chunk)
    assert group.search.advance(group, torch.zeros(1, 1)) == []
    assert torch.equal(group.pooled, torch.tensor([(2**24 + 4) / 5]))


@NEEDS_KERNELS
@each("pooling", Pooling)
@each("device, batch_size", [({}, 1), ({"max_batched_tokens": 5, "block_size": 4}, 3), ({"max_batched_tokens": 33}, 6)])
def test_bits_depend_on_the_prompt_alone(
    folder: Path, pooling: Pooling, device: dict[str, Any], batch_size: int
) -> None:
    prompts = random_prompts(96, LENGTHS)
    expected = vectors(engine_of(folder), prompts, pooling, prefix_cache=False)
    engine = engine_of(folder, batch_size, **device)
    for order in (prompts, prompts[::-1]):  # the second time with the prefix cache
        again = vectors(engine, order, pooling)
        for wanted, vector in zip(expected if order is prompts else expected[::-1], again, strict=True):
            assert torch.equal(vector, wanted)


@NEEDS_KERNELS
@each("pooling", Pooling)
def test_with_generating_rows_and_after_preemption(
    folder: Path, pooling: Pooling, preempted: list[SequenceGroup]
) -> None:
    preempted.clear()
    first, second = random_prompts(96, (5, 30))
    (wanted,) = vectors(engine_of(folder), [second], pooling, prefix_cache=False)
    engine = engine_of(folder, max_batched_tokens=6, block_size=4, kv_cache_memory=str(10 * 4 * 2 * 2 * 2 * 16 * 4))
    assert engine.num_blocks == 10
    requests = [
        engine.request(0, first, DecodeConfig(max_new_tokens=12, prefix_cache=False)),
        engine.pooled_request(1, second, pooling, DecodeConfig(prefix_cache=False)),
    ]
    outputs = {output.request_id: output for output in engine.generate(requests)}
    assert [group.request.id for group in preempted] == [1]
    assert torch.equal(outputs[1].pooled, wanted)
    assert len(outputs[0].completions[0].token_ids) == 12
    assert engine.num_generated_tokens == 12


def test_the_last_token_alone_takes_what_the_prefix_cache_has(folder: Path) -> None:
    engine, prompt = engine_of(folder, block_size=4), random_prompts(96, (30,))[0]
    cached = []
    for pooling in (Pooling.mean, Pooling.last, Pooling.last, Pooling.cls, Pooling.mean):
        (output,) = engine.generate([engine.pooled_request(0, prompt, pooling, DecodeConfig())])
        cached.append(output.num_cached_tokens)
    assert cached == [0, 28, 28, 0, 0]  # a mean needs every hidden state, but it fills blocks that other requests reuse
    salted = engine.pooled_request(0, prompt, Pooling.last, DecodeConfig(cache_salt="mine"))
    assert next(engine.generate([salted])).num_cached_tokens == 0


def test_a_vector_that_is_not_finite_fails_its_own_row(folder: Path) -> None:
    engine, (good, bad) = engine_of(folder), random_prompts(96, (5, 6))
    token = next(id for id in bad if id not in good)
    embedding_weight(engine)[token] = float("nan")
    for pooling in Pooling:
        requests = [engine.pooled_request(i, p, pooling, DecodeConfig()) for i, p in enumerate((good, [token, *bad]))]
        errors = {output.request_id: output.error for output in engine.generate(requests)}
        assert errors[0] is None
        assert "not finite" in str(errors[1])


@each("prompt, decode, message", [
    ([], {}, "the prompt has no tokens"),
    ([96], {}, "prompt token id 96 is not in the vocabulary: give ids from 0 to 95"),
    ([5] * 129, {}, r"the prompt has 129 tokens, more than the model takes \(max_position_embeddings=128\): shorten it to at most 128"),
    ([5], {"temperature": 0.5}, "decode.temperature=0.5 is not used where nothing is generated: leave it out"),
    ([5], {"n": 2, "temperature": 1.0}, "is not used where nothing is generated"),
])  # fmt: skip
def test_refusals(folder: Path, prompt: list[int], decode: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine_of(folder).pooled_request(0, prompt, Pooling.last, DecodeConfig(**decode))


def test_a_prompt_larger_than_the_cache_is_refused(folder: Path) -> None:
    engine = engine_of(folder, block_size=4, kv_cache_memory=str(10 * 4 * 2 * 2 * 2 * 16 * 4))
    with pytest.raises(
        UserError, match="prompt and new tokens are 41, but the KV cache holds 40: raise device.kv_cache_memory$"
    ):
        engine.pooled_request(0, [5] * 41, Pooling.last, DecodeConfig())
