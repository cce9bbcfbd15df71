"""Every scheme with every format of the cache: a row's tokens equal those of the row alone, in every use of the engine.

`python -m tests.quantization.test_cells` prints the table in quantization/README.md.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig
from conf.schema import DeviceConfig, DeviceType
from conf.speculation import Speculate, SpeculationConfig
from pipelines.engine import Engine
from pipelines.engine.request import SequenceGroup
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import REPOSITORY, generate, run_config, write_llama
from tests.helpers.catalog import SHARED_PROMPTS as PROMPTS
from tests.helpers.drafts import Hostile, at_random
from tests.helpers.quantized_models import (
    CACHES,
    SCHEMES,
    make,
    quantize_run,
    random_rows,
    write_rows,
)
from tests.helpers.tiers import in_turn, tiers

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
    """Also with prompts in chunks."""
    chunked = engine(max_batched_tokens=5, block_size=4)
    assert tokens(chunked, PROMPTS, CACHED) == alone
    outputs = generate(chunked, PROMPTS, CACHED)
    assert [[c.token_ids for c in output.completions] for output in outputs] == alone
    assert sum(output.num_cached_tokens for output in outputs) > 0


def check_preemption(alone: list[Any], beams: list[Any], engine: "Make", preempted: list[SequenceGroup]) -> None:
    bytes_per_token = engine().executor.kv_bytes_per_token
    small = engine(block_size=4, kv_cache_memory=str(MOST_BLOCKS * 4 * bytes_per_token))
    assert tokens(small, PROMPTS, GREEDY) == alone
    assert preempted
    assert tokens(small, PROMPTS, BEAMS) == beams


def check_speculation(alone: list[Any], beams: list[Any], engine: "Make") -> None:
    """Also with chunks and the prefix cache."""
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
    """Makes engines of one cell. `device`: fields of DeviceConfig."""

    def __init__(self, folder: Path, quant: QuantConfig) -> None:
        self._run = replace(run_config(folder), quant=quant)

    def __call__(self, **device: Any) -> Engine:
        return load_engine(replace(self._run, device=DeviceConfig(DeviceType.cpu, **device)), 3)


def tokens(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.completions] for output in generate(engine, prompts, decode)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for each calibrated scheme, and `float`."""
    folder = tmp_path_factory.mktemp("cells")
    write_llama(folder / "float", intermediate_size=96)
    data = write_rows(folder / "rows.jsonl", random_rows(20, 16))
    for name, quant in SCHEMES.items():
        if quant.needs_calibration:
            make(quantize_run(folder / "float", quant, folder / name, data), folder / "run")
    return folder


# A weight format and a cache format share no code: `make test-all` tests each of them with at least two partners.
CHOSEN = in_turn(SCHEMES, CACHES), in_turn(SCHEMES, CACHES, first=2)
CELLS = tiers(product(SCHEMES, CACHES), quick=CHOSEN[0][8:], long=sum(CHOSEN, []))


@pytest.mark.parametrize(("scheme", "kv_cache"), CELLS)
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
    """Return the table. `make test-matrix` runs all cells."""
    lines = [f"| {scheme} | " + " | ".join(["yes"] * len(CACHES)) + " |" for scheme in SCHEMES]
    heads = " | ".join(f"`kv_cache={name}`" for name in CACHES)
    return "\n".join([f"| `quant=` | {heads} |", "|---" * (len(CACHES) + 1) + "|", *lines])


def test_the_readme_has_the_table() -> None:
    assert table() in (REPOSITORY / "quantization" / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
