"""Layers with windows keep only the blocks that the next tokens attend to, and every output is as with one pool."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DeviceConfig, DeviceType, RunConfig
from conf.speculation import Speculate, SpeculationConfig
from models.causal_lm import CacheContent, CausalLM
from models.exported.description import EXPORT
from models.layers.attention import Heads
from pipelines.engine import Engine
from pipelines.engine.kv_cache import CacheRoom, allocate_kv_cache, cache_room, choose_sizes, choose_window_blocks
from pipelines.engine.proposers.model import ModelProposer
from pipelines.engine.request import SequenceGroup
from pipelines.engine.window_blocks import blocks_per_sequence
from pipelines.jobs.report import NO_PROGRESS
from pipelines.loading import assembly
from pipelines.loading.build_engine import build_engine
from pipelines.loading.kept_prefixes import open_kept, place_kept
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import ReadyModel, resolve_model
from pipelines.tasks import export_steps
from tests.helpers.builders import generate, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import write_other
from tests.helpers.divided import plan_of
from tests.helpers.exports import Exports, exported
from tests.helpers.kept_prefixes import DECODE, complete, keep

KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"n": 3, "temperature": 1.0, "seed": 1, "logprobs": 2},
    {"num_beams": 3},
    {"temperature": 0.0, "speculate": Speculate.ngram, "logprobs": 2},
)
SIZES = [  # block_size, max_batched_tokens, kv_cache_memory, the sequences that windows have blocks for
    (16, 256, "8MB", 16),
    (4, 16, "2MB", 3),
    (16, 64, "0.6MB", 3),
    (64, 128, "4MB", 4),
    (1, 37, "4MB", 3),
]


def engine_with(folder: Path, window_blocks: bool, block_size: int, max_tokens: int, memory: str) -> Engine:
    device = DeviceConfig(DeviceType.cpu, block_size=block_size, max_batched_tokens=max_tokens, kv_cache_memory=memory)
    run = run_config(folder)
    ready = ReadyModel(resolve_model(run.model), run.model, run.quant)
    cpu = torch.device("cpu")
    return build_engine(ready, cpu, device, run.parallel, run.decode, 3, NO_PROGRESS, window_blocks)


def on_cpu(run: RunConfig, **device: Any) -> Engine:
    engine = load_engine(replace(run, device=DeviceConfig(DeviceType.cpu, **device)), 3)
    assert 0 < engine.executor.cache.num_window_blocks < engine.num_blocks
    return engine


def outputs_of(engine: Engine, seed: int) -> list[object]:
    """Return the tokens and log probabilities of requests that share beginnings of different lengths."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 96) for _ in range(300)]
    outputs = []
    for decode in KINDS * 2:
        prompts = [
            shared[: draw.choice((0, 64, 100, 256, 300))] + [draw.randrange(3, 96) for _ in range(draw.choice((1, 70)))]
            for _ in range(3)
        ]
        config = DecodeConfig(max_new_tokens=draw.choice((1, 40)), ignore_eos=True, **decode)
        for output in generate(engine, prompts, config):
            outputs.append([(row.token_ids, row.logprobs) for row in output.completions])
    return outputs


def grown(engine: Engine) -> list[object]:
    """Return the tokens and log probabilities of three long requests that share no beginning."""
    config = DecodeConfig(max_new_tokens=150, ignore_eos=True, logprobs=2)
    outputs = generate(engine, [[token] * 200 for token in (3, 4, 5)], config)
    return [[(row.token_ids, row.logprobs) for row in output.completions] for output in outputs]


