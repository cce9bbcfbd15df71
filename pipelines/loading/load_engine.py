"""Load the engine of a RunConfig: open its model, calibrate it if the scheme needs this, and build the engine.

The first run with such a scheme calibrates and saves the model. Later runs load the saved model. The stages of
`build_engine.py` take groups of the RunConfig, not the RunConfig itself.
"""

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import DeviceConfig, ModelConfig, ParallelConfig, ParallelMode, RunConfig
from models.heads import HeadKind
from pipelines.engine import Engine
from pipelines.jobs.report import NO_PROGRESS, ProgressSink
from pipelines.loading.build_engine import build_engine
from pipelines.loading.device import prepare_device
from pipelines.loading.model_source import ModelSource, OpenModel, ReadyModel, resolve_model
from pipelines.loading.probe import probe
from pipelines.loading.quantize.calibrated import calibrated
from pipelines.loading.quantize.job import float_model


def load_engine(
    run: RunConfig,
    max_num_requests: int,
    progress: ProgressSink = NO_PROGRESS,
    head: HeadKind | None = HeadKind.vocabulary,
    open_model: OpenModel | None = None,
) -> Engine:
    """Open the checkpoint of `run` and return its engine, for at most `max_num_requests` concurrent requests.

    `head`: as for `resolve_model`. `open_model`, if given, replaces `resolve_model`. Raises UserError as
    `prepare_device`, `resolve_model`, `calibrated` and `build_engine` do.
    """
    return open_engine(run, max_num_requests, progress, head, open_model)[1]


def open_engine(
    run: RunConfig,
    max_num_requests: int,
    progress: ProgressSink = NO_PROGRESS,
    head: HeadKind | None = HeadKind.vocabulary,
    open_model: OpenModel | None = None,
) -> tuple[ModelSource, Engine]:
    """Return the checkpoint of `run`, which may be calibrated first, and its engine. Else as `load_engine`."""
    device = prepare_device(run.device)
    source = open_model(head) if open_model else resolve_model(run.model, head)
    _check(run.parallel.mode, max_num_requests, run.device.max_batched_tokens)
    ready = calibrated(run, source, progress)
    options = run.device, run.parallel, run.decode
    engine = build_engine(ready, device, *options, max_num_requests, progress, window_blocks=True)
    engine.divergence = probe(run, source, engine, progress)
    return source, engine


def load_float_engine(
    model: ModelConfig, device: DeviceConfig, parallel: ParallelConfig, progress: ProgressSink
) -> Engine:
    """Return an engine of the model without quantisation, for one request at a time. Raises UserError as `load_engine` does."""
    model = float_model(model)
    prepared = prepare_device(device)
    ready = ReadyModel(resolve_model(model), model, QuantConfig())
    return build_engine(ready, prepared, device, parallel, DecodeConfig(), 1, progress)


def _check(mode: ParallelMode, max_num_requests: int, max_batched_tokens: int) -> None:
    """Raise UserError for options that no engine takes, before anything is calibrated."""
    if mode is ParallelMode.ray:
        raise UserError(
            "parallel=ray is for the rows of a job, which run.py runs, and not for one engine: leave it out"
        )
    if mode is ParallelMode.auto:
        raise UserError("parallel=auto is chosen by run.py alone: give parallel=single")
    if max_num_requests > max_batched_tokens:
        raise UserError(
            f"batch_size={max_num_requests} is more than device.max_batched_tokens={max_batched_tokens}, and every row that "
            "runs needs a token of each step: give a smaller batch_size, or more device.max_batched_tokens"
        )
