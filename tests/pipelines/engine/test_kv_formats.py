"""Every format of the cache: a row's tokens equal those of the row alone with the same format, in every use of the
engine."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig
from pipelines.engine import Engine
from pipelines.engine.request import SequenceGroup
from tests.helpers.builders import SHARED, all_logits, engine_of, generate, write_llama
from tests.helpers.catalog import BEGINNING, MARKS, SHARED_PROMPTS, link, write_other
from tests.helpers.deepseek import V3_GROUPS, build
from tests.helpers.quantized_models import STATIC_CACHES, make, quantize_run, random_rows, write_rows
from tests.helpers.tiers import in_turn

FORMATS = ["int8", "fp8", "int4"]
STATIC = list(STATIC_CACHES)
FAMILIES: dict[str, Callable[[Path], object]] = {
    "llama": write_llama,
    "bloom": lambda folder: link("bloom", folder),  # ALiBi
    "chatglm": lambda folder: link("chatglm", folder),  # prompts with bidirectional attention
    "gemma2": lambda folder: link("gemma2", folder),  # soft caps and windows
    "deepseek": lambda folder: build(3, **V3_GROUPS).save_pretrained(folder),  # latents: keys that are also the values
}
FAMILIES |= {name: functools.partial(write_other, family=name) for name in ("gemma3", "minimax_m2", "ministral3")}
GREEDY = DecodeConfig(max_new_tokens=12, ignore_eos=True, prefix_cache=False)
CACHED = DecodeConfig(max_new_tokens=12, ignore_eos=True)
BEAMS = DecodeConfig(max_new_tokens=8, ignore_eos=True, num_beams=3, num_return_sequences=3, prefix_cache=False)
MOST_BLOCKS = 14  # of 4 tokens: for one row with three beams, or two without


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder)
    return request.param, folder


@pytest.fixture(scope="module")
def made(family: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the family's model with static scales, or the float model for other cache formats."""
    name, source = family
    folder = tmp_path_factory.mktemp(f"{name}_made")
    data = write_rows(folder / "rows.jsonl", random_rows(18, 16, MARKS.get(name, ())))

    @functools.cache
    def of(kv_cache: str) -> Path:
        if kv_cache in FORMATS:
            return source
        quant = QuantConfig(**STATIC_CACHES[kv_cache])
        make(quantize_run(source, quant, folder / kv_cache, data, sequence_length=18), folder / "run")
        return folder / kv_cache

    return of


def cache_option(kv_cache: str) -> str:
    """Return the cache option of an engine: a model with static scales needs none."""
    return "none" if kv_cache in STATIC else kv_cache


def tokens(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.completions] for output in generate(engine, prompts, decode)]


