"""The identity of a quantisation, and the default folder of its model, whose name contains the identity."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.quantization import CalibrateConfig, QuantConfig, QuantizedFormat
from conf.schema import DeviceConfig, ModelConfig, ParallelConfig
from models.formats.hub import find_tokenizer
from pipelines.jobs.journal import dumps
from pipelines.jobs.output_folder import kept_folder
from pipelines.loading.fingerprint import calibration_fingerprint, file_fingerprint, plain_quant, sha256_of
from pipelines.loading.model_source import ModelSource
from quantization.smoothing_record import FOLDS

VERSION = 4  # version of the results: increase it with every change of codes, scales or observed statistics


def float_model(model: ModelConfig) -> ModelConfig:
    """Return the options that load the float model for calibration.

    Calibration computes no rows, so the float model has no prefixes and no adapters. It reads the weights only once, so
    it does not keep them packed.
    """
    return replace(model, prefixes=None, adapters=None, keep_packed=False)


@dataclass(frozen=True)
class QuantizeJob:
    """The options with which a quantised model is made."""

    model: ModelConfig
    """The options that load the float model."""
    quant: QuantConfig
    calibrate: CalibrateConfig
    """Resolved for `quant`."""
    format: QuantizedFormat
    parallel: ParallelConfig
    """The ranks that make it. The result has the same bits with any number of ranks."""
    device: DeviceConfig

    def identity(self, source: ModelSource) -> dict[str, Any]:
        """Return what the result depends on: the model's files, the quantisation and the texts.

        Raises UserError if there are no weights.
        """
        if not source.has_weights:
            raise UserError(
                "model.weights=random has nothing to calibrate: leave it out, or give quant.method=rtn with dynamic activations, "
                "which calibrates nothing"
            )
        later = {"block_activations"} | (set() if self.quant.has_static_kv_cache else {"kv_cache", "kv_cache_scales"})
        quant = {key: value for key, value in plain_quant(self.quant).items() if key not in later}
        quant |= {"activations": self.quant.activations.in_files}
        if self.quant.imatrix is not None:
            quant |= {"imatrix": sha256_of(Path(self.quant.imatrix).expanduser())}
        if self.quant.method.folds_scales:
            quant |= {"kept": FOLDS}  # older folders do not have this file
        model = self.model
        tokenizer = model.tokenizer and find_tokenizer(model.tokenizer, model.hub, model.revision)
        identity = {
            "version": VERSION,
            "quant": quant,
            **calibration_fingerprint(self.calibrate, self.format),
            "dtype": model.dtype,
            "max_length": model.max_length,
            "tokenizer": file_fingerprint(tokenizer, "tokenizer") if isinstance(tokenizer, Path) else tokenizer,
            "files": file_fingerprint(source.checkpoint.path, "model"),
        }
        return dict(json.loads(json.dumps(identity, default=lambda value: value.name)))

    def default_target(self, source: ModelSource) -> Path:
        """Return a folder whose name identifies weights, quantisation and calibration."""
        quant = self.quant
        cache = f"-kv_{quant.kv_cache.name}" if quant.has_static_kv_cache else ""
        pruning = f"-{quant.sparsity.method.name}" if quant.sparsity.prunes else ""
        return kept_folder("quantized") / self._name(source, f"{quant.scheme.name}-{quant.method.name}{pruning}{cache}")

    def imatrix_target(self, source: ModelSource) -> Path:
        """Return a file whose name identifies weights and calibration texts. All block schemes share it."""
        of_floats = replace(self, quant=QuantConfig())
        return kept_folder("imatrix") / f"{of_floats._name(source, 'imatrix')}.gguf"

    def _name(self, source: ModelSource, method: str) -> str:
        digest, path = hashlib.sha256(dumps(self.identity(source)).encode()).hexdigest(), self.model.path
        name = Path(path).resolve().name if Path(path).exists() else path.replace("/", "_")
        return f"{name}-{method}-{digest[:12]}"
