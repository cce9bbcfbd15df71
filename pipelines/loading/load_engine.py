"""Load an engine from a RunConfig.

If the quantisation scheme needs calibration, the first run calibrates and saves the model. Later runs load the saved model.
"""

import logging

import torch

from conf.errors import UserError
from conf.schema import ParallelMode, RunConfig
from conf.speculation import Speculate
from models.heads import HeadKind
from pipelines.engine import Engine
from pipelines.jobs.report import NO_PROGRESS, ProgressSink
from pipelines.loading.assembly import assemble
from pipelines.loading.device import prepare_device
from pipelines.loading.drafting import plan_draft, predicting_ahead
from pipelines.loading.model_source import ModelSource, OpenModel, resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibrated import calibrated
from pipelines.loading.request_settings import RequestSettings, read_request_settings
from pipelines.loading.shard_plan import check_mode

log = logging.getLogger(__name__)


def load_engine(
    run: RunConfig,
    max_num_requests: int,
    progress: ProgressSink = NO_PROGRESS,
    head: HeadKind | None = HeadKind.vocabulary,
    open_model: OpenModel | None = None,
) -> Engine:
    """Open the checkpoint of `run` and return its engine, for at most `max_num_requests` concurrent requests.

    `head`: as for `resolve_model`. `open_model`, if given, replaces `resolve_model`. Raises UserError as
    `prepare_device`, `resolve_model` and `load_engine_on` do.
    """
    device = prepare_device(run.device)
    source = open_model(head) if open_model else resolve_model(run.model, head)
    return load_engine_on(device, run, source, max_num_requests, progress)


def load_engine_on(
    device: torch.device, run: RunConfig, source: ModelSource, max_num_requests: int, progress: ProgressSink
) -> Engine:
    """Load the engine of `run` from its opened checkpoint `source`, on the prepared device.

    Raises UserError for an invalid checkpoint or tokenizer, and as `calibrated` does.
    """
    if run.parallel.mode is ParallelMode.ray:
        raise UserError(
            "parallel=ray is for the rows of a job, which run.py runs, and not for one engine: leave it out"
        )
    if run.parallel.mode is ParallelMode.auto:
        raise UserError("parallel=auto is chosen by run.py alone: give parallel=single")
    if max_num_requests > run.device.max_batched_tokens:
        raise UserError(
            f"batch_size={max_num_requests} is more than device.max_batched_tokens={run.device.max_batched_tokens}, and every row that "
            "runs needs a token of each step: give a smaller batch_size, or more device.max_batched_tokens"
        )
    run, source = calibrated(run, source, progress)
    settings = read_request_settings(run.model, source)
    if run.decode.speculate is Speculate.mtp:
        source = predicting_ahead(source)
    check_mode(source, run.parallel.mode)
    if run.parallel.mode.divides:
        return _load_with_ranks(device, run, source, settings, max_num_requests, progress)
    plan = plan_model(run.model, run.quant, source, device, packed=True)
    draft = plan_draft(run.decode, run.parallel.mode, plan, settings)
    source.warn_of_unread_keys()
    return assemble(plan, run.device, run.decode, settings, max_num_requests, progress.loaded, draft)


def _load_with_ranks(
    device: torch.device,
    run: RunConfig,
    source: ModelSource,
    settings: RequestSettings,
    max_num_requests: int,
    progress: ProgressSink,
) -> Engine:
    """Return the engine of rank 0. Closing the engine ends the other ranks."""
    from pipelines.loading.driver import start_driver  # imported here: a run without ranks does not need it

    whole = plan_model(run.model, run.quant, source, device, packed=True)
    driver = start_driver(run, whole)
    try:
        draft = plan_draft(run.decode, run.parallel.mode, whole, settings)  # whole, and on rank 0 only
        plan = driver.part(whole)
        source.warn_of_unread_keys()
        return assemble(plan, run.device, run.decode, settings, max_num_requests, progress.loaded, draft, driver)
    except BaseException:
        driver.close()
        raise
