"""Models with recurrent layers: every feature with every other feature, pairwise. A row of a mixed batch has its bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import RunConfig
from conf.speculation import Speculate, SpeculationConfig
from kernels import build
from pipelines.engine import Engine
from pipelines.engine.request import Pooling, Request
from pipelines.loading.driver import DriverExecutor
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import run_config
from tests.helpers.cases import each
from tests.helpers.divided_engines import parallel
from tests.helpers.exports import Exports, on_export
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.pairwise import pairwise
from tests.helpers.quantized_models import SCHEMES
from tests.helpers.random_adapters import write_random_adapter
from tests.helpers.small_tokenizers import byte_level, save

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="torch's sums may differ in bits")]

FAMILIES = ["lfm2", "qwen3_5_text", "kimi_linear", "bamba"]  # short convolutions, two gated delta rules, Mamba-2
QUANTS = {name: quant for name, quant in SCHEMES.items() if not quant.needs_calibration}
QUANTS["q5_0"] = QuantConfig(QuantScheme.q5_0)
FORMS = ["model", "export", "tp", "pp"]
CELLS = pairwise(QUANTS, FAMILIES, [*KVCacheFormat], FORMS, [None, "one"])
DECODE = DecodeConfig(max_new_tokens=8, ignore_eos=True, prefix_cache=False)
DECODES = {
    "greedy": replace(DECODE, logprobs=3, prompt_logprobs=2),
    "prefix cache": replace(DECODE, logprobs=3, prefix_cache=True),
    "samples": replace(DECODE, n=3, temperature=1.2, seed=4, logprobs=1),
    "beams": replace(DECODE, num_beams=3, num_return_sequences=2),
    "contrastive": replace(DECODE, penalty_alpha=0.6, top_k=3),
    "guide": replace(DECODE, guide={"regex": "[ab]{2}[0-9]{5}"}, temperature=1.0, seed=2, logprobs=1, ignore_eos=False),
    "drafts": replace(DECODE, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=False, min_ngram=1)),
}
PROMPT = [7, 300, 90, 20, 44, 7, 300, 90, 20, 44, 7, 300, 90, 20, 44, 7, 300, 90]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model of each family, with a tokenizer and an adapter "one"."""
    base, tokenizer = tmp_path_factory.mktemp("families"), byte_level()
    for name in FAMILIES:
        sizes = {"vocab_size": tokenizer.get_vocab_size(), "intermediate_size": 96, "eos_token_id": 1}
        if name == "kimi_linear":  # groups of 32 channels divide the inputs of its layers
            sizes |= {"moe_intermediate_size": 32, "kv_lora_rank": 32, "v_head_dim": 16}
        HYBRID[name].write(base / name, **HYBRID[name].variants[0], **sizes)
        save(tokenizer, base / name)
        model = load_engine(run_config(base / name), 1).executor.model
        write_random_adapter(base / f"{name} one", model, rank=3, seed=1, std=0.15)
    return {name: base / name for name in FAMILIES}


def requests(engine: Engine, adapter: str | None) -> list[Request]:
    prompts = [PROMPT[: 4 + 2 * i] for i in range(len(DECODES))]
    decodes = zip(prompts, DECODES.values(), strict=True)
    rows = [engine.request(i, prompt, decode, adapter=adapter) for i, (prompt, decode) in enumerate(decodes)]
    return [*rows, engine.pooled_request(len(rows), PROMPT, Pooling.mean, DecodeConfig())]


def answers(engine: Engine, adapter: str | None, is_together: bool) -> list[Any]:
    rows = requests(engine, adapter)
    batches = [rows] if is_together else [[row] for row in rows]
    outputs = [o for batch in batches for o in engine.generate(batch, on_step=engine.scheduler.check_integrity)]
    outputs.sort(key=lambda output: output.request_id)
    assert [output.error for output in outputs] == [None] * len(rows)
    assert engine.scheduler.state_manager.num_free_slots == engine.scheduler.state_manager.num_slots
    return [
        (output.completions, output.prompt_logprobs, output.pooled is None or output.pooled.tolist())
        for output in outputs
    ]


def run_of(folder: Path, quant: QuantConfig, adapter: str | None) -> RunConfig:
    run = run_config(folder)
    adapters = {adapter: str(folder.with_name(f"{folder.name} {adapter}"))} if adapter else None
    return replace(run, model=replace(run.model, tokenizer="", adapters=adapters), quant=quant)


@each("scheme, family, kv_cache, form, adapter", CELLS)
def test_rows_of_all_features_together_have_the_bits_of_each_alone(
    scheme: str,
    family: str,
    kv_cache: KVCacheFormat,
    form: str,
    adapter: str | None,
    folders: dict[str, Path],
    exports: Exports,
) -> None:
    run = run_of(folders[family], replace(QUANTS[scheme], kv_cache=kv_cache), adapter)
    alone = answers(load_engine(run, 8), adapter, is_together=False)
    if form == "export":
        plain = replace(run, model=replace(run.model, adapters=None))
        run = on_export(run, exports.of(plain))
    elif form != "model":
        run = parallel(run, *((2, 1) if form == "tp" else (1, 2)))
    engine = load_engine(replace(run, device=replace(run.device, max_batched_tokens=19, block_size=4)), 8)
    try:
        for _ in range(2):  # the second time with the prefix cache
            assert answers(engine, adapter, is_together=True) == alone
    finally:
        if isinstance(engine.executor, DriverExecutor):
            engine.executor.driver.close()
