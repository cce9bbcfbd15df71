"""Beam search compared with transformers, token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from pipelines.engine import Engine, Output
from pipelines.engine.request import SequenceGroup
from tests.helpers.builders import engine_of, generate, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import FOUR_PROMPTS
from tests.helpers.tiers import tiers

EOS = [3, 60, 61]  # frequent in the random model's beams, so that beams end at different lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return write_llama(folder, eos_token_id=EOS)


@pytest.fixture(scope="module")
def engine(folder: Path, model: LlamaForCausalLM) -> Engine:
    return engine_of(folder, batch_size=3)


def expected(model: LlamaForCausalLM, prompt: list[int], **settings: Any) -> tuple[list[list[int]], list[float]]:
    """Return transformers' sequences without their padding, and their scores."""
    eos = settings.pop("eos_token_id", EOS)
    output = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=eos,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    rows = []
    for row in output.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in (eos or [])]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows, output.sequences_scores.tolist()


def check(output: Output, rows: list[list[int]], scores: list[float]) -> None:
    assert [completion.token_ids for completion in output.completions] == rows
    assert [completion.score for completion in output.completions] == pytest.approx(
        scores, abs=1e-4
    )  # prefill rounding


@pytest.mark.parametrize("early_stopping", tiers([False, True, "never"], quick=[False], long=[True, "never"]))
@each("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@each("num_beams", [2, 5])
def test_equal_to_transformers(
    engine: Engine, model: LlamaForCausalLM, num_beams: int, early_stopping: bool | str, length_penalty: float
) -> None:
    settings = {
        "max_new_tokens": 12,
        "num_beams": num_beams,
        "early_stopping": early_stopping,
        "length_penalty": length_penalty,
        "num_return_sequences": num_beams,
    }
    outputs = generate(engine, FOUR_PROMPTS, DecodeConfig(**settings))  # type: ignore[arg-type]
    lengths = set()
    for prompt, output in zip(FOUR_PROMPTS, outputs, strict=True):
        check(output, *expected(model, prompt, **settings))
        lengths |= {len(completion.token_ids) for completion in output.completions}
    # Some beams ended by eos, so the stopping rules had to decide; a high penalty favours long beams.
    assert len(lengths) > 1 or length_penalty > 2


@each(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
        {"eos_token_id": None},
        {"max_new_tokens": 1},
        {"max_length": 35, "max_new_tokens": None},
        {"suppress_tokens": [5, 60], "bad_words_ids": [[3], [61], [7, 8], [9]], "min_length": 12},
        {"sequence_bias": [[[60], -4.0], [[5, 7], 3.0], [[3], 2.5]], "forced_eos_token_id": [61, 3]},
        {"forced_eos_token_id": 60, "max_new_tokens": 4},
    ],
)
def test_with_other_settings(engine: Engine, model: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 15, "num_beams": 3, "num_return_sequences": 2, **settings}
    ours = {k: v for k, v in settings.items() if k != "eos_token_id"} | {"ignore_eos": "eos_token_id" in settings}
    for prompt, output in zip(FOUR_PROMPTS, generate(engine, FOUR_PROMPTS, DecodeConfig(**ours)), strict=True):
        check(output, *expected(model, prompt, **{k: v for k, v in settings.items() if v is not None or "eos" in k}))


def test_with_greedy_rows_and_samples_in_any_order(engine: Engine, model: LlamaForCausalLM) -> None:
    decodes = [
        DecodeConfig(max_new_tokens=9, num_beams=4),
        DecodeConfig(max_new_tokens=12),
        DecodeConfig(max_new_tokens=7, temperature=1.0, seed=3, n=2),
        DecodeConfig(max_new_tokens=10, num_beams=2, length_penalty=2.0),
    ]
    alone = [generate(engine, [prompt], decode)[0] for prompt, decode in zip(FOUR_PROMPTS, decodes, strict=True)]
    check(alone[0], *expected(model, FOUR_PROMPTS[0], max_new_tokens=9, num_beams=4))
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        requests = [engine.request(i, FOUR_PROMPTS[i], decodes[i]) for i in order]
        together = {output.request_id: output for output in engine.generate(requests)}
        for i, output in enumerate(alone):
            assert [c.token_ids for c in together[i].completions] == [c.token_ids for c in output.completions]


@each("device", [{"max_batched_tokens": 8}, {"block_size": 2}, {"block_size": 4, "blocks": 26}])
def test_chunks_blocks_and_preemption_change_no_beam(
    folder: Path, engine: Engine, device: dict[str, Any], preempted: list[SequenceGroup]
) -> None:
    decode = DecodeConfig(max_new_tokens=20, num_beams=3, num_return_sequences=3, ignore_eos=True, prefix_cache=False)
    wanted = [[c.token_ids for c in output.completions] for output in generate(engine, FOUR_PROMPTS, decode)]
    preempted.clear()
    device = dict(device)
    if blocks := device.pop("blocks", None):
        device["kv_cache_memory"] = str(blocks * 4 * 2 * 2 * 2 * 16 * 4)
    other = engine_of(folder, batch_size=3, **device)
    assert [[c.token_ids for c in output.completions] for output in generate(other, FOUR_PROMPTS, decode)] == wanted
    assert bool(preempted) == bool(blocks)


def test_stop_strings_end_beams(chatty: Path) -> None:
    engine = engine_of(chatty, tokenizer="")
    decode = {"max_new_tokens": 30, "num_beams": 3, "num_return_sequences": 3, "ignore_eos": True}
    (free,) = generate(engine, [[0, 70, 71]], DecodeConfig(**decode))  # type: ignore[arg-type]
    text = free.completions[0].text
    assert text
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii())
    (output,) = generate(engine, [[0, 70, 71]], DecodeConfig(**decode, stop=[stop]))  # type: ignore[arg-type]
    stopped = [completion for completion in output.completions if completion.finish_reason.value == "stop"]
    assert stopped
    assert all(stop not in (completion.text or "") for completion in output.completions)
    (output,) = generate(engine, [[0, 70, 71]], DecodeConfig(**decode, stop=[stop], include_stop=True))  # type: ignore[arg-type]
    assert any((completion.text or "").endswith(stop) for completion in output.completions)


def test_streaming_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="decode.num_beams=2 cannot be streamed, .* give no streamer"):
        engine.request(0, [5], DecodeConfig(max_new_tokens=2, num_beams=2), print)


def test_requests_that_can_never_fit_are_refused(folder: Path, model: LlamaForCausalLM) -> None:
    small = engine_of(folder, block_size=4, kv_cache_memory=str(20 * 4 * 2 * 2 * 2 * 16 * 4))
    with pytest.raises(UserError, match="prompt and new tokens are 26, in 4 sequences, but the KV cache holds 80"):
        small.request(0, [5] * 6, DecodeConfig(max_new_tokens=20, num_beams=4))
    assert generate(small, [[5] * 6], DecodeConfig(max_new_tokens=20, num_beams=3))
    narrow = engine_of(folder, max_batched_tokens=3)
    with pytest.raises(UserError, match="the request has 4 sequences, but device.max_batched_tokens=3"):
        narrow.request(0, [5], DecodeConfig(max_new_tokens=2, num_beams=4))


def test_nothing_allowed_ends_with_no_token(engine: Engine) -> None:
    decode = DecodeConfig(max_new_tokens=5, num_beams=2, allowed_token_ids=[7], no_repeat_ngram_size=1)
    (output,) = generate(engine, [[7, 8]], decode)
    assert [c.finish_reason.value for c in output.completions] == ["no_token"]
