"""Soft prefixes compared with PEFT's and transformers' own models, and in every use of blocks by the engine."""

import copy
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import DType
from conf.speculation import Speculate, SpeculationConfig
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling, SequenceGroup
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import SMALL, all_logits, complete, generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import SHARED_PROMPTS
from tests.helpers.oracle import TOLERANCE, write_random
from tests.helpers.quantized_models import STATIC_CACHES, make, quantize_run, random_rows, write_rows
from tests.helpers.soft_prefixes import (
    PEFT_CONFIGS,
    engine_with,
    paddle_logits,
    peft_logits,
    write_paddle,
    write_peft,
)
from tests.helpers.tiers import tiers

LENGTHS = [1, 16, 37]  # within a block, a block of a CPU, and several with a partial one
PROMPT = [5, 9, 33, 2, 71, 40, 8, 8, 13, 27, 60]
GREEDY = DecodeConfig(max_new_tokens=12, ignore_eos=True, prefix_cache=False)
CACHED = replace(GREEDY, prefix_cache=True)
BEAMS = replace(GREEDY, max_new_tokens=8, num_beams=3, num_return_sequences=3)
SAMPLES = replace(GREEDY, n=3, temperature=1.0, seed=3)
CONTRASTIVE = replace(GREEDY, penalty_alpha=0.6, top_k=3, max_new_tokens=6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("base")
    return folder, write_llama(folder)


def greedy(logits_of: Any, count: int) -> list[int]:
    """Return greedy tokens, each from logits of the whole sequence."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(logits_of(tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.long
@each("num_tokens", LENGTHS)
@each("kind", PEFT_CONFIGS)
def test_equals_peft(base: tuple[Path, Any], tmp_path: Path, kind: str, num_tokens: int) -> None:
    (folder, model), path = base, tmp_path / f"{kind} {num_tokens}"
    reference = write_peft(path, copy.deepcopy(model), kind, num_tokens)
    engine, expected = engine_with(folder, {"p": path}), peft_logits(reference, PROMPT)
    torch.testing.assert_close(all_logits(engine, PROMPT, "p"), expected, atol=TOLERANCE, rtol=0)
    # The prefix matters: without it the same prompt has other logits.
    assert (all_logits(engine, PROMPT) - expected).abs().max() > 1
    tokens = greedy(lambda ids: peft_logits(reference, ids), 12)
    assert complete(engine, [PROMPT], GREEDY, "p")[0].token_ids == tokens
    chunked = engine_with(folder, {"p": path}, max_batched_tokens=4, block_size=4)
    assert complete(chunked, [PROMPT], CACHED, "p")[0].token_ids == tokens


@each("num_tokens", LENGTHS)
def test_positions_behind_pre_caches_begin_at_0(base: tuple[Path, Any], tmp_path: Path, num_tokens: int) -> None:
    """Compared with transformers in float64 with explicit positions."""
    (folder, model), path = base, tmp_path / str(num_tokens)
    path.mkdir()
    values = write_paddle(path / "pre_caches.npy", num_tokens)
    engine, reference = (
        engine_with(folder, {"file": path / "pre_caches.npy", "folder": path}),
        copy.deepcopy(model),
    )
    expected = paddle_logits(reference, values, PROMPT)
    for name in ("file", "folder"):
        torch.testing.assert_close(all_logits(engine, PROMPT, name).double(), expected, atol=TOLERANCE, rtol=0)
    assert (all_logits(engine, PROMPT) - expected).abs().max() > 1
    tokens = greedy(lambda ids: paddle_logits(reference, values, ids), 12)
    assert complete(engine, [PROMPT], GREEDY, "file")[0].token_ids == tokens


SIZES: dict[str, Any] = {"vocab_size": 96, "n_layer": 2, "n_head": 4, "eos_token_id": None}
FAMILIES: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, n_embd=64, n_positions=128)),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**SIZES, hidden_size=64)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=96,
            hidden_size=64,
            ffn_dim=88,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=64,
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SMALL, "head_dim": 16})),
}


@each("kind", ["prefix_tuning", "prompt_tuning"])
@each("family", FAMILIES)
def test_families_equal_peft(tmp_path: Path, family: str, kind: str) -> None:
    """Learned positions, ALiBi, norms of queries and keys."""
    folder = tmp_path / f"{family} {kind}"
    model = write_random(folder / "model", FAMILIES[family]())
    reference = write_peft(folder / "p", model, kind, 5)
    logits = all_logits(engine_with(folder / "model", {"p": folder / "p"}), PROMPT, "p")
    torch.testing.assert_close(logits, peft_logits(reference, PROMPT), atol=TOLERANCE, rtol=0)


def test_vectors_stand_behind_a_prefix_too(base: tuple[Path, Any], tmp_path: Path) -> None:
    """PEFT's logits of the last token, also with the prefix cache, and its mean hidden state, which excludes virtual
    tokens."""
    folder, model = base
    reference = write_peft(tmp_path / "p", copy.deepcopy(model), "prefix_tuning", 9)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    engine = engine_with(folder, {"p": tmp_path / "p"}, max_batched_tokens=4, block_size=4)
    vectors = {Pooling.mean: expected.hidden_states[-1][0].mean(0), Pooling.last: expected.logits[0, -1]}
    for pooling, num_cached in ((Pooling.mean, 0), (Pooling.last, 7)):
        request = engine.pooled_request(0, PROMPT, pooling, DecodeConfig(), "p")
        (output,) = engine.generate([request], on_step=engine.scheduler.check_integrity)
        assert output.num_cached_tokens == num_cached
        torch.testing.assert_close(output.pooled, vectors[pooling], atol=TOLERANCE, rtol=0)


def tokens_of(outputs: list[Output]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def write_static(source: Path, kv_cache: str, folder: Path) -> Path:
    """Make a model with static scales, which a prefix of normal numbers exceeds."""
    data = write_rows(folder / "rows.jsonl", random_rows(18, 16))
    make(
        quantize_run(source, QuantConfig(**STATIC_CACHES[kv_cache]), folder / "made", data, sequence_length=18),
        folder / "run",
    )
    return folder / "made"


CACHES = ["none", "int8", "fp8", "int4", *STATIC_CACHES]


@pytest.mark.long
@pytest.mark.parametrize("kv_cache", tiers(CACHES, quick=["none", "int8, static"], long=CACHES))
def test_the_engine_changes_no_token(
    base: tuple[Path, Any], tmp_path: Path, kv_cache: str, preempted: list[SequenceGroup]
) -> None:
    """In batches, chunks, small pools, with the prefix cache, samples, beams and contrastive search, with P within a
    block."""
    folder, model = base
    if kv_cache in STATIC_CACHES:
        folder, kv_cache = write_static(folder, kv_cache, tmp_path), "none"
    write_peft(tmp_path / "p", copy.deepcopy(model), "prefix_tuning", 9)
    prefixes = {"p": tmp_path / "p"}
    roomy = engine_with(folder, prefixes, kv_cache)
    modes = (GREEDY, BEAMS, SAMPLES, CONTRASTIVE)
    alone = [[tokens_of(generate(roomy, [prompt], mode, "p"))[0] for prompt in SHARED_PROMPTS] for mode in modes]
    assert [tokens_of(generate(roomy, SHARED_PROMPTS, mode, "p")) for mode in modes] == alone
    assert tokens_of(generate(roomy, SHARED_PROMPTS, GREEDY)) != alone[0]
    per_token = roomy.executor.kv_bytes_per_token
    small = engine_with(folder, prefixes, kv_cache, block_size=4, kv_cache_memory=str(20 * 4 * per_token))
    assert small.requests.num_blocks == 17
    assert [tokens_of(generate(small, SHARED_PROMPTS, mode, "p")) for mode in modes] == alone
    assert preempted
    chunked = engine_with(folder, prefixes, kv_cache, max_batched_tokens=5, block_size=4)
    assert [tokens_of(generate(chunked, SHARED_PROMPTS, mode, "p")) for mode in (GREEDY, CACHED, BEAMS)] == [
        alone[0],
        *alone[:2],
    ]
    outputs = generate(chunked, SHARED_PROMPTS, CACHED, "p")
    assert tokens_of(outputs) == alone[0]
    # The block in which the prefix ends is also found: 9 virtual tokens and 7 of a prompt's are 4 blocks of 4.
    assert [output.num_cached_tokens for output in outputs] == [7, 0, 11, 7, 0]
    drafted = replace(CACHED, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=False, num_tokens=5))
    assert tokens_of(generate(small, SHARED_PROMPTS, drafted, "p")) == alone[0]
    assert small.speculator.counts.num_drafted_tokens > 0


def stepped(engine: Engine, rows: list[tuple[list[int], str | None]]) -> list[Output]:
    """Run rows with prefixes of their own, and check the blocks after every step."""
    requests = [engine.request(i, prompt, CACHED, prefix=name) for i, (prompt, name) in enumerate(rows)]
    outputs = list(engine.generate(requests, on_step=engine.scheduler.check_integrity))
    return sorted(outputs, key=lambda output: output.request_id)


def test_rows_of_one_batch_have_prefixes_of_their_own(base: tuple[Path, Any], tmp_path: Path) -> None:
    """The prefix cache shares nothing between them. Equal log probabilities show that no row reads another's keys."""
    folder, model = base
    for seed, name in enumerate("ab"):
        write_peft(tmp_path / name, copy.deepcopy(model), "prefix_tuning", 6, seed)
    write_paddle(tmp_path / "c.npy", 6)
    prefixes = {"a": tmp_path / "a", "b": tmp_path / "b", "c": tmp_path / "c.npy"}
    names = [None, "a", "b", "c"]

    def engine() -> Engine:
        return engine_with(folder, prefixes, block_size=4, batch_size=4)

    rows: list[tuple[list[int], str | None]] = [(PROMPT, name) for name in names]
    alone = [stepped(engine(), [row])[0].completions for row in rows]
    shared = engine()
    assert [output.completions for output in stepped(shared, rows)] == alone
    again = stepped(shared, rows)
    assert [output.completions for output in again] == alone
    assert len({str(completions[0].token_ids) for completions in alone}) == 4
    assert [output.num_cached_tokens for output in again] == [8, 10, 10, 10]
    assert {output.num_prompt_tokens for output in again} == {len(PROMPT)}


def test_the_context_counts_the_prefix(base: tuple[Path, Any], tmp_path: Path) -> None:
    write_paddle(tmp_path / "p.npy", 100)
    engine = engine_with(base[0], {"p": tmp_path / "p.npy"})
    with pytest.raises(UserError, match="of which a prefix takes 100.*give at most 17 new tokens"):
        engine.request(0, PROMPT, DecodeConfig(max_new_tokens=18), prefix="p")
    with pytest.raises(UserError, match="29 tokens, which leaves no room for new ones"):
        engine.request(0, [5] * 29, DecodeConfig(), prefix="p")
    with pytest.raises(
        UserError, match="29 tokens, more than .* of which a prefix takes 100.: shorten it to at most 28"
    ):
        engine.pooled_request(0, [5] * 29, Pooling.last, DecodeConfig(), "p")
    (output,) = engine.generate([engine.pooled_request(0, [5] * 28, Pooling.last, DecodeConfig(), "p")])
    assert output.error is None
    request = engine.request(0, PROMPT, DecodeConfig(max_new_tokens="auto", max_length=128), prefix="p")
    assert request.params.max_new_tokens == 17
    assert len(complete(engine, [PROMPT], DecodeConfig(max_new_tokens="auto"), "p")[0].token_ids) == 17


def test_a_prefix_leaves_room_for_a_prompt(base: tuple[Path, Any], tmp_path: Path) -> None:
    write_paddle(tmp_path / "most.npy", 126)
    engine = engine_with(base[0], {"p": tmp_path / "most.npy"})
    assert len(complete(engine, [[5]], DecodeConfig(), "p")[0].token_ids) == 1
    write_paddle(tmp_path / "more.npy", 127)
    with pytest.raises(
        UserError, match="p has 127 virtual tokens, which leaves no room for a prompt .*: give at most 126"
    ):
        engine_with(base[0], {"p": tmp_path / "more.npy"})


def test_prefixes_and_prompts_without_room_are_refused(base: tuple[Path, Any], tmp_path: Path) -> None:
    write_paddle(tmp_path / "p.npy", 40)
    per_token = engine_with(base[0], {}).executor.kv_bytes_per_token
    prefixes = {"p": tmp_path / "p.npy"}
    with pytest.raises(
        UserError, match="model.prefixes.p needs 10 blocks of the KV cache, but 8 are free: raise device"
    ):
        engine_with(base[0], prefixes, block_size=4, kv_cache_memory=str(32 * per_token))
    engine = engine_with(base[0], prefixes, block_size=4, kv_cache_memory=str(60 * per_token))
    with pytest.raises(UserError, match="prompt and new tokens are 23, but the KV cache holds 20"):
        engine.request(0, PROMPT, replace(GREEDY, max_new_tokens=12), prefix="p")
    assert len(complete(engine, [PROMPT], replace(GREEDY, max_new_tokens=9), "p")[0].token_ids) == 9


@each("layout", ["pre_caches.npy", "prompt_tuning"])
def test_numbers_that_the_dtype_does_not_reach_are_refused(base: tuple[Path, Any], tmp_path: Path, layout: str) -> None:
    """Infinite keys would make every row after the prefix fail."""
    if layout == "pre_caches.npy":
        np.save(tmp_path / layout, np.full((2, 2, 2, 3, 16), 7e4, np.float32))
    else:
        write_peft(tmp_path / layout, copy.deepcopy(base[1]), layout, 3)
        save_file({"prompt_embeddings": torch.full((3, 64), 7e4)}, tmp_path / layout / "adapter_model.safetensors")
    run = run_config(base[0], prefixes={"p": str(tmp_path / layout)})
    message = r"model.prefixes.p has numbers up to 7e\+04, which model.dtype=float16 does not reach: give model.dtype"
    with pytest.raises(UserError, match=message):
        load_engine(replace(run, model=replace(run.model, dtype=DType.float16)), 1)


def test_unknown_names_and_paths_are_refused(base: tuple[Path, Any], tmp_path: Path) -> None:
    write_paddle(tmp_path / "p.npy", 3)
    engine = engine_with(base[0], {"story": tmp_path / "p.npy"})
    with pytest.raises(UserError, match="prefix 'stori' does not exist: there are story: did you mean story?"):
        engine.request(0, PROMPT, GREEDY, prefix="stori")
    with pytest.raises(UserError, match="p.npy' does not exist: there are story"):
        engine.request(0, PROMPT, GREEDY, prefix=str(tmp_path / "p.npy"))
    with pytest.raises(UserError, match=r"'x' does not exist: give model.prefixes=\{NAME: PATH\}"):
        engine_with(base[0], {}).request(0, PROMPT, GREEDY, prefix="x")


def test_prefix_values_beyond_static_scales_are_warned_of(
    base: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_static(base[0], "int8, static", tmp_path)
    np.save(tmp_path / "p.npy", 10 * write_paddle(tmp_path / "p.npy", 16).numpy())
    with caplog.at_level(logging.WARNING):
        engine_with(folder, {"p": tmp_path / "p.npy"})
    said = re.search(r"([\d.e+]+) % of it is beyond the static scales of the KV cache", caplog.text)
    assert said
    assert 10 < float(said[1]) <= 100
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        engine_with(base[0], {"p": tmp_path / "p.npy"}, "int8")
    assert "static scales" not in caplog.text
