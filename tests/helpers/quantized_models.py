"""Calibrated schemes, and shortcuts to quantised models."""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from conf.compose import dump
from conf.quantization import (
    Activations,
    CalibrateConfig,
    GptqConfig,
    KVCacheFormat,
    KVCacheScales,
    QuantConfig,
    QuantizeConfig,
    QuantizedFormat,
    QuantMethod,
    QuantScheme,
    SmoothConfig,
)
from conf.schema import RunConfig, Task
from conf.tasks import PredictConfig
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from pipelines.loading.quantize import float_engine
from pipelines.tasks.quantize import run_quantize
from tests.helpers.builders import run_config

STATIC, DYNAMIC = Activations.static, Activations.dynamic
INT4, INT8, A8W8, FP8 = QuantScheme.int4, QuantScheme.int8, QuantScheme.a8w8, QuantScheme.fp8
GPTQ, AWQ, SMOOTHQUANT = QuantMethod.gptq, QuantMethod.awq, QuantMethod.smoothquant
STATIC_CACHES: dict[str, Any] = {
    f"{name}, static": {"kv_cache": KVCacheFormat[name], "kv_cache_scales": KVCacheScales.static}
    for name in ("int8", "fp8")
}
# The smallest groups, which do not divide some sizes of a golden Llama.
GROUPS: dict[str, Any] = {"group_size": 32, "overrides": {"*.down_proj": "int8"}}
CALIBRATED = {
    "int4 gptq": QuantConfig(INT4, GPTQ, **GROUPS),
    "int4 gptq, groups on the way": QuantConfig(
        INT4, GPTQ, **GROUPS, symmetric=False, gptq=GptqConfig(static_groups=False)
    ),
    "int4 awq": QuantConfig(INT4, AWQ, **GROUPS, symmetric=False),
    "int4 awq, auto_clip": QuantConfig(INT4, AWQ, **GROUPS, auto_clip=True),
    "int4 rtn, auto_clip": QuantConfig(INT4, **GROUPS, auto_clip=True),
    "int8 gptq": QuantConfig(INT8, GPTQ),
    "int8 gptq, static cache": QuantConfig(INT8, GPTQ, **STATIC_CACHES["int8, static"]),
    "a8w8 static": QuantConfig(A8W8, activations=STATIC),
    "a8w8 static smoothquant": QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC),
    "a8w8 dynamic smoothquant": QuantConfig(A8W8, SMOOTHQUANT, activations=DYNAMIC),
    "a8w8 static piecewise": QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC, smooth=SmoothConfig(piecewise=True)),
    "fp8 static": QuantConfig(FP8, activations=STATIC),
    "fp8 static per tensor": QuantConfig(FP8, activations=STATIC, per_tensor=True),
    "fp8 dynamic smoothquant, static cache": QuantConfig(
        FP8, SMOOTHQUANT, activations=DYNAMIC, **STATIC_CACHES["fp8, static"]
    ),
}
SHIFT = QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC, shift=True)  # for models with biases


def random_rows(count: int, length: int, end: Iterable[int] = ()) -> list[list[int]]:
    """Return rows of token ids from 5 to 90. Each row ends with `end`."""
    chosen = random.Random(0)
    return [[*(chosen.randrange(5, 90) for _ in range(length)), *end] for _ in range(count)]


def write_rows(file: Path, rows: list[list[int]]) -> Path:
    file.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))
    return file


def quantize_run(
    source: Path,
    quant: QuantConfig,
    target: Path | None,
    data: Path | None,
    tokenizer: str | None = None,
    quantize: QuantizeConfig | None = None,
    format: QuantizedFormat = QuantizedFormat.compressed_tensors,
    **calibrate: int,
) -> RunConfig:
    """Return a run with 6 samples of 16 tokens, unless `calibrate` overrides them."""
    run = run_config(source, allow_pickle=True)
    numbers = {"num_samples": 6, "sequence_length": 16, **calibrate}
    return replace(
        run,
        task=Task.quantize,
        model=replace(run.model, tokenizer=tokenizer),
        quant=quant,
        predict=PredictConfig(),
        calibrate=CalibrateConfig(None if data is None else str(data), **numbers),
        quantize=quantize or QuantizeConfig(None if target is None else str(target), format),
    )


def make(run: RunConfig, output_dir: Path) -> Engine:
    """Run task=quantize without its picture, which takes longer than the model. Return the engine whose model it
    quantised."""
    made: list[Engine] = []

    def assemble(*arguments: Any, **options: Any) -> Engine:
        made.append(quantize_assemble(*arguments, **options))
        return made[-1]

    quantize_assemble = float_engine.assemble
    with patch.object(float_engine, "assemble", assemble), patch("pipelines.loading.quantize.report.draw"):
        run_quantize(run, output_dir, dump)
    return made[0]  # other models may have been made meanwhile


def reloaded(folder: Path, kv_cache: str = "none") -> Engine:
    """Load the model as a user does, with no quant option except the cache's."""
    return load_engine(replace(run_config(folder), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache])), 3)


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
    "mxfp4": QuantConfig(QuantScheme.mxfp4),
    "nvfp4": QuantConfig(QuantScheme.nvfp4),
}
CACHES: dict[str, dict[str, Any]] = {format.name: {"kv_cache": format} for format in KVCacheFormat} | STATIC_CACHES


EVERY = {
    **SCHEMES,
    "int8 auto": QuantConfig(INT8, activations=Activations.auto),
    "int4, whole rows": QuantConfig(INT4, symmetric=False),
    "int4 gptq, act-order": replace(CALIBRATED["int4 gptq, groups on the way"], overrides={}),
    "fp8 per tensor": QuantConfig(FP8, activations=Activations.dynamic, per_tensor=True),
    "fp8 static per tensor": CALIBRATED["fp8 static per tensor"],
}
