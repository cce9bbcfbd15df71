"""Write a prefix with task=prefix, and continue from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.schema import RunConfig, Task
from conf.tasks import PrefixConfig
from pipelines.engine import Engine, Output
from pipelines.tasks.prefix import run_prefix

BEGINNING = [5 + i * 7 % 83 for i in range(41)]
OTHER = [9 + i * 5 % 79 for i in range(37)]
DECODE = DecodeConfig(max_new_tokens=9, ignore_eos=True, logprobs=3)


def write_data(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def keep(run: RunConfig, output: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    """Run task=prefix; return its metrics."""
    data = write_data(output.with_suffix(".jsonl"), *(rows or ({"prompt_token_ids": BEGINNING},)))
    config = PrefixConfig(data=str(data), output=str(output))
    folder = output.with_suffix(".run")
    run_prefix(replace(run, task=Task.prefix, predict=RunConfig().predict, prefix=config), folder, dump)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


def complete(
    engine: Engine,
    prompt: list[int],
    decode: DecodeConfig = DECODE,
    prefix: str | None = None,
    adapter: str | None = None,
) -> Output:
    request = engine.request(0, prompt, decode, prefix=prefix, adapter=adapter)
    (output,) = engine.generate([request], on_step=engine.scheduler.check_integrity)
    return output
