"""Every scheme with every format of the cache: a row's tokens are those of the row alone, whatever else the engine does.

`python -m tests.quantization.test_cells` prints the table of it in quantization/README.md.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DeviceConfig, DeviceType
from conf.speculation import Speculate, SpeculationConfig
from pipelines.engine import Engine
from pipelines.engine.request import SequenceGroup
from pipelines.loading import load_engine
from tests.helpers.builders import REPOSITORY, generate, run_config, write_llama
from tests.helpers.drafts import Hostile, at_random
from tests.helpers.quantized_models import (
    A8W8,
    CALIBRATED,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    STATIC_CACHES,
    make,
    quantize_run,
    random_rows,
    write_rows,
)

SCHEMES = {
    "none": QuantConfig(),
    "int8": QuantConfig(INT8),
    "int8, groups": QuantConfig(INT8, group_size=32),
    "int4": QuantConfig(INT4, group_size=32),
    "int4, zero points": QuantConfig(INT4, group_size=32, symmetric=False),
    "int4 gptq": replace(CALIBRATED["int4 gptq"], overrides={}),
    "int4 awq": replace(CALIBRATED["int4 awq, auto_clip"], overrides={}),
    "a8w8 dynamic": QuantConfig(A8W8, activations=DYNAMIC),
    "a8w8 static": CALIBRATED["a8w8 static"],
    "a8w8 smoothquant": CALIBRATED["a8w8 static smoothquant"],
    "fp8 dynamic": QuantConfig(FP8, activations=DYNAMIC),
    "fp8 static": CALIBRATED["fp8 static"],
}
CACHES: dict[str, dict[str, Any]] = {format.name: {"kv_cache": format} for format in KVCacheFormat} | STATIC_CACHES
BEGINNING = list(range(5, 15))
PROMPTS = [[*BEGINNING, 20], [21], [*BEGINNING, 22, 23, 24, 25], [*BEGINNING, 20], [30, 31, 32]]
GREEDY = DecodeConfig(max_new_tokens=12, ignore_eos=True, prefix_cache=False)
CACHED = replace(GREEDY, prefix_cache=True)
DRAFTED = replace(CACHED, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=False))
BEAMS = replace(GREEDY, max_new_tokens=8, num_beams=3, num_return_sequences=3)
MOST_BLOCKS = 14  # of 4 tokens: for one row with three beams, or two without


def check_batch(alone: list[Any], beams: list[Any], engine: "Make") -> None:
    assert tokens(engine(), PROMPTS, GREEDY) == alone


def check_beams(alone: list[Any], beams: list[Any], engine: "Make") -> None:
    assert tokens(engine(), PROMPTS, BEAMS) == beams


def check_prefix_cache(alone: list[Any], beams: list[Any], engine: "Make") -> None:
    """With prompts in chunks, too."""
    chunked = engine(max_batched_tokens=5, block_size=4)
    assert tokens(chunked, PROMPTS, CACHED) == alone
    outputs = generate(chunked, PROMPTS, CACHED)
    assert [[c.token_ids for c in output.completions] for output in outputs] == alone
    assert sum(output.num_cached_tokens for output in outputs) > 0


def check_preemption(alone: list[Any], beams: list[Any], engine: "Make", preempted: list[SequenceGroup]) -> None:
    bytes_per_token = engine().runner.kv_bytes_per_token
    small = engine(block_size=4, kv_cache_memory=str(MOST_BLOCKS * 4 * bytes_per_token))
    assert tokens(small, PROMPTS, GREEDY) == alone
    assert preempted
    assert tokens(small, PROMPTS, BEAMS) == beams


def check_speculation(alone: list[Any], beams: list[Any], engine: "Make") -> None:
    """With chunks and the prefix cache, too."""
    drafting = engine(max_batched_tokens=9, block_size=4)
    known = {(i, 0): row[0] for i, row in enumerate(alone)}
    drafting.speculator.proposers[Speculate.ngram] = Hostile(known, at_random(0.7))
    assert tokens(drafting, PROMPTS, DRAFTED) == alone
    drafted, accepted = drafting.speculator.counts
    assert 0 < accepted < drafted


CHECKS = {
    "batch": check_batch,
    "beams": check_beams,
    "prefix cache": check_prefix_cache,
    "speculation": check_speculation,
}


class Make:
    """Engines of one cell; `device` are fields of DeviceConfig."""

    def __init__(self, folder: Path, quant: QuantConfig) -> None:
        self._run = replace(run_config(folder), quant=quant)

    def __call__(self, **device: Any) -> Engine:
        return load_engine(replace(self._run, device=DeviceConfig(DeviceType.cpu, **device)), 3)


def tokens(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.completions] for output in generate(engine, prompts, decode)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each scheme that is calibrated, and `float`."""
    folder = tmp_path_factory.mktemp("cells")
    write_llama(folder / "float", intermediate_size=96)
    data = write_rows(folder / "rows.jsonl", random_rows(20, 16))
    for name, quant in SCHEMES.items():
        if quant.needs_calibration:
            make(quantize_run(folder / "float", quant, folder / name, data), folder / "run")
    return folder


def cells() -> list[Any]:
    """All of them; those that `make test` runs have every scheme and every cache."""
    pairs = [(scheme, kv_cache, i, j) for i, scheme in enumerate(SCHEMES) for j, kv_cache in enumerate(CACHES)]
    return [pytest.param(*names, marks=[] if i % len(CACHES) == j else pytest.mark.long) for *names, i, j in pairs]


@pytest.mark.parametrize(("scheme", "kv_cache"), cells())
def test_the_engine_changes_no_token(scheme: str, kv_cache: str, models: Path, preempted: list[SequenceGroup]) -> None:
    quant, folder = replace(SCHEMES[scheme], **CACHES[kv_cache]), models / "float"
    if quant.has_static_kv_cache:
        folder = models / f"{scheme} {kv_cache}"
        make(quantize_run(models / "float", quant, folder, models / "rows.jsonl"), models / "run")
        quant = QuantConfig()
    elif quant.needs_calibration:
        folder, quant = models / scheme, QuantConfig(kv_cache=quant.kv_cache)
    engine = Make(folder, quant)
    roomy = engine()
    alone = [tokens(roomy, [prompt], GREEDY)[0] for prompt in PROMPTS]
    beams = [tokens(roomy, [prompt], BEAMS)[0] for prompt in PROMPTS]
    for check in CHECKS.values():
        check(alone, beams, engine)
    assert not preempted
    check_preemption(alone, beams, engine, preempted)


def table() -> str:
    """The test fails where a cell is not true."""
    lines = [f"| {scheme} | " + " | ".join(["yes"] * len(CACHES)) + " |" for scheme in SCHEMES]
    heads = " | ".join(f"`kv_cache={name}`" for name in CACHES)
    return "\n".join([f"| `quant=` | {heads} |", "|---" * (len(CACHES) + 1) + "|", *lines])


def test_the_readme_has_the_table() -> None:
    assert table() in (REPOSITORY / "quantization" / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
