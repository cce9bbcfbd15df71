"""The engine of the float model that is quantised, on the job's ranks, and the share of this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from conf.decoding import DecodeConfig
from pipelines.engine import Engine
from pipelines.jobs.report import ProgressSink
from pipelines.loading.assembly import assemble
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.quantize.layers import calibration_batches, whole_share
from pipelines.loading.quantize.share import Share
from pipelines.loading.request_settings import RequestSettings
from quantization.file_layout import FileLayout


@contextmanager
def float_engine(
    job: QuantizeJob,
    settings: RequestSettings,
    full_plan: ModelPlan,
    layout: FileLayout,
    samples: list[list[int]],
    progress: ProgressSink,
) -> Iterator[tuple[Engine, Share]]:
    """Load the float model on the job's ranks. Yield its engine and this process's share; end the ranks after the block.

    `full_plan`: the plan of the float model. `layout`: of the files to make.
    """
    if not job.parallel.mode.divides:
        engine = assemble(full_plan, job.device, DecodeConfig(), settings, 1, progress.loaded)
        yield engine, whole_share(job.quant, layout, engine, samples)
        return
    from pipelines.loading.quantize.ranks import DriverShare  # here, because a run without ranks does not need it
    from pipelines.loading.start_driver import start_driver

    driver = start_driver(full_plan, job.parallel, job.device)
    try:
        plan = driver.part(
            plan_model(full_plan.options, full_plan.quant, full_plan.source, full_plan.device, packed=False)
        )
        engine = assemble(plan, job.device, DecodeConfig(), settings, 1, progress.loaded, driver=driver)
        batches, cache = calibration_batches(engine, samples), engine.executor.cache.one_of_each_shape()
        yield engine, DriverShare(job.quant, job.format, layout, plan, full_plan, batches, cache, driver.workers)
    finally:
        driver.close()
