"""Contrastive search compared with its definition, computed without a cache by transformers' model."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from pipelines.engine import Engine, executor
from pipelines.engine.request import SequenceGroup
from tests.helpers.builders import all_logits, complete, engine_of, generate, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import FOUR_PROMPTS
from tests.helpers.oracle import contrastive_search


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return write_llama(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, model: LlamaForCausalLM) -> Engine:
    return engine_of(folder, batch_size=3)


@each("alpha, k", [(0.6, 4), (0.2, 2), (0.95, 7)])
def test_equal_to_the_definition(engine: Engine, model: LlamaForCausalLM, alpha: float, k: int) -> None:
    outputs = complete(engine, FOUR_PROMPTS, DecodeConfig(max_new_tokens=10, penalty_alpha=alpha, top_k=k))
    assert [output.token_ids for output in outputs] == [
        contrastive_search(model, prompt, alpha, k, 10) for prompt in FOUR_PROMPTS
    ]
    assert outputs[0].token_ids != complete(engine, FOUR_PROMPTS, DecodeConfig(max_new_tokens=10))[0].token_ids


@pytest.mark.long
@each("device", [{"max_batched_tokens": 15}, {"block_size": 1}, {"block_size": 4, "blocks": 22}])
@each("prefix_cache", [True, False])
def test_chunks_blocks_preemption_and_company_change_nothing(
    folder: Path, engine: Engine, device: dict[str, Any], prefix_cache: bool, preempted: list[SequenceGroup]
) -> None:
    decode = DecodeConfig(max_new_tokens=25, penalty_alpha=0.6, top_k=5, prefix_cache=prefix_cache)
    wanted = [output.token_ids for output in complete(engine, FOUR_PROMPTS, decode)]
    preempted.clear()
    device = dict(device)
    if blocks := device.pop("blocks", None):
        device["kv_cache_memory"] = str(blocks * 4 * 2 * 2 * 2 * 16 * 4)
    other = engine_of(folder, batch_size=3, **device)
    for _ in range(2):  # the second time with the prompts in the prefix cache
        assert [output.token_ids for output in complete(other, FOUR_PROMPTS, decode)] == wanted
    assert bool(preempted) == bool(blocks)


def test_hidden_states_of_a_prompts_chunks_outlive_the_steps_that_gave_them(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one shape are replays of one step, which overwrite its outputs."""
    monkeypatch.setattr(executor, "DECODES_BEFORE_RECORDING", 0)
    decode = DecodeConfig(max_new_tokens=25, penalty_alpha=0.9, top_k=5)
    chunked = complete(engine_of(folder, max_batched_tokens=8), FOUR_PROMPTS[2:3], decode)
    assert chunked[0].token_ids == complete(engine, FOUR_PROMPTS[2:3], decode)[0].token_ids


def test_ends_lengths_and_log_probabilities(engine: Engine) -> None:
    decode = {"penalty_alpha": 0.6, "top_k": 4}
    (free,) = complete(engine, [[5, 6]], DecodeConfig(max_new_tokens=10, **decode, logprobs=2))  # type: ignore[arg-type]
    stop = free.token_ids[4]
    (stopped,) = complete(engine, [[5, 6]], DecodeConfig(max_new_tokens=10, stop_token_ids=[stop], **decode))  # type: ignore[arg-type]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (stopped.finish_reason.value, free.finish_reason.value) == ("stop", "length")
    assert free.logprobs is not None
    rows = all_logits(engine, [5, 6, *free.token_ids[:-1]])[1:].log_softmax(-1)
    for step, token, row in zip(free.logprobs, free.token_ids, rows, strict=True):
        assert step.logprobs[token] == pytest.approx(row[token].item(), abs=1e-5)


def test_can_be_streamed(chatty: Path) -> None:
    texts, pieces = engine_of(chatty, tokenizer=""), []  # type: ignore[var-annotated]
    decode = DecodeConfig(max_new_tokens=30, penalty_alpha=0.6, top_k=4, ignore_eos=True)
    request = texts.request(0, [0, 70, 71], decode, lambda sample, ids, text, logprobs: pieces.append(text))
    (output,) = texts.generate([request])
    assert "".join(pieces) == output.completions[0].text


def test_settings_that_contradict_contrastive_search_are_refused(engine: Engine) -> None:
    for wrong, message in [
        ({"top_k": 1}, "decode.top_k=1 is not allowed: give 2 to 256, the number of candidates"),
        (
            {"top_k": 4, "temperature": 0.5},
            "decode.temperature=0.5 is not allowed with decode.penalty_alpha=0.6",
        ),
        ({"top_k": 4, "num_beams": 2}, "decode.penalty_alpha=0.6 is not allowed with decode.num_beams=2"),
        ({"top_k": 4, "n": 2}, "decode.n=2 is not allowed with decode.penalty_alpha=0.6"),
    ]:
        with pytest.raises(UserError, match=message):
            engine.request(0, [5], DecodeConfig(penalty_alpha=0.6, **wrong))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="decode.top_k=0 is not allowed: give 2 to 256"):
        engine.request(0, [5], DecodeConfig(penalty_alpha=0.6))


@each("alpha", [0.6, 1.0])
def test_banned_tokens_are_not_candidates(engine: Engine, alpha: float) -> None:
    decode = DecodeConfig(max_new_tokens=12, penalty_alpha=alpha, top_k=5, allowed_token_ids=[7, 9])
    (output,) = complete(engine, [[5, 6]], decode)
    assert set(output.token_ids) <= {7, 9}


def test_nothing_allowed_ends_with_no_token(engine: Engine) -> None:
    decode = DecodeConfig(max_new_tokens=5, penalty_alpha=0.5, top_k=2, allowed_token_ids=[7], no_repeat_ngram_size=1)
    (output,) = generate(engine, [[7, 8]], decode)
    assert [(c.token_ids, c.finish_reason.value) for c in output.completions] == [([], "no_token")]
