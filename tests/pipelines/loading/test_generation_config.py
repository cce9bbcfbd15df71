"""A checkpoint's suggestions for decoding, compared with transformers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import conf.decoding
from conf.compose import compose_run_config
from conf.decoding import NEUTRAL, DecodeConfig
from conf.errors import UserError
from pipelines.loading.generation_config import decode_defaults
from tests.helpers.builders import complete, engine_of, write_llama
from tests.helpers.cases import each

EOS = 3


@each(
    ("values", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"repetition_penalty": 1.05, "num_beams": 3}, {"repetition_penalty": 1.05, "num_beams": 3}),
        ({"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": 0.6, "top_k": 4}),
        ({"max_length": 4096}, {"max_length": 128}),
        ({"max_length": 20, "max_new_tokens": None}, {"max_length": 20}),
        ({"max_new_tokens": 4096}, {"max_new_tokens": "auto"}),
        ({"max_new_tokens": 127}, {"max_new_tokens": 127}),
    ],
)
def test_settings_mean_what_they_mean_in_transformers(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert decode_defaults(values, context_length=128) == expected


@each(
    ("values", "unread"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}, "temperature, top_p"),
        ({"do_sample": True, "num_beams": 4, "epsilon_cutoff": 0.9}, "epsilon_cutoff, num_beams"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences"),
        ({"decoder_start_token_id": 0, "token_healing": True}, "decoder_start_token_id, token_healing"),
        ({"begin_suppress_tokens": [5], "diversity_penalty": 0.0, "num_beam_groups": 1}, "begin_suppress_tokens"),
    ],
)
def test_settings_that_are_not_taken_are_named(
    values: dict[str, Any], unread: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode_defaults(values, 128)
    assert f"generation_config.json has settings that are not used: {unread}" in caplog.text.splitlines()[0]
    assert caplog.text.rstrip().endswith(unread)


def test_settings_that_are_off_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        decode_defaults({"typical_p": 1.0, "remove_invalid_values": False, "transformers_version": "4.31.0"}, 128)
        decode_defaults({"output_scores": True, "forced_bos_token_id": None, "bos_token_id": 0}, 128)
    assert not caplog.text


@each("top_k", [-1, 0])
def test_two_numbers_mean_all_tokens(top_k: int) -> None:
    assert DecodeConfig(**decode_defaults({"top_k": top_k, "do_sample": True}, 128)).top_k == 0
    assert decode_defaults({"top_k": top_k}, 128) == {}
    with pytest.raises(UserError, match=r"decode.top_k=-2 is not allowed: give .* \(0 and -1 keep all tokens\)"):
        DecodeConfig(top_k=-2)


@each("values", [{"top_k": "many", "do_sample": True}, {"num_beams": 0}, {"repetition_penalty": -1}, {"bad_words_ids": [[]]},
                 {"suppress_tokens": [-1]}, {"sequence_bias": [[[5], "x"]]}, {"forced_eos_token_id": [[]]},
                 {"min_length": -1}])  # fmt: skip
def test_bad_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="generation_config.json: decode.*"):
        decode_defaults(values, 128)


def test_biases_bans_and_forced_tokens_match_transformers(tmp_path: Path) -> None:
    """With decode=checkpoint, greedy; test_beam_search compares beams. Prompts of one token have a forced first
    token."""
    model = write_llama(tmp_path)
    free = complete(engine_of(tmp_path), [[5, 6, 7], [9]], DecodeConfig(max_new_tokens=12))
    first, second = free[0].token_ids[:2]
    changed = 0
    off = DecodeConfig(max_new_tokens=12, min_new_tokens=0, forced_eos_token_id=[], forced_bos_token_id=[])
    for values in (
        {"suppress_tokens": free[0].token_ids[:3] + free[1].token_ids[:1]},
        {"bad_words_ids": [[first, second], [free[1].token_ids[0]], [EOS]]},
        {"sequence_bias": [[[first, second], -9.0], [[second], 1.0], [[free[1].token_ids[0]], -9.0]]},
        {"sequence_bias": [[[6, 7, EOS], 90.0]], "min_length": 7},
        {"sequence_bias": [[[EOS], 90.0]], "min_length": 9, "min_new_tokens": 7, "repetition_penalty": 1.3},
        {"forced_eos_token_id": [EOS, 8]},
        {"forced_bos_token_id": 11, "forced_eos_token_id": EOS, "suppress_tokens": [first]},
    ):
        suggested = {"max_new_tokens": 12, "eos_token_id": EOS, **values}
        (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
        decode = compose_run_config(["decode=checkpoint"]).decode
        outputs = complete(engine_of(tmp_path), [[5, 6, 7], [9]], decode)
        for prompt, plain, output in zip([[5, 6, 7], [9]], free, outputs, strict=True):
            expected = model.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **suggested)
            assert output.token_ids == expected[0, len(prompt) :].tolist(), values
            changed += output.token_ids != plain.token_ids
        if values.keys() <= {"forced_eos_token_id", "forced_bos_token_id", "min_length"}:
            assert complete(engine_of(tmp_path), [[5, 6, 7], [9]], off) == free
    assert changed > 9
    engine = engine_of(tmp_path)
    resolved = DecodeConfig(min_length=40).resolved({"min_new_tokens": 3, "min_length": 5})
    assert (resolved.min_length, resolved.min_new_tokens) == (40, 0)
    wrong = {
        "sequence_bias": [[[999], 1.0]],
        "bad_words_ids": [[5, 999]],
        "forced_eos_token_id": 999,
        "suppress_tokens": [999],
    }
    for name, ids in wrong.items():
        with pytest.raises(UserError, match=r"token id .*999 is not in the vocabulary"):
            engine.request(0, [5], DecodeConfig(**{name: ids}))


@each("option", ["greedy", "sampling", "contrastive", "beam"])
def test_every_option_goes_with_a_checkpoint_that_suggests_beams(option: str) -> None:
    decode = compose_run_config([f"decode={option}"]).decode
    resolved = decode.resolved(decode_defaults({"num_beams": 3, "num_return_sequences": 2}, 128))
    assert resolved.num_return_sequences == (2 if option == "beam" else None)


def test_suggested_settings_may_be_switched_off(tmp_path: Path) -> None:
    write_llama(tmp_path)
    suggested = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 7,
        "top_p": 0.3,
        "length_penalty": 2.0,
        "max_length": 60,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    engine = engine_of(tmp_path)
    greedy = engine.requests.resolve(compose_run_config(["decode=greedy"]).decode)
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.length_penalty) == (0.0, None, None, None)
    # a row with its own settings in a greedy job
    sampled = engine.requests.resolve(greedy.replaced({"temperature": 1.0}))
    assert (sampled.top_k, sampled.top_p, sampled.length_penalty) == (7, 0.3, None)
    request = engine.request(0, [5, 6], greedy)
    assert (request.params.top_k, request.params.top_p, request.params.length_penalty) == (0, 1.0, 1.0)


@each(
    "options",
    [["decode=checkpoint", "decode.top_p=0.93"], ["decode=sampling", "decode.temperature=0", "decode.top_p=0.93"]],
)
def test_a_setting_that_stays_unused_is_told(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf.decoding.warn_once.cache_clear()
    write_llama(tmp_path)
    engine_of(tmp_path).requests.resolve(compose_run_config(options).decode)
    assert "decode.top_p=0.93 is not used with decode.temperature=0" in caplog.text


def test_explicit_settings_win_and_the_rest_is_filled(tmp_path: Path) -> None:
    write_llama(tmp_path)
    suggested = {"do_sample": True, "temperature": 0.6, "top_k": 7, "repetition_penalty": 1.3, "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    engine = engine_of(tmp_path)
    resolved = engine.requests.resolve(DecodeConfig(temperature=0.0, top_k=0))
    assert (resolved.temperature, resolved.top_k, resolved.repetition_penalty) == (0.0, 0, 1.3)
    assert (resolved.max_length, resolved.max_new_tokens) == (9, None)
    assert (
        engine.requests.resolve(DecodeConfig(max_new_tokens=30)).max_length is None
    )  # an explicit length is not reduced
    assert engine.requests.resolve(DecodeConfig(max_length=30)).max_length == 30
    assert all(getattr(resolved, name) is not None for name in NEUTRAL)
    assert engine.requests.resolve(resolved) == resolved
    plain = engine.requests.resolve(DecodeConfig())
    assert (plain.temperature, plain.top_k, plain.top_p) == (0.6, 7, 1.0)
    assert len(complete(engine, [[5, 6]], DecodeConfig())[0].token_ids) == 7
    assert len(complete(engine, [[5, 6]], DecodeConfig(max_new_tokens=8))[0].token_ids) == 8
