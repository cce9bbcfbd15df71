"""quant.probe: how much quantisation changes a model's predictions, measured when the combination first runs."""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantScheme
from conf.schema import RunConfig, Task
from models.heads import HeadKind
from pipelines.engine import Engine, ProbeResult
from pipelines.jobs.output_folder import kept_folder
from pipelines.jobs.report import ProgressSink, outside_peak_memory, write_atomically
from pipelines.loading.divergence import measure_divergence
from pipelines.loading.fingerprint import plain, sha256_of
from pipelines.loading.model_source import ModelSource
from pipelines.loading.quantize.calibrated import calibration_job

log = logging.getLogger(__name__)


def probe(run: RunConfig, source: ModelSource, engine: Engine, progress: ProgressSink) -> ProbeResult | None:
    """Return the divergence of the run's engine from floats, and warn if it exceeds `quant.probe_kl`.

    It is measured on the first tokens of the built-in texts, once for a model and its `quant`, and kept. None if
    nothing is quantised here, and if it cannot be measured: with ranks, on a GPU, without a tokenizer or weights, for
    exported models and models that see the whole prompt, and if the floats do not fit in the memory.
    """
    if not _is_probed(run, source, engine):
        return None
    file = kept_folder("probes") / f"{_digest(run, source)}.json"
    try:
        divergence = ProbeResult(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):  # not measured yet, or damaged
        try:
            with outside_peak_memory(engine.device):
                divergence = measure_divergence(run, source, engine, progress)
        except UserError as error:
            log.warning("quant.probe measured nothing: %s", error)
            return None
        with suppress(OSError):  # a folder that cannot be written: the next run measures again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, [json.dumps(asdict(divergence)) + "\n"])
    if divergence.kl_mean > run.quant.probe_kl:
        log.warning(_warning(run, divergence))
    return divergence


def _is_probed(run: RunConfig, source: ModelSource, engine: Engine) -> bool:
    quantises = run.quant.scheme is not QuantScheme.none and not source.is_quantized
    return (
        run.quant.probe
        and run.task is not Task.bench  # its loading time is a result
        and (quantises or run.quant.kv_cache is not KVCacheFormat.none)
        and source.has_weights
        and source.exported is None
        and source.architecture.head is HeadKind.vocabulary
        and not run.parallel.mode.divides
        and engine.device.type == "cpu"
        and engine.tokenizer is not None
        and not engine.capabilities.needs_whole_prompt
    )


def _digest(run: RunConfig, source: ModelSource) -> str:
    """Return what identifies the measurement: the model's files, the quantisation and its files."""
    quant = run.quant
    files = [sha256_of(Path(file).expanduser()) for file in (quant.plan, quant.imatrix) if file]
    settings = (
        quant.kv_cache.name,
        quant.kv_cache_scales.name,
        quant.activations.name,
        quant.block_activations.name,
        files,
    )
    identity = plain({"job": calibration_job(run).identity(source), "settings": settings})
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _warning(run: RunConfig, divergence: ProbeResult) -> str:
    options = [f"quant={run.quant.scheme.name}"] if run.quant.scheme is not QuantScheme.none else []
    options += [f"quant.kv_cache={run.quant.kv_cache.name}"] if run.quant.kv_cache is not KVCacheFormat.none else []
    return (
        f"{' '.join(options)} changes the predictions of this model: KL {divergence.kl_mean:.3g} nats from floats, more than "
        f"quant.probe_kl={run.quant.probe_kl}, and {divergence.top1_agreement:.0%} equal most likely tokens "
        f"({divergence.num_tokens} tokens): give a format with more bits, and compare by task=evaluate"
    )
