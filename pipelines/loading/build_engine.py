"""Build the engine of a model that is ready to be loaded: the stages plan, shard and load, in their order."""

from contextlib import ExitStack

import torch

from conf.decoding import DecodeConfig
from conf.schema import DeviceConfig, ParallelConfig
from conf.speculation import Speculate
from pipelines.engine import Engine
from pipelines.jobs.report import ProgressSink
from pipelines.loading.assembly import assemble
from pipelines.loading.cache_tiers import check_tiers, place_tiers
from pipelines.loading.drafting import plan_draft
from pipelines.loading.exported_plan import check_mode
from pipelines.loading.model_source import ReadyModel
from pipelines.loading.planning import plan_model
from pipelines.loading.request_settings import read_request_settings


def build_engine(
    ready: ReadyModel,
    device: torch.device,
    options: DeviceConfig,
    parallel: ParallelConfig,
    decode: DecodeConfig,
    max_num_requests: int,
    progress: ProgressSink,
    window_blocks: bool = False,
) -> Engine:
    """Return the engine for at most `max_num_requests` concurrent requests.

    `device`: prepared with `options`. `window_blocks`: as for `assemble`. With ranks it is the engine of rank 0;
    closing it ends the other ranks. Raises UserError for an invalid checkpoint or tokenizer, and if the options
    contradict the files.
    """
    settings = read_request_settings(ready.options, ready.source)
    source = ready.source.with_mtp_layer() if decode.speculate is Speculate.mtp else ready.source
    check_mode(source, parallel.mode)
    full_plan = plan_model(ready.options, ready.quant, source, device, packed=True)
    with ExitStack() as on_error:
        plan, driver = full_plan, None
        if parallel.mode.divides:
            from pipelines.loading.start_driver import (
                start_driver,  # imported here: a run without ranks does not need it
            )

            driver = start_driver(full_plan, parallel, options)
            on_error.callback(driver.close)
        draft = plan_draft(decode, parallel.mode, full_plan, settings)  # not sharded, and only on rank 0
        check_tiers(options, full_plan, draft)
        if driver is not None:
            plan = driver.part(full_plan)
        source.warn_of_unread_keys()
        sizes = options, decode, settings, max_num_requests
        has_windows = window_blocks and not options.kv_cache_tiers  # tiers need one pool
        engine = assemble(plan, *sizes, progress.loaded, draft, driver, has_windows)
        place_tiers(engine, plan, options)
        on_error.pop_all()
    return engine