@each("family", ["gemma3", "gpt_oss", "llama4_text"], quick=["gemma3", "llama4_text"])
def test_outputs_are_those_of_one_pool(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks, prefix hits, forks, beams and drafts; with as few blocks as the sequences may need."""
    write_other(tmp_path, family, max_position_embeddings=1024)
    for seed, (*sizes, memory, num_sequences) in enumerate(SIZES):
        expected = outputs_of(engine_with(tmp_path, False, *sizes, "8MB"), seed)
        monkeypatch.setattr(assembly, "AUTO_SEQUENCES", num_sequences)
        engine = engine_with(tmp_path, True, *sizes, memory)
        assert 0 < engine.executor.cache.num_window_blocks < engine.num_blocks
        assert outputs_of(engine, seed) == expected


@pytest.mark.long
@each("family, memory", [("gemma3", "0.35MB"), ("gemma4", "0.6MB"), ("gpt_oss", "0.35MB"), ("llama4_text", "0.6MB")])
def test_exports_have_the_blocks_and_outputs_of_their_checkpoints(
    family: str,
    memory: str,
    exports: Exports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preempted: list[SequenceGroup],
) -> None:
    """With separate blocks, of which three growing requests need more than there are, and with one pool."""
    write_other(tmp_path, family, max_position_embeddings=1024)
    made = exports.of(run_config(tmp_path))
    monkeypatch.setattr(assembly, "AUTO_SEQUENCES", 3)
    engine, exported_engine = (engine_with(folder, True, 16, 64, memory) for folder in (tmp_path, made))
    sizes = [(loaded.num_blocks, loaded.executor.cache.num_window_blocks) for loaded in (engine, exported_engine)]
    assert sizes[0] == sizes[1]
    assert 0 < sizes[1][1] < sizes[1][0]
    expected = [outputs_of(engine, 0), *grown(engine)]
    preempted.clear()
    assert [outputs_of(exported_engine, 0), *grown(exported_engine)] == expected
    assert preempted
    exported_engine.scheduler.check_integrity()
    one_pool = engine_with(made, False, 16, 64, "8MB")
    assert grown(one_pool) == expected[1:]


@pytest.mark.long
def test_an_export_of_an_earlier_version_has_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph has no inputs for the blocks of windows."""
    write_other(tmp_path / "model", "gemma3", max_position_embeddings=1024)
    run = run_config(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "longest_window", None)
        patch.setattr(export_steps, "_with_window_blocks", lambda batch: batch)
        made = exported(run, tmp_path / "made")
    assert "windows" not in json.loads((made / EXPORT).read_text())
    engine = engine_with(made, True, 16, 64, "8MB")
    assert engine.executor.cache.num_window_blocks == 0
    assert outputs_of(engine, 0) == outputs_of(engine_with(tmp_path / "model", True, 16, 64, "8MB"), 0)


def test_a_sequence_owns_its_window_alone(tmp_path: Path) -> None:
    write_other(tmp_path, "gemma3", max_position_embeddings=2048)
    engine = engine_with(tmp_path, True, 16, 128, "8MB")
    window = engine.executor.model.longest_window
    assert window == 6
    windows, most = engine.scheduler.window_blocks, list[int]()
    group = engine.add(engine.request(0, [3] * 900, DecodeConfig(max_new_tokens=40, ignore_eos=True)))
    while group.sequences:
        engine.step()
        most.append(windows.num_blocks - windows.num_free_blocks)
        engine.scheduler.check_integrity()
    assert 0 < max(most) <= blocks_per_sequence(window, 16)
    assert most[-1] == 0
    refusal = r"the request has 30 sequences, but layers with windows have blocks for \d+: ask for fewer"
    with pytest.raises(UserError, match=refusal):
        engine.request(0, [3], DecodeConfig(n=30, temperature=1.0, max_new_tokens=1))
    num_pinned = engine.num_free_window_blocks
    assert num_pinned == windows.num_blocks - 128 // 16 - blocks_per_sequence(window, 16)
    engine.pin_windows([b"%d" % number for number in range(num_pinned)])
    assert (engine.num_free_window_blocks, engine.requests.max_window_sequences, windows.max_sequences) == (0, 1, 1)
    outputs = generate(engine, [[3] * 300, [5] * 300], DECODE)  # one after the other
    assert [output.error for output in outputs] == [None, None]


BEGINNING, OTHER = [3 + i * 7 % 91 for i in range(300)], [4 + i * 5 % 89 for i in range(250)]
ROWS = BEGINNING, BEGINNING[:96], BEGINNING[:128] + OTHER[100:200]
SHARED = [  # prompts, each with the number of tokens that it shares with a kept row
    ([*BEGINNING[:150], 7, 8], 150),
    ([*ROWS[2][:190], 9], 190),
    ([*BEGINNING, 3], 288),
    (BEGINNING[:288], 287),  # its last token is computed
    ([*BEGINNING[:96], 3, 4], 96),
    ([*ROWS[2], 5], 224),
    ([*OTHER, 6], 240),
]


@pytest.mark.long
@each(
    "family, kv_cache, changes",
    [
        ("gpt_oss", "int4", {"sliding_window": 70}),
        ("gemma3", "none", {"sliding_window": 70}),
        ("gemma3", "int8", {}),
        ("llama4_text", "fp8", {}),
        ("starcoder2", "none", {"sliding_window": 9}),  # in every layer
    ],
)
def test_kept_prompts_are_found_in_both_pools(
    family: str, kv_cache: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files and rows that share a beginning, with other sizes of blocks and steps, before and after evictions."""
    write_other(tmp_path / "model", family, max_position_embeddings=1024, **changes)
    monkeypatch.setattr(assembly, "AUTO_SEQUENCES", 3)
    run = replace(run_config(tmp_path / "model"), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache]))
    files = [tmp_path / "first", tmp_path / "second"]
    keep(run, files[0], *({"prompt_token_ids": row} for row in ROWS))
    keep(run, files[1], {"prompt_token_ids": OTHER})
    plain, draw, kept = load_engine(run, 3), random.Random(3), [str(file) for file in files]
    expected = [complete(plain, prompt, replace(DECODE, prefix_cache=False)).completions for prompt, _ in SHARED]
    fillers = [[draw.randrange(3, 96) for _ in range(400)] for _ in range(9)]
    for size, max_tokens in ((16, 256), (64, 128), (4, 16), (1, 37)):
        engine = on_cpu(run, block_size=size, max_batched_tokens=max_tokens, kept_prefixes=kept)
        assert engine.requests.max_window_sequences == 3
        for _ in range(2):
            outputs = [complete(engine, prompt) for prompt, _ in SHARED]
            assert [output.completions for output in outputs] == expected
            assert [output.num_cached_tokens for output in outputs] == [n // size * size for _, n in SHARED]
            generate(engine, fillers, DECODE)  # evict all blocks that are not pinned


@pytest.mark.long
@each("family", ["gemma3", "gpt_oss"])
def test_kept_windows_stay_while_rows_are_preempted(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preempted: list[SequenceGroup]
) -> None:
    write_other(tmp_path / "model", family, max_position_embeddings=1024)
    monkeypatch.setattr(assembly, "AUTO_SEQUENCES", 3)
    run, kept = run_config(tmp_path / "model"), tmp_path / "kept"
    keep(run, kept, {"prompt_token_ids": BEGINNING})
    sizes: dict[str, Any] = {"block_size": 16, "max_batched_tokens": 16}
    cache = on_cpu(run, kept_prefixes=[str(kept)], **sizes).executor.cache
    num_bytes = cache.num_window_blocks * cache.windowed.bytes_per_token + 58 * cache.unwindowed.bytes_per_token
    engine = on_cpu(run, kept_prefixes=[str(kept)], kv_cache_memory=str(16 * num_bytes), **sizes)
    assert engine.num_blocks == 58
    assert engine.requests.num_blocks == 58 - 18
    prompts = [BEGINNING + OTHER[:160], OTHER[:170], OTHER[40:210]]
    decode, plain = replace(DECODE, max_new_tokens=60), load_engine(run, 3)
    expected = generate(plain, prompts, decode)
    preempted.clear()
    for _ in range(3):
        outputs = generate(engine, prompts, decode)
        assert [output.completions for output in outputs] == [output.completions for output in expected]
        assert (outputs[0].num_cached_tokens or 0) >= 288  # more if its own blocks are still cached
    assert preempted
    assert complete(engine, [*BEGINNING, 3]).num_cached_tokens == 288
    monkeypatch.setattr(assembly, "AUTO_SEQUENCES", 16)
    roomy = on_cpu(run, **sizes)
    roomy.pin(1)  # from now on a kept block has different numbers in the two pools
    place_kept(roomy, open_kept([str(kept)], plan_of(run)))
    output = complete(roomy, [*BEGINNING, 3])
    assert (output.num_cached_tokens, output.completions) == (288, complete(plain, [*BEGINNING, 3]).completions)
    monkeypatch.setattr(assembly, "AUTO_SEQUENCES", 1)
    alone = load_engine(replace(run, device=DeviceConfig(DeviceType.cpu, **sizes)), 1)
    message = r"kept needs 18 blocks of layers with windows, but 0 are free: raise device.kv_cache_memory, or leave"
    with pytest.raises(UserError, match=message):
        place_kept(alone, open_kept([str(kept)], plan_of(run)))


@pytest.mark.long
@each("family", ["gemma3", "gpt_oss", "llama4_text"])
def test_a_draft_model_reads_whole_prompts(family: str, tmp_path: Path) -> None:
    """The model drafts for itself, so each draft is right. Prompts begin with a kept row or with cached blocks."""
    write_other(tmp_path / "model", family, max_position_embeddings=1024)
    run, kept, draw = run_config(tmp_path / "model"), tmp_path / "kept", random.Random(1)
    keep(run, kept, {"prompt_token_ids": BEGINNING})
    speculation = SpeculationConfig(model_path=str(tmp_path / "model"), adaptive=False)
    plain = DecodeConfig(max_new_tokens=40, ignore_eos=True, logprobs=2)
    drafted = replace(plain, speculate=Speculate.model, speculation=speculation)
    prompts = [BEGINNING[: draw.choice((0, 100, 256))] + [draw.randrange(3, 96) for _ in range(70)] for _ in range(6)]
    expected = generate(load_engine(run, 3), prompts, plain)
    for size, max_tokens in ((16, 256), (4, 400), (1, 333)):
        sizes = {"block_size": size, "max_batched_tokens": max_tokens}
        engine = on_cpu(replace(run, decode=drafted), kept_prefixes=[str(kept)], **sizes)
        proposer = engine.speculator.proposers[Speculate.model]
        assert isinstance(proposer, ModelProposer)
        with patch.object(proposer.executor, "execute", wraps=proposer.executor.execute) as execute:
            for _ in range(2):
                outputs = generate(engine, prompts, drafted)
                assert [output.completions for output in outputs] == [output.completions for output in expected]
        counts = engine.speculator.counts
        assert counts.num_accepted_tokens == counts.num_drafted_tokens > 0
        # A captured step of the draft model has no place for windows.
        assert {call.args[0].shape.num_windowed for call in execute.call_args_list} == {0}


def test_windows_without_a_gain_share_the_blocks_of_all_layers() -> None:
    """One process; two stages of which one has no window; windows alone; memory for fewer blocks than windows need."""
    heads, meta = Heads(4, 2, 8, 8), torch.device("meta")
    layers = [CacheContent(heads), *[CacheContent(heads, window=100)] * 5]
    one = allocate_kv_cache(layers, 1, 16, None, torch.float32, meta, 1, num_window_blocks=1)
    token = 2 * 2 * 8 * 4  # bytes of a layer: keys and values, heads, channels, float32
    room = cache_room(one, "16MB", 10**9)
    assert (room.bytes_per_token, room.window_bytes_per_token) == (token, 5 * token)
    per = blocks_per_sequence(100, 16)  # 11 blocks of the window and its tile, and 3
    assert per == 14
    # a window for 4,096 tokens, or 256 blocks, of the other layer: 14 / 256 * 5 times its bytes
    number = choose_window_blocks([room], 16, per, 64, 10**9, "16MB")
    assert number == int(16e6 * 14 / 256 / (16 * token * (1 + 5 * 14 / 256)))
    rest = room.with_window_blocks(number, 16)
    assert choose_sizes([rest], 16, 10**9, 0, "16MB")[0] == (16 * 10**6 - number * 16 * 5 * token) // (16 * token)
    assert choose_window_blocks([room], 16, per, 64, 5_000, "auto") == 64
    assert choose_window_blocks([room], 16, per, 64, 64, "auto") == 0  # no more blocks are wanted anyway
    assert choose_window_blocks([room], 16, per, 10**5, 10**9, "16MB") == 0
    together = room.with_window_blocks(0, 16)
    assert (together.num_bytes, together.bytes_per_token) == (16 * 10**6, 6 * token)
    stages = [room, CacheRoom(16 * 10**6, token, 0)]
    assert choose_window_blocks(stages, 16, per, 64, 10**9, "16MB") == number
    alone = CacheRoom(16 * 10**6, 0, 0, 5 * token)
    number = choose_window_blocks([alone], 16, per, 64, 5_000, "16MB")
    assert number == 16 * 10**6 // (16 * 5 * token)
    assert choose_sizes([alone.with_window_blocks(number, 16)], 16, 5_000, 0, "16MB") == (5_000, 0)
