"""What rows name beside an exported model has the bits of the model that it was made of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import RunConfig, Task
from conf.tasks import ExportConfig, PredictConfig, PrefixConfig
from pipelines.engine import Engine
from pipelines.export import run_export
from pipelines.loading import load_engine
from pipelines.prefix import run_prefix
from quantization.smoothing_record import FOLDS
from tests.helpers.adapters import ALL_LINEAR, Rows, change_adapter, load_with, outputs, write_adapter
from tests.helpers.adapters import completions as completions_of
from tests.helpers.builders import generate, run_config, write_llama
from tests.helpers.goldens import link
from tests.helpers.quantized_models import CALIBRATED, make, quantize_run, random_rows, write_rows
from tests.helpers.random_adapters import write_random_adapter
from tests.helpers.soft_prefixes import write_paddle, write_peft
from tests.models.test_model_parts import write_other

PROMPTS = [[3, 4, 5], [*range(20, 41)], [9]]
HEADS_COPY = "base_model.model.lm_head.base_layer.weight"  # which PEFT saves beside an adapted head
DECODE = DecodeConfig(max_new_tokens=6, ignore_eos=True, logprobs=2)


def exported(run: RunConfig, folder: Path) -> RunConfig:
    """Export the run's model; return the run of the artefact, with what else the run gives."""
    made = replace(run, task=Task.export, predict=PredictConfig(), export=ExportConfig(str(folder)))
    run_export(made, folder.parent / "run", lambda run, output_dir: "")
    return replace(run, model=replace(run.model, path=str(folder)), quant=QuantConfig())


def completions(engine: Engine, prefix: str | None = None) -> list[Any]:
    return [output.completions for output in generate(engine, PROMPTS, DECODE, prefix)]


@pytest.mark.parametrize("cache", ["none", "int4"])
def test_soft_prefixes(cache: str, tmp_path: Path) -> None:
    base = write_llama(tmp_path / "model")
    write_paddle(tmp_path / "paddle.npy", 5)
    write_peft(tmp_path / "tuned", base, "prefix_tuning", 17)
    write_peft(tmp_path / "embedded", LlamaForCausalLM.from_pretrained(tmp_path / "model"), "prompt_tuning", 3)
    run = replace(run_config(tmp_path / "model"), quant=QuantConfig(kv_cache=KVCacheFormat[cache]))
    paths = {name: str(tmp_path / name) for name in ("paddle.npy", "tuned", "embedded")}
    own = exported(run, tmp_path / "made")
    model, artefact = (load_engine(replace(each, model=replace(each.model, prefixes=paths)), 3) for each in (run, own))
    expected = [completions(model, prefix) for prefix in (None, *paths)]
    assert [completions(artefact, prefix) for prefix in (None, *paths)] == expected
    assert len({str(each) for each in expected}) == 4


