"""The paired differences of a sweep's rows from one of them, from the samples.jsonl of their jobs."""

import logging

from conf.errors import UserError
from conf.support.terminal import escape_line
from pipelines.jobs.uncertainty import PairedDifference
from pipelines.tasks.evaluate_baseline import read_baseline
from pipelines.tasks.evaluate_compare import RATIO, compare
from pipelines.tasks.evaluate_samples import SAMPLES, Key, Sample
from pipelines.tasks.sweep_jobs import SweepJob, read_job

SEED = 0  # of the draws
HIDDEN = ("nll_per_token", "top1_agreement")  # the perplexity ratio and the KL difference compare the same windows
log = logging.getLogger(__name__)
Differences = dict[str, PairedDifference]
"""By column: `kl_mean_difference`, `perplexity_ratio`."""


def differences_from(jobs: list[SweepJob], baseline: int) -> list[Differences]:
    """Return each row's value minus the baseline's, and for perplexity the quotient.

    The baseline has none, nor has a row that failed, stopped or did not evaluate. A row with other data or a damaged file has
    none, and a warning says so.
    """
    before = samples_of(jobs[baseline]) if baseline < len(jobs) else {}
    return [_difference(job, before) if before and i != baseline else {} for i, job in enumerate(jobs)]


def _difference(job: SweepJob, before: dict[Key, Sample]) -> Differences:
    now = {} if job.is_stopped else samples_of(job)
    if not now:
        return {}
    if _inputs(now) != _inputs(before):
        log.warning(escape_line(f"{job.label([])} has no differences, because the baseline measured other data"))
        return {}
    metrics = {name: compared.difference for name, compared in compare(now, before, SEED).metrics.items()}
    return {name if name == RATIO else f"{name}_difference": d for name, d in metrics.items() if name not in HIDDEN}


def _inputs(samples: dict[Key, Sample]) -> dict[Key, str]:
    return {key: sample["input"] for key, sample in samples.items()}


def samples_of(job: SweepJob) -> dict[Key, Sample]:
    """Return the samples of a row's jobs, except of folders without metrics of evaluate: an earlier sweep may have
    written their samples."""
    samples: dict[Key, Sample] = {}
    for folder in job.folders:
        if read_job(folder, "").number("evaluate_s") is not None and (folder / SAMPLES).is_file():
            try:
                samples |= read_baseline(str(folder)).samples
            except UserError:
                log.warning(escape_line(f"{job.label([])} has no differences, because its {SAMPLES} is damaged"))
    return samples
