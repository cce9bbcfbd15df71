"""Fingerprints: what determines the rows of a job, by name.

A job is resumed only with an equal fingerprint. The names say what changed.
"""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from conf.decoding import DecodeConfig
from conf.quantization import Activations, BlockActivations, CalibrateConfig, QuantConfig, QuantizedFormat
from conf.schema import RunConfig, Sum
from conf.speculation import Acceptance
from kernels import build
from pipelines.engine import Engine
from pipelines.jobs.data_files import expanded
from pipelines.jobs.input_files import CONFIGS, SPLIT
from pipelines.jobs.journal import Fingerprint, dumps
from pipelines.jobs.report import REPOSITORY
from pipelines.loading.model_source import ModelSource
from pipelines.loading.quantize.calibration_data import calibration_file
from pipelines.ranks.launch import degrees, joined

WEIGHTS = (
    "*.safetensors",
    "*.gguf",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.pt2",
    "*.ckpt",
    "rank_*/*.safetensors",
    "rank_*/*.ckpt",
)
"""Files of weights, identified by size and time, because hashing them takes too long."""
NOT_STORED = {"plan", "imatrix", "probe", "probe_kl"}
"""Settings of `quant` that do not determine the model's numbers, or whose files do."""
SOURCES = ("kernels", "models", "quantization")  # packages whose code determines the model's weights
NUM_SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # samples of a weight file


def fingerprint(run: RunConfig, source: ModelSource, engine: Engine) -> Fingerprint:
    """Return what determines the rows of `run`, besides the input. Its decode settings must be resolved.

    Excludes paths and the parallel layout, except parallel.sum=reduce.
    """
    parts: Fingerprint = {
        "predict.add_special_tokens": run.predict.add_special_tokens,
        "predict.adapter": run.predict.adapter,
        "predict.chat_template": template_fingerprint(run.predict.chat_template),
    }
    parts |= {f"model.adapters.{adapter.name}": adapter.digest for adapter in engine.adapters.ids}
    if run.model.prefixes:
        parts["predict.prefix"] = run.predict.prefix
    if run.predict.max_prompt_tokens is not None:
        parts["predict.truncate"] = f"{run.predict.truncate.name}, {run.predict.max_prompt_tokens} tokens"
    return _as_kept(parts | model_fingerprint(run, source, engine))


def model_fingerprint(run: RunConfig, source: ModelSource, engine: Engine) -> Fingerprint:
    """Return what determines the tokens that follow a prompt without an adapter.

    The run's decode settings must be resolved.
    """
    model = source.checkpoint.path
    tokenizer = engine.tokenizer.source if engine.tokenizer else None
    parts: Fingerprint = {
        "model.dtype": str(engine.dtype).removeprefix("torch."),
        "model.weights": run.model.weights.name,
        "model.max_length": run.model.max_length,
        "model.tokenizer": tokenizer is not None,
        "device.type": engine.device.type,
        "quant": plain_quant(run.quant),
    }
    if run.model.prefixes:
        parts["model.prefixes"] = {name: prefix.digest for name, prefix in engine.requests.prefixes.items()}
    if run.parallel.sum is Sum.reduce:  # the rounding of its sums depends on the number of ranks
        parts["parallel.sum"] = f"reduce, tp={degrees(run.parallel, joined(os.environ))[0]}"
    if run.quant.needs_calibration:
        parts |= calibration_fingerprint(run.calibrate, run.quantize.format)
    if run.quant.plan is not None:
        parts["quant.plan"] = sha256_of(Path(run.quant.plan).expanduser())
    if run.quant.imatrix is not None:
        parts["quant.imatrix"] = sha256_of(Path(run.quant.imatrix).expanduser())
    parts |= {f"decode.{name}": value for name, value in plain(_deciding(run.decode)).items()}
    parts |= file_fingerprint(model, "model")
    if tokenizer and not tokenizer.samefile(model):
        parts |= file_fingerprint(tokenizer, "tokenizer")
    return parts


