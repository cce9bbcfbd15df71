"""Static scales of the KV cache: from the largest keys and values of calibration, in our files and in files of other
tools."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from conf.errors import UserError
from conf.quantization import KVCacheFormat, KVCacheScales, QuantConfig, QuantizedFormat
from conf.schema import QuantizeConfig, RunConfig, Task
from conf.tasks import PredictConfig
from kernels.kv_format import StaticFloat8, StaticInt8, Unquantised
from models.config import ConfigReader
from models.registry import find_architecture
from pipelines.loading.load_engine import load_engine
from quantization.kv_scales import attention_names
from quantization.layouts.kv_cache import read_kv_cache_scheme
from tests.helpers.builders import all_logits, engine_of, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS
from tests.helpers.deepseek import V3_GROUPS, build
from tests.helpers.quantized_models import AWQ, INT4, INT8, STATIC_CACHES, make, quantize_run, random_rows, write_rows

PROMPT = list(range(5, 40))
ROWS = random_rows(14, 16)  # 6 to calibrate and 8 for the report
STATIC_INT8, STATIC_FP8 = (QuantConfig(**cache) for cache in STATIC_CACHES.values())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_llama(tmp_path / "float", num_key_value_heads=2)
    return tmp_path / "float"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def largest_in_transformers(folder: Path, rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the largest magnitude [G] of each layer's keys and values in transformers' cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    largest: dict[str, torch.Tensor] = {}
    for row in rows:
        cache = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([row]), past_key_values=cache)
        for i, layer in enumerate(cache.layers):
            for kind, kept in (("k", layer.keys), ("v", layer.values)):  # [1, G, T, D]
                name = f"model.layers.{i}.self_attn.{kind}_scale"
                maximum = kept.abs().amax((0, 2, 3))
                largest[name] = torch.maximum(maximum, largest.get(name, maximum))
    return largest


@each(("quant", "highest"), [(STATIC_INT8, 127), (STATIC_FP8, 448)])
def test_the_largest_of_each_head_meets_the_largest_code(
    quant: QuantConfig, highest: int, source: Path, data: Path, tmp_path: Path
) -> None:
    run = quantize_run(source, quant, tmp_path / "made", data, num_samples=6)
    make(run, tmp_path / "run")
    tensors, before = tensors_in(tmp_path / "made"), tensors_in(source)
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    assert tensors.keys() == before.keys()
    assert all(tensor.equal(before[name]) for name, tensor in tensors.items())
    assert all(scale.shape == (2, 1, 1) and scale.dtype == torch.float32 for scale in scales.values())
    # Which six rows calibrate is random: none exceeds the maximum of all rows, and the maximum of one row is checked
    # below.
    everything = largest_in_transformers(source, ROWS)
    assert scales.keys() == everything.keys()
    for name, scale in scales.items():
        assert (scale.flatten() * highest <= everything[name] * (1 + 1e-5)).all()  # float32 in another order
        assert (scale.flatten() * highest > everything[name] * 0.3).all()


def test_one_row_gives_the_scales_that_a_formula_gives(source: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [ROWS[0]] * 9)
    make(quantize_run(source, STATIC_INT8, tmp_path / "made", data, num_samples=1), tmp_path / "run")
    tensors = tensors_in(tmp_path / "made")
    for name, largest in largest_in_transformers(source, ROWS[:1]).items():
        torch.testing.assert_close(tensors[name].flatten() * 127, largest, rtol=1e-5, atol=0)  # float32, another order


@each("quant", [STATIC_INT8, STATIC_FP8])
def test_transformers_reads_the_scales_and_gives_the_same_logits(
    quant: QuantConfig, source: Path, data: Path, tmp_path: Path
) -> None:
    make(quantize_run(source, quant, tmp_path / "made", data), tmp_path / "run")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    scale = tensors_in(tmp_path / "made")["model.layers.1.self_attn.k_scale"]
    assert theirs.model.layers[1].self_attn.k_scale.equal(scale)
    with torch.no_grad():
        logits = theirs(torch.tensor([PROMPT])).logits[0]
    ours, exact = all_logits(engine_of(tmp_path / "made"), PROMPT), all_logits(engine_of(source), PROMPT)
    # Codes differ only if a last bit of float32 decides between two: rarely, so that ours are far nearer to theirs than
    # to floats.
    assert (logits - ours).norm() < 0.2 * (exact - ours).norm()


def test_the_cache_of_a_reloaded_model_has_the_scales_and_no_others(source: Path, data: Path, tmp_path: Path) -> None:
    make(quantize_run(source, STATIC_FP8, tmp_path / "made", data), tmp_path / "run")
    engine, tensors = engine_of(tmp_path / "made"), tensors_in(tmp_path / "made")
    for i, layer in enumerate(engine.executor.cache.layers):
        for kind, cache in zip("kv", layer, strict=True):
            assert isinstance(cache.format, StaticFloat8)
            assert cache.format.scales.equal(tensors[f"model.layers.{i}.self_attn.{kind}_scale"].flatten())
            assert [part.dtype for part in cache.tensors] == [torch.float8_e4m3fn]
    assert engine.executor.kv_bytes_per_token == 2 * 2 * 2 * 16  # layers, keys and values, heads, channels
    same = replace(run_config(tmp_path / "made"), quant=STATIC_FP8)
    assert all_logits(load_engine(same, 3), PROMPT).equal(all_logits(engine, PROMPT))


@each("family", GOLDEN_FAMILIES)
def test_every_family_says_where_it_keeps_keys_and_values(family: str) -> None:
    reader = ConfigReader.from_folder(GOLDENS / family)
    architecture = find_architecture(reader)
    with torch.device("meta"):
        model = architecture.build(architecture.read_config(reader))
    names = attention_names(model)
    assert len(names) == model.config.num_hidden_layers
    assert len({name.replace(str(i), "N", 1) for i, name in enumerate(names)}) == 1  # one of each layer, in their order


@pytest.mark.long
def test_latents_have_a_scale_for_keys_alone(data: Path, tmp_path: Path) -> None:
    build(3, **V3_GROUPS).save_pretrained(tmp_path / "float")
    made = make(quantize_run(tmp_path / "float", replace(STATIC_INT8, scheme=INT8), tmp_path / "made", data), tmp_path)
    scales = {name: t for name, t in tensors_in(tmp_path / "made").items() if "self_attn.k_s" in name or "v_s" in name}
    assert scales.keys() == {f"model.layers.{i}.self_attn.k_scale" for i in range(3)}
    engine = engine_of(tmp_path / "made")
    keys, values = engine.executor.cache.layers[0]
    assert (type(keys.format), type(values.format)) == (StaticInt8, Unquantised)
    assert all_logits(engine, PROMPT).equal(all_logits(made, PROMPT))


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def changed(folder: Path, change: Change) -> Path:
    """Return the folder's files merged into one, with changed tensors and quantization_config."""
    tensors, config = tensors_in(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json", folder / "manifest.json"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def per_tensor(shape: tuple[int, ...]) -> Change:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["kv_cache_scheme"] |= {"strategy": "tensor", "observer": "minmax", "group_size": None}
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            tensors[name] = tensors[name].amax().reshape(shape).bfloat16()
            tensors[name.replace("scale", "zero_point")] = torch.zeros(1, dtype=torch.int8)

    return change


@each("shape", [(), (1,)])
def test_one_scale_for_all_heads_is_read(shape: tuple[int, ...], source: Path, data: Path, tmp_path: Path) -> None:
    """As in typical files for vLLM: in the model's dtype, with zero points without meaning."""
    make(quantize_run(source, STATIC_FP8, tmp_path / "made", data), tmp_path / "run")
    scale = tensors_in(tmp_path / "made")["model.layers.0.self_attn.k_scale"].amax().bfloat16()
    engine = engine_of(changed(tmp_path / "made", per_tensor(shape)))
    keys, _ = engine.executor.cache.layers[0]
    assert isinstance(keys.format, StaticFloat8)
    assert keys.format.scales.tolist() == [scale.item()] * 2
    exact = all_logits(engine_of(source), PROMPT)
    assert 0 < (all_logits(engine, PROMPT) - exact).norm() < 0.2 * exact.norm()  # steps of 1/16


K = "model.layers.1.self_attn.k_scale"


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, _: tensors.update({name: value(tensors[name]).contiguous()})


@pytest.mark.long
@each(
    ("change", "message"),
    [
        (lambda tensors, _: tensors.pop(K), f"missing: {K}"),
        (put(K, lambda t: t[:1]), rf"wrong shape: {K} \[1, 1, 1\], expected \[2, 1, 1\]"),
        (put(K, lambda t: t * 0), f"{K} has values that are not finite numbers above 0"),
        (put(K, lambda t: t * torch.nan), f"{K} has values that are not finite numbers above 0"),
        (lambda _, config: config.update(kv_cache_scheme=None), r"unexpected: model.layers.0.self_attn.k_scale, "),
        (lambda _, config: config["kv_cache_scheme"].update(num_bits=4), "int of 4 bits is not supported: only int and float of 8"),
        (lambda _, config: config["kv_cache_scheme"].update(strategy="channel"), "strategy='channel' is not supported"),
        (lambda _, config: config["kv_cache_scheme"].update(dynamic=True), "dynamic=True is not supported: only False"),
        (lambda _, config: config["kv_cache_scheme"].update(rotation=1), "settings that are not known: rotation"),
    ],
)  # fmt: skip
def test_damaged_files(change: Change, message: str, source: Path, data: Path, tmp_path: Path) -> None:
    make(quantize_run(source, replace(STATIC_INT8, scheme=INT8), tmp_path / "made", data), tmp_path / "run")
    with pytest.raises(UserError, match=message):
        engine_of(changed(tmp_path / "made", change))


@each(
    ("made", "requested", "message"),
    [
        (STATIC_INT8, STATIC_FP8, "quant.kv_cache=fp8 with static scales contradicts the checkpoint, whose KV cache is int8"),
        (STATIC_INT8, QuantConfig(kv_cache=KVCacheFormat.int8), "quant.kv_cache=int8 with dynamic scales contradicts the checkpoint"),
        (STATIC_INT8, QuantConfig(kv_cache=KVCacheFormat.int4), "int8 with static scales: leave quant.kv_cache out"),
        (QuantConfig(INT8), STATIC_INT8, "the checkpoint, which is quantised already, has no scales of the KV cache"),
    ],
)  # fmt: skip
def test_contradictions(
    made: QuantConfig, requested: QuantConfig, message: str, source: Path, data: Path, tmp_path: Path
) -> None:
    make(quantize_run(source, made, tmp_path / "made", data), tmp_path / "run")
    with pytest.raises(UserError, match=message) as caught:
        load_engine(replace(run_config(tmp_path / "made"), quant=requested), 3)
    assert "\n" not in str(caught.value)


def test_layouts_without_scales_of_the_cache_refuse_them(source: Path, data: Path, tmp_path: Path) -> None:
    quant = replace(STATIC_INT8, scheme=INT4, method=AWQ, group_size=32, skip=["lm_head", "*.down_proj"])
    run = quantize_run(source, quant, tmp_path / "made", data, format=QuantizedFormat.awq)
    with pytest.raises(UserError, match="quantize.format=awq has no scales of the KV cache: give compressed_tensors"):
        make(run, tmp_path / "run")


def predict_run(source: Path, quant: QuantConfig, data: Path) -> RunConfig:
    run = quantize_run(source, quant, None, data)
    return replace(run, task=Task.predict, quantize=QuantizeConfig(), predict=PredictConfig(batch_size=3))


def test_predicting_calibrates_once(source: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    first = load_engine(predict_run(source, STATIC_INT8, data), 3)
    monkeypatch.setattr("pipelines.loading.quantize.share.Quantizer", None)  # must not calibrate again
    again = load_engine(predict_run(source, STATIC_INT8, data), 3)
    assert [folder.name.rpartition("-")[0] for folder in (tmp_path / "quantized").iterdir()] == [
        "float-none-rtn-kv_int8"
    ]
    assert all_logits(first, PROMPT).equal(all_logits(again, PROMPT))
    assert first.executor.kv_bytes_per_token == 2 * 2 * 2 * 16


def test_other_methods_have_no_cache_scheme() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert read_kv_cache_scheme(ConfigReader(fp8, "config.json")) is None
    assert read_kv_cache_scheme(ConfigReader({}, "config.json")) is None


@each("cache", ["none", "int4"])
def test_formats_without_static_scales(cache: str) -> None:
    message = f"kv_cache_scales=static is not used by quant.kv_cache={cache}: leave it at dynamic, or give quant.kv_cache=int8 or fp8"
    with pytest.raises(UserError, match=message):
        QuantConfig(INT8, kv_cache=KVCacheFormat[cache], kv_cache_scales=KVCacheScales.static)
