"""Layers with windows keep only the blocks that the next tokens attend to, and every output is as with one pool."""

import json
import random
from pathlib import Path

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType
from conf.speculation import Speculate
from models.causal_lm import CacheContent, CausalLM
from models.exported.description import EXPORT
from models.layers.attention import Heads
from pipelines.engine import Engine
from pipelines.engine.kv_cache import CacheRoom, allocate_kv_cache, cache_room, choose_sizes, choose_window_blocks
from pipelines.engine.request import SequenceGroup
from pipelines.engine.window_blocks import blocks_per_sequence
from pipelines.jobs.report import NO_PROGRESS
from pipelines.loading import assembly
from pipelines.loading.build_engine import build_engine
from pipelines.loading.model_source import ReadyModel, resolve_model
from pipelines.tasks import export_steps
from tests.helpers.builders import generate, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import write_other
from tests.helpers.exports import Exports, exported

KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"n": 3, "temperature": 1.0, "seed": 1, "logprobs": 2},
    {"num_beams": 3},
    {"temperature": 0.0, "speculate": Speculate.ngram, "logprobs": 2},
)
SIZES = [  # block_size, max_batched_tokens, kv_cache_memory, the sequences that windows have blocks for
    (16, 256, "8MB", 16),
    (4, 16, "2MB", 3),
    (16, 64, "0.6MB", 3),  # requests are preempted
    (64, 128, "4MB", 4),
    (1, 37, "4MB", 3),
]


def engine_with(folder: Path, window_blocks: bool, block_size: int, max_tokens: int, memory: str) -> Engine:
    device = DeviceConfig(DeviceType.cpu, block_size=block_size, max_batched_tokens=max_tokens, kv_cache_memory=memory)
    run = run_config(folder)
    ready = ReadyModel(resolve_model(run.model), run.model, run.quant)
    cpu = torch.device("cpu")
    return build_engine(ready, cpu, device, run.parallel, run.decode, 3, NO_PROGRESS, window_blocks)


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
    """With chunks, prefix hits, preemptions, forks, beams and drafts; with as few blocks as the sequences may need."""
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
