"""Adapters and prefixes of rows with an exported model give the bits of the source model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import RunConfig, Task
from conf.tasks import PredictConfig, PrefixConfig
from models.exported.description import EXPORT
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.predict import run_predict
from pipelines.tasks.prefix import run_prefix
from quantization.smoothing_record import FOLDS
from tests.helpers.adapters import ALL_LINEAR, Rows, change_adapter, load_with, outputs, write_adapter
from tests.helpers.adapters import completions as completions_of
from tests.helpers.builders import generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.exports import (
    A8W8,
    DECODE,
    FLOATS,
    INT4,
    INT8_INT4_CACHE,
    PROMPTS,
    Exports,
    exported,
    family_model,
    llama,
    on_export,
)
from tests.helpers.quantized_models import CALIBRATED, make, quantize_run, random_rows, write_rows
from tests.helpers.random_adapters import write_random_adapter
from tests.helpers.soft_prefixes import write_paddle, write_peft
from tests.helpers.written_models import GMASK, SOP, write_written

HEADS_COPY = "base_model.model.lm_head.base_layer.weight"  # PEFT saves it next to an adapted head


def completions(engine: Engine, prefix: str | None = None) -> list[Any]:
    return [output.completions for output in generate(engine, PROMPTS, DECODE, prefix)]


@pytest.mark.long
@each("quant", [FLOATS, INT8_INT4_CACHE])
def test_soft_prefixes(quant: QuantConfig, exports: Exports, tmp_path: Path) -> None:
    folder = tmp_path / quant.scheme.name
    run = llama(folder / "model", quant)
    write_paddle(folder / "paddle.npy", 5)
    for name, kind, length in (("tuned", "prefix_tuning", 17), ("embedded", "prompt_tuning", 3)):
        write_peft(folder / name, LlamaForCausalLM.from_pretrained(folder / "model"), kind, length)
    paths = {name: str(folder / name) for name in ("paddle.npy", "tuned", "embedded")}
    runs = run, on_export(run, exports.of(run))
    model, exported_engine = (
        load_engine(replace(variant, model=replace(variant.model, prefixes=paths)), 3) for variant in runs
    )
    expected = [completions(model, prefix) for prefix in (None, *paths)]
    assert [completions(exported_engine, prefix) for prefix in (None, *paths)] == expected
    assert len({str(result) for result in expected}) == 4


@pytest.mark.long
@each("family", ["bloom", "chatglm", "qwen"])
def test_soft_prefixes_of_other_families(family: str, exports: Exports, tmp_path: Path) -> None:
    write_written(tmp_path, family)
    write_paddle(tmp_path / "p.npy", 21, heads=4)
    run = run_config(tmp_path)
    prompts = [[*prompt, GMASK, SOP] if family == "chatglm" else prompt for prompt in PROMPTS]
    model, exported_engine = (
        load_engine(replace(variant, model=replace(variant.model, prefixes={"p": str(tmp_path / "p.npy")})), 3)
        for variant in (run, on_export(run, exports.of(run)))
    )
    expected = [generate(model, prompts, DECODE, name) for name in (None, "p")]
    outputs_by_prefix = [generate(exported_engine, prompts, DECODE, name) for name in (None, "p")]
    assert [[output.completions for output in batch] for batch in outputs_by_prefix] == [
        [output.completions for output in batch] for batch in expected
    ]


@pytest.mark.long
def test_a_prefix_that_the_model_refuses(exports: Exports, tmp_path: Path) -> None:
    run = family_model("gemma3", tmp_path / "model")
    write_paddle(tmp_path / "a.npy", 5, heads=2, channels=16)
    for variant in (run, on_export(run, exports.of(run))):
        with pytest.raises(UserError, match="a.npy is not possible with model_type=gemma3_text, whose sliding windows"):
            load_engine(replace(variant, model=replace(variant.model, prefixes={"a": str(tmp_path / "a.npy")})), 1)


def test_kept_prefixes(exports: Exports, tmp_path: Path) -> None:
    run, kept = llama(tmp_path / "model"), tmp_path / "kept"
    export_run = on_export(run, exports.of(run))
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt_token_ids": {[*range(20, 60)]}}}\n')
    prefix = PrefixConfig(data=str(tmp_path / "rows.jsonl"), output=str(kept))
    run_prefix(
        replace(export_run, task=Task.prefix, predict=PredictConfig(), prefix=prefix),
        tmp_path / "out",
        lambda run, folder: "",
    )
    with_kept = replace(export_run, device=replace(export_run.device, kept_prefixes=[str(kept)]))
    (output,) = generate(load_engine(with_kept, 1), [[*range(20, 61)]], DECODE)
    (expected,) = generate(load_engine(run, 1), [[*range(20, 61)]], DECODE)
    assert output.num_cached_tokens == 32
    assert output.completions == expected.completions
    with pytest.raises(UserError, match="kept"):
        load_engine(replace(run, device=replace(run.device, kept_prefixes=[str(kept)])), 1)


@pytest.mark.long
def test_one_run_exports_and_predicts(tmp_path: Path) -> None:
    """Its rows are those of the model itself. A resumed job uses the existing export if it is of the same model."""
    run, data, out = llama(tmp_path / "model"), tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text('{"prompt_token_ids": [3, 4, 5]}\n{"prompt_token_ids": []}\n{"prompt_token_ids": [9]}\n')
    decode = DecodeConfig(max_new_tokens=6)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model", LlamaForCausalLM, r=2, target_modules=["q_proj"])
    run = replace(run, model=replace(run.model, adapters={"a": str(adapter)}))
    predict = PredictConfig(data=str(data), batch_size=1, adapter="a")
    run = replace(run, decode=decode, quant=INT8_INT4_CACHE, predict=predict)
    run_predict(run, tmp_path / "model_itself", dump)
    export_run = replace(run, predict=replace(run.predict, export=True, max_errors=0))
    with pytest.raises(UserError, match="more than predict.max_errors=0 rows failed"):
        run_predict(export_run, out, dump)
    made = (out / "export" / EXPORT).stat()
    for changed, message in (
        ({"quant": INT4}, "quant contradicts .*/export"),
        (
            {"model": replace(run.model, path="models/tiny")},
            "cannot be resumed, because these values changed: .*export.model",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run_predict(replace(export_run, **changed), out, dump)
    run_predict(replace(export_run, predict=replace(export_run.predict, max_errors=1)), out, dump)
    assert (out / "export" / EXPORT).stat() == made
    for name in ("predictions.jsonl", "text_generation_result.txt"):
        assert (out / name).read_bytes() == (tmp_path / "model_itself" / name).read_bytes()
    floats = replace(run, quant=FLOATS)
    for name, other in (
        ("floats", floats),
        ("out", replace(floats, predict=replace(export_run.predict, max_errors=1))),
    ):
        run_predict(other, tmp_path / name, dump)  # in the folder of a finished job the model is exported again
    assert (out / "predictions.jsonl").read_bytes() == (tmp_path / "floats" / "predictions.jsonl").read_bytes()
    alone = replace(run, model=replace(run.model, path=str(out / "export")), quant=FLOATS)
    run_predict(alone, tmp_path / "alone", dump)
    assert (tmp_path / "alone" / "predictions.jsonl").read_bytes() == (out / "predictions.jsonl").read_bytes()
    with pytest.raises(UserError, match="model.keep_packed=true is not used by predict.export=true: leave it out"):
        run_predict(replace(export_run, model=replace(run.model, keep_packed=True)), tmp_path / "refused", dump)


def adapted(run: RunConfig, num: int) -> RunConfig:
    return replace(run, model=replace(run.model, max_adapters=num))


@pytest.mark.long
@each("quant", [FLOATS, A8W8, INT4])
def test_adapters(quant: QuantConfig, exports: Exports, tmp_path: Path) -> None:
    """Rows with two adapters and none, in one batch and alone, with one resident adapter and with both."""
    folder = tmp_path / quant.scheme.name
    run = llama(folder / "model", quant)
    settings = {"r": 4, "target_modules": [*ALL_LINEAR, "lm_head"]}, {"r": 9, "target_modules": ["q_proj", "up_proj"]}
    folders = [
        write_adapter(folder / f"adapter_{number}", folder / "model", LlamaForCausalLM, number, **kind)
        for number, kind in enumerate(settings)
    ]
    change_adapter(folders[0], {}, {HEADS_COPY: None})
    export_run = on_export(run, exports.of(run))
    rows: Rows = [*zip(PROMPTS, ("a", None, "b"), strict=True), (PROMPTS[0], None), (PROMPTS[1], "b")]
    adapters = dict(zip("ab", folders, strict=True))
    model, exported_engine = (load_with(adapted(its_run, 1), adapters) for its_run in (run, export_run))
    expected = outputs(model, rows, DECODE)
    assert completions_of(outputs(exported_engine, rows, DECODE)) == completions_of(expected)
    assert [completions_of(outputs(exported_engine, [row], DECODE))[0] for row in rows] == completions_of(expected)
    assert len({str(output.completions) for output in expected}) == len(rows)
    later = load_engine(adapted(export_run, 2), 5)
    for name, adapter in adapters.items():
        later.load_adapter(name, adapter)
    assert completions_of(outputs(later, rows, DECODE)) == completions_of(expected)


@pytest.mark.long
@each("family", ["gpt2", "bloom", "chatglm3", "qwen2_moe"])
def test_adapters_of_other_families(family: str, exports: Exports, tmp_path: Path) -> None:
    run = family_model(family, tmp_path / family)
    model = load_engine(run, 1).executor.model
    adapter = write_random_adapter(tmp_path / f"{family}-adapter", model, rank=3, seed=1, std=0.2)
    rows: Rows = [(PROMPTS[0], "a"), (PROMPTS[1], None), (PROMPTS[2], "a")]
    model, exported_engine = (load_with(its_run, {"a": adapter}) for its_run in (run, on_export(run, exports.of(run))))
    expected = completions_of(outputs(model, rows, DECODE))
    assert completions_of(outputs(exported_engine, rows, DECODE)) == expected
    assert completions_of(outputs(model, [(prompt, None) for prompt, _ in rows], DECODE)) != expected


@pytest.mark.long
def test_an_adapter_of_a_layer_that_rows_cannot_adapt(exports: Exports, tmp_path: Path) -> None:
    run = family_model("llama_tied_bias", tmp_path / "model")
    kind = {"r": 4, "target_modules": ["lm_head"]}
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model", LlamaForCausalLM, **kind)
    change_adapter(adapter, {}, {HEADS_COPY: None})
    with pytest.raises(
        UserError, match="changes lm_head, which rows of an exported model cannot adapt: merge the adapter"
    ):
        load_with(on_export(run, exports.of(run)), {"a": adapter})


@pytest.mark.long
def test_adapters_of_a_smoothed_model(tmp_path: Path) -> None:
    """The scales that are folded into its weights are exported, too."""
    write_llama(tmp_path / "base", intermediate_size=96)
    write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    adapter = write_adapter(tmp_path / "a", tmp_path / "base", LlamaForCausalLM, r=4, target_modules=ALL_LINEAR)
    quant = CALIBRATED["a8w8 dynamic smoothquant"]
    make(quantize_run(tmp_path / "base", quant, tmp_path / "model", tmp_path / "rows.jsonl"), tmp_path / "quantize")
    run = run_config(tmp_path / "model")
    export_run = on_export(run, exported(run, tmp_path / "made"))
    rows: Rows = [(prompt, "a") for prompt in PROMPTS]
    model, exported_engine = (load_with(its_run, {"a": adapter}) for its_run in (run, export_run))
    assert completions_of(outputs(exported_engine, rows, DECODE)) == completions_of(outputs(model, rows, DECODE))
    (tmp_path / "made" / FOLDS).unlink()
    with pytest.raises(UserError, match="was trained on activations that smoothquant has scaled in this model"):
        load_with(export_run, {"a": adapter})