def test_a_prefix_that_the_model_refuses(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_other(tmp_path / "model", "gemma3")
    write_paddle(tmp_path / "a.npy", 5, heads=2, channels=16)
    for run in (run_config(tmp_path / "model"), exported(run_config(tmp_path / "model"), tmp_path / "made")):
        with pytest.raises(UserError, match="a.npy is not possible with model_type=gemma3_text, whose sliding windows"):
            load_engine(replace(run, model=replace(run.model, prefixes={"a": str(tmp_path / "a.npy")})), 1)


def test_kept_prefixes(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    run = run_config(tmp_path / "model")
    own, kept = exported(run, tmp_path / "made"), tmp_path / "kept"
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt_token_ids": {[*range(20, 60)]}}}\n')
    prefix = PrefixConfig(data=str(tmp_path / "rows.jsonl"), output=str(kept))
    run_prefix(
        replace(own, task=Task.prefix, predict=PredictConfig(), prefix=prefix), tmp_path / "out", lambda run, folder: ""
    )
    with_kept = replace(own, device=replace(own.device, kept_prefixes=[str(kept)]))
    (found,) = generate(load_engine(with_kept, 1), [[*range(20, 61)]], DECODE)
    (expected,) = generate(load_engine(run, 1), [[*range(20, 61)]], DECODE)
    assert found.num_cached_tokens == 32
    assert found.completions == expected.completions
    with pytest.raises(UserError, match="kept"):
        load_engine(replace(run, device=replace(run.device, kept_prefixes=[str(kept)])), 1)


SCHEMES = [
    QuantConfig(),
    QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic, kv_cache=KVCacheFormat.int8),
    QuantConfig(QuantScheme.int4, group_size=32),
]


@pytest.mark.parametrize("quant", SCHEMES, ids=lambda quant: quant.scheme.name)
def test_adapters(quant: QuantConfig, tmp_path: Path) -> None:
    """Rows with either of two adapters and none, in one batch and alone, with one adapter resident and both."""
    write_llama(tmp_path / "model", intermediate_size=96)
    settings = {"r": 4, "target_modules": [*ALL_LINEAR, "lm_head"]}, {"r": 9, "target_modules": ["q_proj", "up_proj"]}
    folders = [
        write_adapter(tmp_path / f"adapter_{number}", tmp_path / "model", LlamaForCausalLM, number, **each)
        for number, each in enumerate(settings)
    ]
    change_adapter(folders[0], {}, {HEADS_COPY: None})
    run = replace(run_config(tmp_path / "model", max_adapters=1), quant=quant)
    own = exported(run, tmp_path / "made")
    rows: Rows = [*zip(PROMPTS, ("a", None, "b"), strict=True), (PROMPTS[0], None), (PROMPTS[1], "b")]
    model, artefact = (load_with(each, dict(zip("ab", folders, strict=True))) for each in (run, own))
    expected = outputs(model, rows, DECODE)
    assert completions_of(outputs(artefact, rows, DECODE)) == completions_of(expected)
    assert [completions_of(outputs(artefact, [row], DECODE))[0] for row in rows] == completions_of(expected)
    assert len({str(each.completions) for each in expected}) == len(rows)
    later = load_engine(replace(own, model=replace(own.model, max_adapters=2)), 5)
    for name, folder in zip("ab", folders, strict=True):
        later.load_adapter(name, folder)
    assert completions_of(outputs(later, rows, DECODE)) == completions_of(expected)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "chatglm3", "qwen2_moe"])
def test_adapters_of_other_families(family: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    run = run_config(link(family, tmp_path / "model"))
    adapter = write_random_adapter(tmp_path / "adapter", load_engine(run, 1).runner.model, rank=3, seed=1, std=0.2)
    own = exported(run, tmp_path / "made")
    rows: Rows = [(PROMPTS[0], "a"), (PROMPTS[1], None), (PROMPTS[2], "a")]
    model, artefact = (load_with(each, {"a": adapter}) for each in (run, own))
    expected = completions_of(outputs(model, rows, DECODE))
    assert completions_of(outputs(artefact, rows, DECODE)) == expected
    assert completions_of(outputs(model, [(prompt, None) for prompt, _ in rows], DECODE)) != expected


def test_an_adapter_of_a_layer_that_rows_cannot_adapt(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", tie_word_embeddings=True)
    kind = {"r": 4, "target_modules": ["lm_head"]}
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model", LlamaForCausalLM, **kind)
    change_adapter(adapter, {}, {HEADS_COPY: None})
    own = exported(run_config(tmp_path / "model"), tmp_path / "made")
    with pytest.raises(UserError, match="changes lm_head, which rows of an exported model cannot adapt: merge it"):
        load_with(own, {"a": adapter})


def test_adapters_of_a_smoothed_model(tmp_path: Path) -> None:
    """The scales that are folded into its weights go with it."""
    write_llama(tmp_path / "base", intermediate_size=96)
    write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    adapter = write_adapter(tmp_path / "a", tmp_path / "base", LlamaForCausalLM, r=4, target_modules=ALL_LINEAR)
    quant = CALIBRATED["a8w8 dynamic smoothquant"]
    make(quantize_run(tmp_path / "base", quant, tmp_path / "model", tmp_path / "rows.jsonl"), tmp_path / "quantize")
    own = exported(run_config(tmp_path / "model"), tmp_path / "made")
    rows: Rows = [(prompt, "a") for prompt in PROMPTS]
    model, artefact = (load_with(each, {"a": adapter}) for each in (run_config(tmp_path / "model"), own))
    assert completions_of(outputs(artefact, rows, DECODE)) == completions_of(outputs(model, rows, DECODE))
    (tmp_path / "made" / FOLDS).unlink()
    with pytest.raises(UserError, match="was trained on activations that smoothquant has changed in this model"):
        load_with(own, {"a": adapter})