def answer_fingerprint(
    run: RunConfig, source: ModelSource, engine: Engine, more: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the fingerprint of the bits of a server's answers without an adapter, or None if they depend on more than
    the request.

    `run`: has resolved decode settings. `more`: further settings that determine the bits, by name.
    """
    if engine.device.type != "cpu" or run.quant.activations is Activations.auto:
        return None
    templates = {
        "serve.chat_template": template_fingerprint(run.serve.chat_template),
        "serve.response_template": run.serve.response_template,
    }
    return replay_fingerprint({**model_fingerprint(run, source, engine), **more, **templates})


def replay_fingerprint(parts: Fingerprint) -> str:
    """Return a short digest of these parts, the code, torch's version and the instruction set."""
    kernels = build.instruction_set() if build.library() else "none"
    torch_names = torch.__version__, torch.backends.cpu.get_cpu_capability()
    code = code_digest("*.py", "*.cpp", "*.h", packages=("conf", *SOURCES, "pipelines"))
    text = dumps(parts | {"code": code, "kernels": kernels, "torch": torch_names})
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def common_fingerprint(model: Path) -> Fingerprint:
    """Return what the ranks on several machines must have in common: torch, the code, and the model's files.

    Weights are identified by size and samples.
    """
    code = code_digest("*.py", "*.cpp", "*.h", packages=("conf", *SOURCES, "pipelines"))
    return {"torch": torch.__version__, "code": code, **_named_files(model, "model", _size_and_samples)}


def _as_kept(parts: Fingerprint) -> Fingerprint:
    """Return the parts after a round trip through JSON, as a journal returns them: all keys are strings."""
    return dict(json.loads(dumps(parts)))


def _deciding(decode: DecodeConfig) -> dict[str, Any]:
    """Return the settings that determine tokens.

    Includes draft settings unless acceptance is exact, and the limit of reasoning only if it is set, because journals of
    older versions lack it.
    """
    settings = asdict(decode)
    if decode.thinking.max_tokens is None:
        del settings["thinking"]
    if decode.speculation.acceptance is Acceptance.exact:
        del settings["speculate"], settings["speculation"]
    return settings


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON values, with enum members by name."""
    return dict(json.loads(json.dumps(settings, default=lambda value: value.name)))


def plain_quant(quant: QuantConfig) -> dict[str, Any]:
    """Return the settings as JSON values, without the probe and the paths of a plan and of an importance matrix.

    `sparsity` is present only if it prunes, and a budget and `block_activations` only if they are set, because files of
    older versions lack them.
    """
    unset = {name for name in ("bits", "max_bytes") if getattr(quant, name) is None} | NOT_STORED
    unset |= set() if quant.sparsity.prunes else {"sparsity"}
    unset |= {"block_activations"} if quant.block_activations is BlockActivations.int8 else set()
    return {name: value for name, value in plain(asdict(quant)).items() if name not in unset}


def calibration_fingerprint(calibrate: CalibrateConfig, format: QuantizedFormat) -> Fingerprint:
    """Return what a calibrated model depends on besides its source and `quant`: the texts, and the format, which sets
    the dtype of scales.
    """
    data = calibrate.data
    texts = asdict(calibrate) | {"data": data and sha256_of(calibration_file(data).path)}
    return {"calibrate": texts, "quantize.format": format.name}


def template_fingerprint(chat_template: str) -> str:
    """Return the identity of a chat template: auto, none, or the sha256 of the file."""
    return chat_template if chat_template in ("auto", "none") else sha256_of(expanded(chat_template))


def file_fingerprint(path: Path, name: str) -> Fingerprint:
    """Return the identity of a folder's files, or of a single model file: sha256 of small files, size and time of
    weights.
    """
    return _named_files(path, name, _size_and_time)


def _named_files(path: Path, name: str, name_weights: Callable[[Path], str]) -> Fingerprint:
    parts = SPLIT.sub(r"-?????\1", glob.escape(path.name))
    folder, weights = (path, WEIGHTS) if path.is_dir() else (path.parent, (parts,))
    contents = {file.name: sha256_of(file) for pattern in CONFIGS for file in path.glob(pattern)}
    named = {str(file.relative_to(folder)): name_weights(file) for pattern in weights for file in folder.glob(pattern)}
    return {f"{name}/{file}": value for file, value in sorted((contents | named).items())}


def _size_and_time(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_size} bytes of {stat.st_mtime_ns}"


def _size_and_samples(file: Path) -> str:
    """Return a file's size and a digest of samples spread over it.

    To read the whole file takes as long as to load it.
    """
    size, digest = file.stat().st_size, hashlib.sha256()
    with open(file, "rb") as stream:
        for number in range(NUM_SAMPLES):
            stream.seek(number * max(size - SAMPLE_BYTES, 0) // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return f"{size} bytes like {digest.hexdigest()}"


def code_digest(*patterns: str, packages: tuple[str, ...] = ()) -> str:
    """Return the digest of the files that match the patterns, in `packages` or, if empty, in SOURCES."""
    code = hashlib.sha256()
    for file in sorted(
        file for name in packages or SOURCES for pattern in patterns for file in (REPOSITORY / name).rglob(pattern)
    ):
        code.update(file.read_bytes())
    return code.hexdigest()


def sha256_of(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
