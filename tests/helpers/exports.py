"""Exports of small models, each made once for all processes of a test session, and requests to them."""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DType, RunConfig, Task
from conf.tasks import ExportConfig, PredictConfig
from models.formats.manifest import verify_manifest
from pipelines.engine import Engine
from pipelines.tasks.export import run_export
from tests.helpers.builders import generate, run_config, write_llama
from tests.helpers.catalog import DEEPSEEK, MARKS, link, write_family
from tests.helpers.catalog import FAMILIES as WITHOUT_MARKS
from tests.helpers.hybrid_families import HYBRID

PROMPTS = [[3, 4, 5], [*range(20, 41)], [9]]
DECODE = DecodeConfig(max_new_tokens=6, ignore_eos=True, logprobs=2)
FLOATS, AUTO = QuantConfig(), QuantConfig(activations=Activations.auto)
FP8_CACHE = QuantConfig(kv_cache=KVCacheFormat.fp8)
A8W8 = QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic, kv_cache=KVCacheFormat.int8)
INT8 = QuantConfig(QuantScheme.int8)
INT8_INT4_CACHE = QuantConfig(QuantScheme.int8, kv_cache=KVCacheFormat.int4)
INT4 = QuantConfig(QuantScheme.int4, group_size=32)
FAMILIES = WITHOUT_MARKS | {"chatglm": partial(link, "chatglm")}
FAMILIES |= {name: partial(family.write, **family.variants[0]) for name, family in HYBRID.items()}
"""By name: a function that writes a model and returns its run. Every architecture is among them (test_kv_families)."""
VARIANTS: dict[str, Callable[[Path], object]] = {
    f"{name} with experts": partial(HYBRID[name].write, **HYBRID[name].variants[1])
    for name in ("granitemoehybrid", "nemotron_h")
}
"""Further models of families, by name, as in `FAMILIES`."""
VARIANTS |= {
    f"kimi_linear {number}": partial(HYBRID["kimi_linear"].write, **variant)
    for number, variant in enumerate(HYBRID["kimi_linear"].variants[1:])
}
VARIANTS |= {name: partial(write_family, family=name) for name in DEEPSEEK}
OF_RUNNER = [
    "baichuan-13b",
    "baichuan-7b",
    "baichuan2-13b",
    "bamba",
    "bloom",
    "chatglm3",
    "deepseek_v2",
    "deepseek_v3",
    "falcon_h1",
    "glm4_moe_lite",
    "gpt2",
    "granitemoehybrid",
    "kimi_k2",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "llama3",
    "llama_tied_bias",
    "mamba2",
    "minicpm3",
    "mistral",
    "mistral4",
    "nemotron_h",
    "opt",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_next",
]
"""Families that the C++ runner computes."""


class Exports:
    """A folder of exports that the processes of a test session share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, run: RunConfig, tp: int = 1, pp: int = 1) -> Path:
        """Return the export of the run's model. The first caller makes it. A test that changes it must copy it.

        It is made from a copy of the checkpoint, which is then deleted, and then moved: it depends on neither path.
        """
        source = Path(run.model.path)
        anywhere = replace(run, model=replace(run.model, path="anywhere"))
        key = hashlib.sha256(repr((anywhere, tp, pp)).encode())
        for file in sorted(source.rglob("*") if source.is_dir() else [source]):
            content = file.read_bytes() if file.is_file() else b""
            key.update(f"{file.relative_to(source)} {len(content)} ".encode() + content)
        made = self._folder / key.hexdigest() / "made"
        made.parent.mkdir(parents=True, exist_ok=True)
        with (made.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
            if not made.exists():
                _make(run, made, tp, pp)
        verify_manifest(made)  # no test has changed it
        return made


def _make(run: RunConfig, made: Path, tp: int, pp: int) -> None:
    with TemporaryDirectory(dir=made.parent) as folder:
        source, copy = Path(run.model.path), Path(folder) / "model"
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            copy = Path(shutil.copyfile(source, copy.with_suffix(source.suffix)))
        model = replace(run.model, path=str(copy))
        exported(replace(run, model=model), Path(folder) / "made", tp=tp, pp=pp).rename(made)


def exported(run: RunConfig, folder: Path, **parallel_layout: int) -> Path:
    """Export the run's model to a folder of the test."""
    run = replace(run, predict=PredictConfig(), task=Task.export, export=ExportConfig(str(folder), **parallel_layout))
    run_export(run, folder.parent / "run", lambda run, output_dir: "")
    return folder


def run_of(folder: Path, quant: QuantConfig = FLOATS, dtype: DType = DType.float32) -> RunConfig:
    """Return a run of the folder's model."""
    run = run_config(folder)
    return replace(run, model=replace(run.model, dtype=dtype), quant=quant)


def llama(folder: Path, quant: QuantConfig = FLOATS, **config: int) -> RunConfig:
    """Write the model that the tests of all formats share, and return a run of it."""
    write_llama(folder, intermediate_size=96, attention_bias=True, **config)
    return run_of(folder, quant)


def wide_llama(folder: Path, dtype: DType, quant: QuantConfig = FLOATS) -> RunConfig:
    """Write a model whose weights are large enough for 12-bit bfloat16, and return a run of it."""
    write_llama(folder, hidden_size=256, intermediate_size=96, vocab_size=2048)
    return run_of(folder, quant, dtype)


def family_model(family: str, folder: Path, quant: QuantConfig = FLOATS) -> RunConfig:
    """Write a family's model into a new folder and return a run of it, in bfloat16 if the C++ runner computes the
    family."""
    folder.mkdir()
    (FAMILIES | VARIANTS)[family](folder)
    return run_of(folder, quant, DType.bfloat16 if family in (*OF_RUNNER, *VARIANTS) else DType.float32)


def on_export(run: RunConfig, folder: Path) -> RunConfig:
    """Return the run with an export as its model."""
    return replace(run, model=replace(run.model, path=str(folder)), quant=FLOATS)


def without_families(patch: pytest.MonkeyPatch) -> None:
    """Make the modules of all families unimportable."""
    for name in [name for name in sys.modules if name.startswith("models.families.")]:
        patch.setitem(sys.modules, name, None)


def prompts_for(family: str) -> list[list[int]]:
    return [[*prompt, *MARKS.get(family, ())] for prompt in PROMPTS]


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = generate(engine, prompts, DECODE) + generate(engine, prompts, replace(DECODE, temperature=1.0, seed=3))
    return [(output.completions[0].token_ids, output.completions[0].logprobs) for output in outputs]
