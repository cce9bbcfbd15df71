"""The identity of a quantisation, and the default folder of its model, whose name contains the identity."""

import hashlib
import json
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.schema import RunConfig
from models.formats.hub import find_tokenizer
from pipelines.jobs.journal import dumps
from pipelines.jobs.output_folder import kept_folder
from pipelines.loading.fingerprint import calibration_fingerprint, file_fingerprint, plain_quant
from pipelines.loading.model_source import ModelSource
from quantization.smoothing_record import FOLDS

VERSION = 3  # version of the results: increase it with every change of codes, scales or observed statistics


def default_target(run: RunConfig, source: ModelSource) -> Path:
    """Return a folder whose name identifies weights, quantisation and calibration."""
    digest = hashlib.sha256(dumps(job_of(run, source)).encode()).hexdigest()
    name = Path(run.model.path).resolve().name if Path(run.model.path).exists() else run.model.path.replace("/", "_")
    cache = f"-kv_{run.quant.kv_cache.name}" if run.quant.has_static_kv_cache else ""
    pruning = f"-{run.quant.sparsity.method.name}" if run.quant.sparsity.prunes else ""
    how = f"{run.quant.scheme.name}-{run.quant.method.name}{pruning}{cache}"
    return kept_folder("quantized") / f"{name}-{how}-{digest[:12]}"


def job_of(run: RunConfig, source: ModelSource) -> dict[str, Any]:
    """Return the identity: the model's files, the quantisation and the texts.

    Raises UserError if there are no weights.
    """
    if not source.has_weights:
        raise UserError(
            "model.weights=random has nothing to calibrate: leave it out, or give quant.method=rtn with dynamic activations, "
            "which calibrates nothing"
        )
    cache = () if run.quant.has_static_kv_cache else ("kv_cache", "kv_cache_scales")
    quant = {key: value for key, value in plain_quant(run.quant).items() if key not in cache}
    quant |= {"activations": run.quant.activations.of_model}
    if run.quant.method.folds_scales:
        quant |= {"kept": FOLDS}  # older folders do not have this file
    model = run.model
    tokenizer = model.tokenizer and find_tokenizer(model.tokenizer, model.hub, model.revision)
    job = {
        "version": VERSION,
        "quant": quant,
        **calibration_fingerprint(run),
        "dtype": run.model.dtype,
        "max_length": run.model.max_length,
        "tokenizer": file_fingerprint(tokenizer, "tokenizer") if isinstance(tokenizer, Path) else tokenizer,
        "files": file_fingerprint(source.checkpoint.path, "model"),
    }
    return dict(json.loads(json.dumps(job, default=lambda value: value.name)))
