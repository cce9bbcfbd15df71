"""Measured launch parameters of GPU products: `kernels/tuned/<GPU>.json`, written by tests/bench/tune_gpu.py.

Nothing is measured at run time. A product looks its shape up, and uses constants if there is no file or no entry.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.linear.gpu_weight import GPUWeight

FOLDER = Path(__file__).parent / "tuned"
ROWS = (1, 16, 32, 64, 256, 4096)
"""A launch is measured for each number. It is used for up to this number of rows, above the previous number. The last
launch is also used for more rows."""
TIMES = ("seconds", "default_seconds")


class Launch(NamedTuple):
    """The outputs and the rows (one per pair of token and expert) of a program's tile. All fields but `num_stages` are
    powers of two."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return the launch options that all products share. Each product has its own name for the rows of a tile."""
        return {"OUTPUTS": self.outputs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Shape(NamedTuple):
    """The problem that a launch was measured for."""

    kernel: str
    """One of: product, gated experts, weighted experts."""
    rows: int
    """One of ROWS."""
    outputs: int
    inputs: int
    x_dtype: torch.dtype
    """As the kernel reads it: the dtype of the codes if activations are quantised."""
    code_dtype: torch.dtype
    """uint8 if a byte holds two codes of 4 bits."""
    group_size: int | None
    """Inputs that share a scale; None: all inputs."""
    has_zero_points: bool


def tuned_launch(kernel: str, rows: int, x: Tensor, weight: GPUWeight) -> Launch | None:
    """Return the launch for `rows` rows of `x`'s dtype on its GPU; None if none was measured. Raises UserError as
    `read` does."""
    launches = _launches_on(x.device)
    return launches.get(shape_of(kernel, rows, x.dtype, weight)) if launches else None


def shape_of(kernel: str, rows: int, x_dtype: torch.dtype, weight: GPUWeight) -> Shape:
    most = next((most for most in ROWS if rows <= most), ROWS[-1])
    return Shape(
        kernel,
        most,
        weight.num_outputs,
        weight.num_inputs,
        x_dtype,
        weight.codes.dtype,
        weight.group_size,
        weight.zero_points is not None,
    )


def file_of(gpu: str) -> Path:
    """Return the file of a GPU. `gpu` is the name that torch.cuda.get_device_name returns."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


@cache
def _launches_on(device: torch.device) -> Mapping[Shape, Launch]:
    return read(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}


def read(gpu: str) -> dict[Shape, Launch]:
    """Return the launches measured on this GPU; empty if it has no file. Raises UserError if the file is damaged or
    names another GPU."""
    path = file_of(gpu)
    try:
        content = json.loads(path.read_text())
        if content["gpu"] != gpu:
            raise ValueError(f"it is of {content['gpu']!r}, and this is {gpu!r}")
        return dict(map(_parse, content["entries"]))
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is damaged ({reason}): delete it, or write it again with tests/bench/tune_gpu.py"
        ) from error


def _parse(entry: dict[str, Any]) -> tuple[Shape, Launch]:
    if entry.keys() != {*Shape._fields, "launch", *TIMES}:
        raise ValueError(f"an entry has the keys {sorted(entry)}")
    dtypes = {name: getattr(torch, entry[name]) for name in ("x_dtype", "code_dtype")}
    shape = Shape(**{name: entry[name] for name in Shape._fields} | dtypes)
    launch = Launch(**entry["launch"])
    sizes = launch[:3]
    if any(type(n) is not int or n < 1 for n in launch) or any(n & (n - 1) for n in sizes) or shape.rows not in ROWS:
        raise ValueError(f"{launch} for {shape.rows} rows")
    return shape, launch


def entry_of(shape: Shape, launch: Launch, seconds: float, default_seconds: float) -> dict[str, Any]:
    """Return an entry of the file: the shape and launch that `read` parses, and the median times of this launch and of
    the default launch."""
    dtypes = {name: str(getattr(shape, name)).removeprefix("torch.") for name in ("x_dtype", "code_dtype")}
    times = dict(zip(TIMES, (seconds, default_seconds), strict=True))
    return shape._asdict() | dtypes | {"launch": launch._asdict()} | times
