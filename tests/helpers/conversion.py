"""Run `task=convert`, and read its files with the formats' own libraries."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.compose import dump
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import CheckpointFormat, ConvertConfig
from pipelines.tasks.convert import run_convert

SHARDED = CheckpointFormat.sharded


def convert(source: Path, target: Path, model: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Run the task. Its other files are written next to the target."""
    config = RunConfig(
        Task.convert, ModelConfig(str(source), **(model or {})), convert=ConvertConfig(output=str(target), **settings)
    )
    run_convert(config, target.with_name(f"{target.name}-run"), dump)
    return target


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder in Hugging Face's layout."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for file in folder.glob("*.bin"):
        tensors |= torch.load(file, weights_only=True)
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