def check(name: str, folder: Path, kv_cache: str, preempted: list[SequenceGroup]) -> None:
    """Compare the family's tokens in batches, beams, a small pool, chunks and with the prefix cache."""
    prompts = [[*prompt, *MARKS.get(name, ())] for prompt in SHARED_PROMPTS]

    def engine(**device: Any) -> Engine:
        return engine_of(folder, batch_size=3, allow_pickle=True, kv_cache=cache_option(kv_cache), **device)

    roomy = engine()
    greedy = [tokens(roomy, [prompt], GREEDY)[0] for prompt in prompts]
    beams = [tokens(roomy, [prompt], BEAMS)[0] for prompt in prompts]
    assert tokens(roomy, prompts, GREEDY) == greedy
    assert tokens(roomy, prompts, BEAMS) == beams

    small = engine(block_size=4, kv_cache_memory=str(MOST_BLOCKS * 4 * roomy.executor.kv_bytes_per_token))
    assert small.scheduler.block_manager.num_blocks == MOST_BLOCKS
    preempted.clear()
    assert tokens(small, prompts, GREEDY) == greedy
    assert preempted
    assert tokens(small, prompts, BEAMS) == beams

    if name != "chatglm":  # its prompts are neither split nor shared
        chunked = engine(max_batched_tokens=5, block_size=4)
        assert tokens(chunked, prompts, GREEDY) == greedy
        assert tokens(chunked, prompts, CACHED) == greedy
        outputs = generate(chunked, prompts, CACHED)
        assert [[c.token_ids for c in output.completions] for output in outputs] == greedy
        assert sum(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.long
def test_the_engine_changes_no_token(
    family: tuple[str, Path], made: Callable[[str], Path], preempted: list[SequenceGroup]
) -> None:
    """Two formats of each family, in turn."""
    name, _ = family
    for _, kv_cache in in_turn(range(2), FORMATS + STATIC, first=2 * [*FAMILIES].index(name)):
        check(name, made(kv_cache), kv_cache, preempted)


@pytest.mark.matrix
@pytest.mark.parametrize("kv_cache", FORMATS + STATIC)
def test_the_engine_changes_no_token_in_any_format(
    family: tuple[str, Path], made: Callable[[str], Path], kv_cache: str, preempted: list[SequenceGroup]
) -> None:
    check(family[0], made(kv_cache), kv_cache, preempted)


@pytest.mark.long
def test_logits_are_near_those_of_the_float_cache(family: tuple[str, Path], made: Callable[[str], Path]) -> None:
    name, folder = family
    prompt = [*BEGINNING, *MARKS[name]] if name == "chatglm" else [*BEGINNING, *range(40, 60)]
    exact = all_logits(engine_of(folder, allow_pickle=True), prompt)
    error = {}
    for kv_cache in FORMATS + STATIC:
        engine = engine_of(made(kv_cache), allow_pickle=True, kv_cache=cache_option(kv_cache))
        logits = all_logits(engine, prompt)
        error[kv_cache] = float((logits - exact).norm() / exact.norm())
    # Steps of 1/127, 1/16 and 1/15 of the rounded value. A small step may change the expert that a router chooses: then
    # there is no order.
    assert all(0 < size < 0.5 for size in error.values())
    assert name in ("deepseek", "minimax_m2") or error["int8"] < min(error["fp8"], error["int4"])


@pytest.mark.parametrize(
    ("kv_cache", "expected"),
    [("none", 2 * 16 * 4), ("int8", 2 * (16 + 4)), ("fp8", 2 * (16 + 4)), ("int4", 16 // 2 + 4 * 4 + 16 // 2 + 4)],
)
def test_the_pool_holds_what_its_bytes_say(tmp_path: Path, kv_cache: str, expected: int) -> None:
    write_llama(tmp_path)
    engine = engine_of(tmp_path, kv_cache=kv_cache, block_size=4, kv_cache_memory="1MB")
    layers, groups = 2, 2
    assert engine.executor.kv_bytes_per_token == layers * groups * expected
    num_blocks = engine.scheduler.block_manager.num_blocks
    assert num_blocks == 10**6 // (4 * layers * groups * expected)
    stored = sum(tensor.nbytes for tensor in engine.executor.cache.tensors)
    assert stored == num_blocks * 4 * engine.executor.kv_bytes_per_token <= 10**6
    assert engine.dtype == torch.float32


BABYLLAMA = SHARED / "data" / "models" / "babyllama_tok105"
WINDOW, NUM_WINDOWS = 250, 40


@pytest.mark.long
@pytest.mark.skipif(not BABYLLAMA.is_dir(), reason="needs the real models of ../shared")
def test_perplexity_of_a_real_model(tmp_path: Path) -> None:
    """The text of DECISIONS.md (KV cache), which reports +0.011, +0.37 and +0.71 %, with static scales +0.080 and +0.81
    %.

    The limits are the goals of the formats.
    """
    stories = (SHARED / "data" / "text" / "tiny_stories_944k.txt").read_text()
    text = stories[200_000 : 200_000 + WINDOW * NUM_WINDOWS * 2]
    (tmp_path / "calibration.txt").write_text(stories[-100_000:])
    nll = {}
    for kv_cache in ("none", *FORMATS, *STATIC):
        folder = BABYLLAMA
        if kv_cache in STATIC:
            folder, quant = tmp_path / kv_cache, QuantConfig(**STATIC_CACHES[kv_cache])
            data = tmp_path / "calibration.txt"
            run = quantize_run(BABYLLAMA, quant, folder, data, tokenizer="", num_samples=32, sequence_length=256)
            make(run, tmp_path / "run")
        engine = engine_of(folder, tokenizer="", kv_cache=cache_option(kv_cache))
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(text, True)
        windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(NUM_WINDOWS)]
        losses = [
            torch.nn.functional.cross_entropy(all_logits(engine, window)[:-1], torch.tensor(window[1:]))
            for window in windows
        ]
        nll[kv_cache] = torch.stack(losses).mean()
    rise = {kv_cache: float((nll[kv_cache] - nll["none"]).exp()) - 1 for kv_cache in FORMATS + STATIC}
    assert abs(rise["int8"]) < 0.001
    assert abs(rise["int8, static"]) < 0.001
    assert abs(rise["fp8"]) < 0.01
    assert abs(rise["fp8, static"]) < 0.01
    assert abs(rise["int4"]) < 0.02
