"""Engines whose ranks are processes."""

from dataclasses import replace
from typing import Any

from conf.decoding import DecodeConfig
from conf.schema import ParallelConfig, ParallelMode, RunConfig
from pipelines.engine import Engine
from pipelines.loading.driver import DriverExecutor

PROMPTS = [[1, 5, 9, 23, 40, 41, 42], [1, 7], [1, *range(30, 70)], [1, 5, 9, 23, 40, 41, 42, 3, 3]]


def parallel(run: RunConfig, tp: int, pp: int = 1) -> RunConfig:
    mode = ParallelMode.tp if pp == 1 else ParallelMode.pp if tp == 1 else ParallelMode.tp_pp
    return replace(run, parallel=ParallelConfig(mode, tp=None if tp == 1 else tp, pp=None if pp == 1 else pp))


def close(engine: Engine) -> None:
    assert isinstance(engine.executor, DriverExecutor)
    engine.executor.driver.close()


def answers(engine: Engine, decode: DecodeConfig) -> list[Any]:
    requests = [engine.request(i, prompt, decode) for i, prompt in enumerate(PROMPTS)]
    outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [(output.completions, output.prompt_logprobs) for output in outputs]
