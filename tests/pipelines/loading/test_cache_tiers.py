"""Engines with tiers below the KV cache give the bits of engines without them, also after a restart."""

import json
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.compose import compose_run_config
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig
from conf.saved import as_saved
from conf.schema import DType, RunConfig
from pipelines.engine import Engine, Output
from pipelines.engine.kv_tiers import KVTiers
from pipelines.loading.load_engine import load_engine
from tests.helpers.adapters import write_adapter
from tests.helpers.builders import KEY_VALUE_BYTES, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.command import run as command
from tests.helpers.command import run_interrupted
from tests.helpers.kept_prefixes import BEGINNING, DECODE, OTHER, complete, write_data
from tests.helpers.soft_prefixes import write_paddle

BLOCK = 16 * KEY_VALUE_BYTES  # bytes of a float32 block
PREFIXES = [[3 + (i * 7 + j * 11) % 89 for i in range(57)] for j in range(3)]
UNCACHED = replace(DECODE, prefix_cache=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def tiers_of(names: str, folder: Path, size: str = "2MB") -> list[str]:
    texts = {"memory": f"memory:{size}", "file": f"file:{folder / 'tier'}:{size}"}
    return [texts[name] for name in names.split()]


@contextmanager
def with_tiers(
    run: RunConfig, tiers: list[str], num_blocks: int = 8, block: int = BLOCK, **device: Any
) -> Iterator[Engine]:
    """Yield an engine with a pool of `num_blocks` blocks. At the end its file is complete and closed."""
    memory = str(num_blocks * block)
    engine = load_engine(
        replace(run, device=replace(run.device, kv_cache_memory=memory, kv_cache_tiers=tiers, **device)), 3
    )
    yield engine
    engine.close_tiers()


def in_order(engine: Engine, prompts: list[list[int]], decodes: list[DecodeConfig]) -> list[Output]:
    rows = enumerate(zip(prompts, decodes, strict=True))
    requests = (engine.request(number, prompt, decode) for number, (prompt, decode) in rows)
    return sorted(
        engine.generate(requests, on_step=engine.scheduler.check_integrity), key=lambda output: output.request_id
    )


NAMES = "memory", "file", "memory file"


@each(("tiers", "num_requests"), [("memory file", 40), *((name, 300) for name in NAMES)], quick=[("memory file", 40)])
def test_random_requests_are_equal_to_the_bit(folder: Path, tmp_path: Path, tiers: str, num_requests: int) -> None:
    """Three at once in a pool that holds hardly more, with limits that evict from the tiers too, beams and preemption."""
    generator, prompts, decodes = random.Random(num_requests), list[list[int]](), list[DecodeConfig]()
    beginnings = [*PREFIXES, BEGINNING, OTHER]
    for _ in range(num_requests):
        beginning = generator.choice(beginnings)
        tail = [generator.randrange(3, 96) for _ in range(generator.randrange(20))]
        prompts.append((beginning[: generator.randrange(1, len(beginning) + 1)] + tail)[:80])
        changes = [
            {},
            {"n": 2, "temperature": 1.0, "seed": 3},
            {"num_beams": 2, "logprobs": None},
            {"prompt_logprobs": 1},
        ]
        more: dict[str, Any] = generator.choice(changes) | {"cache_salt": generator.choice([None, None, "x"])}
        decodes.append(replace(DECODE, max_new_tokens=generator.randrange(1, 14), **more))
    expected = in_order(load_engine(run_config(folder), 3), prompts, [replace(d, prefix_cache=False) for d in decodes])
    size = str(2 * 4096 + 14 * (BLOCK + 64))  # 14 blocks in the file
    with with_tiers(run_config(folder), tiers_of(tiers, tmp_path, size), num_blocks=12) as engine:
        outputs = in_order(engine, prompts, decodes)
        without = load_engine(
            replace(run_config(folder), device=replace(run_config(folder).device, kv_cache_memory=str(12 * BLOCK))), 3
        )
        assert [output.completions for output in outputs] == [output.completions for output in expected]
        cached = sum(output.num_cached_tokens for output in outputs)
        assert cached > sum(output.num_cached_tokens for output in in_order(without, prompts, decodes))


CACHES = [(name.name, dtype) for name in KVCacheFormat for dtype in (DType.float32, DType.bfloat16)]


@pytest.mark.long
@each(("kv_cache", "dtype"), CACHES)
def test_every_cache_format_returns_to_the_bit(folder: Path, tmp_path: Path, kv_cache: str, dtype: DType) -> None:
    """From memory, from the file in use, and from the file after a restart, also with odd sizes of blocks."""
    run = replace(run_config(folder), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache]))
    run = replace(run, model=replace(run.model, dtype=dtype))
    plain = load_engine(run, 3)
    for size in (16, 5, 1):
        block, full = size * plain.executor.kv_bytes_per_token, 56 // size * size
        sizes: dict[str, Any] = {"num_blocks": -(-90 // size), "block": block, "block_size": size}
        for tiers in NAMES:
            place = tmp_path / f"{size} {tiers}"
            for is_restart in (False, True)[: 1 + ("file" in tiers)]:
                with with_tiers(run, tiers_of(tiers, place), **sizes) as engine:
                    for cached in (full if is_restart else 0, full):
                        for prompt in PREFIXES:
                            output = complete(engine, prompt)
                            assert output.completions == complete(plain, prompt, UNCACHED).completions
                            assert output.num_cached_tokens == cached, (size, tiers, is_restart)


@pytest.mark.long
def test_loaded_values_are_read(folder: Path, tmp_path: Path) -> None:
    """Other numbers in memory give other log probabilities, so the prompt is not computed again."""
    with with_tiers(run_config(folder), tiers_of("memory", tmp_path)) as engine:
        first = [complete(engine, prompt) for prompt in PREFIXES][0]
        tiers = engine.scheduler.block_manager.tiers
        assert isinstance(tiers, KVTiers)
        assert tiers.memory is not None
        tiers.memory._contents.bitwise_xor_(128)
        assert complete(engine, PREFIXES[0]).completions[0].logprobs != first.completions[0].logprobs


@pytest.mark.long
def test_salts_prefixes_and_adapters_keep_rows_apart(folder: Path, tmp_path: Path) -> None:
    """A soft prefix ends within a block, which the tier returns with the prompt's tokens."""
    write_paddle(tmp_path / "p.npy", 9)
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, folder, LlamaForCausalLM, seed=seed, target_modules=["q_proj", "v_proj"])
    run = run_config(
        folder, prefixes={"p": str(tmp_path / "p.npy")}, adapters={name: str(tmp_path / name) for name in "ab"}
    )
    plain = load_engine(run, 3)
    rows: list[tuple[DecodeConfig, str | None, str | None]] = [
        (replace(DECODE, cache_salt=salt), prefix, adapter)
        for salt in (None, "x", "y")
        for prefix, adapter in ((None, None), ("p", None), (None, "a"), (None, "b"))
    ]
    for size in (16, 4):
        place = tmp_path / f"blocks of {size}"
        for is_restart in (False, True):
            with with_tiers(
                run, tiers_of("memory file", place), 128 // size, BLOCK * size // 16, block_size=size
            ) as engine:
                for cached in (is_restart, True):
                    for decode, prefix, adapter in rows:
                        output = complete(engine, BEGINNING, decode, prefix, adapter)
                        expected = complete(plain, BEGINNING, replace(decode, prefix_cache=False), prefix, adapter)
                        assert output.completions == expected.completions
                        num_virtual = 9 if prefix else 0
                        num_filled = (num_virtual + len(BEGINNING) - 1) // size * size - num_virtual
                        assert output.num_cached_tokens == (num_filled if cached else 0)


@pytest.mark.long
def test_another_process_reads_the_file(tmp_path: Path) -> None:
    """With the bundled model, from the command line: after a process that was killed, and after one that ended."""
    text = "Once upon a time there was a little dog who lived in a big house with a red door and a green garden. " * 3
    names = [*"ABCDEFGH"] * 2
    data = write_data(tmp_path / "rows.jsonl", *({"prompt": f"{name} {text}"} for name in names))
    common = [
        f"predict.data={data}",
        "device=cpu",
        "decode.logprobs=2",
        "decode.max_new_tokens=8",
        "predict.batch_size=1",
    ]
    tier = [f"device.kv_cache_tiers=[file:{tmp_path / 'tier'}:50MB]", "device.kv_cache_memory=1MB"]
    killed = tmp_path / "killed"
    done = run_interrupted(signal.SIGKILL, killed, 12, *common, *tier, f"hydra.run.dir={killed}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    for name, more in {"plain": [], "first": tier, "second": tier}.items():
        done = command(*common, *more, f"hydra.run.dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        assert "damaged" not in done.stderr
    folders = [tmp_path / name for name in ("plain", "first", "second")]
    plain, first, second = ((folder / "predictions.jsonl").read_bytes() for folder in folders)
    assert plain == first == second
    cached = [json.loads((folder / "metrics.json").read_text())["num_cached_tokens"] for folder in folders]
    assert cached[0] < cached[1] <= cached[2]


@pytest.mark.long
def test_what_is_not_supported_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    run = run_config(folder)

    def refused(run: RunConfig, tiers: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message) as raised:
            load_engine(replace(run, device=replace(run.device, kv_cache_memory="1MB", kv_cache_tiers=tiers)), 3)
        assert "\n" not in str(raised.value)

    refused(run, ["memory:100"], rf"memory:100 does not fit: give from {BLOCK} \(one block\) to \d+ \(the memory that")
    refused(run, ["memory:1000TB"], "memory:1000000000000000 does not fit: give from")
    refused(run, [f"file:{tmp_path}:100"], "100 bytes hold no block: give at least")
    refused(run, [f"file:{tmp_path}:1000TB"], "bytes are more than the .* may take: give fewer bytes")
    refused(run, [f"file:{folder / 'config.json'}:1MB"], "cannot be written .*: give another folder")
    (tmp_path / "dynamic").mkdir()
    write_llama(tmp_path / "dynamic", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    refused(run_config(tmp_path / "dynamic"), ["memory:1MB"], "device.kv_cache_tiers is not possible with this model")
    drafted = ["decode.speculate=model", f"decode.speculation.model_path={folder}"]
    decode = compose_run_config(drafted).decode
    refused(
        replace(run, decode=decode), ["memory:1MB"], "not supported with decode.speculate=model, .*: leave one of them"
    )


@pytest.mark.long
def test_files_of_a_saved_run_have_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = compose_run_config(["device.kv_cache_tiers=[memory:1GB,file:a:b:2GB]"])
    assert as_saved(run).device.kv_cache_tiers == ["memory:1GB", f"file:{tmp_path}/a:b:2GB"]
