"""How a GPU's products are launched where this was measured: `kernels/tuned/<GPU>.json`, which tests/bench/tune_gpu.py writes.

Nothing is measured here: a product asks by its shape, and where no file or no entry answers it takes its own constants.
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
"""A launch is for at most so many rows and more than the number before; that of the last number is for all above it, too."""
TIMES = ("seconds", "default_seconds")


class Launch(NamedTuple):
    """The outputs and the rows (one for each pair of token and expert) of a program's tile; powers of two, but for the stages."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return what every product is launched with; what it calls its rows is its own."""
        return {"OUTPUTS": self.outputs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Shape(NamedTuple):
    """The problem that a launch was measured for."""

    kernel: str
    """product, gated experts, weighted experts"""
    rows: int
    """One of ROWS."""
    outputs: int
    inputs: int
    x_dtype: torch.dtype
    """As the kernel reads it: of codes, if rows are quantised before."""
    code_dtype: torch.dtype
    """uint8 if two codes of 4 bits share a byte."""
    group_size: int | None
    """Inputs that share a scale; None: all."""
    has_zero_points: bool


def tuned_launch(kernel: str, rows: int, x: Tensor, weight: GPUWeight) -> Launch | None:
    """Return the launch for `rows` rows like those of `x` on its GPU; None where none was measured. Raises UserError as `read`."""
    launches = _launches_on(x.device)
    return launches.get(shape_of(kernel, rows, x.dtype, weight)) if launches else None


def shape_of(kernel: str, rows: int, x_dtype: torch.dtype, weight: GPUWeight) -> Shape:
    most = next((most for most in ROWS if rows <= most), ROWS[-1])
    group_size = weight.chunk if weight.num_groups > 1 else None
    sizes = (weight.num_outputs, weight.num_inputs)
    return Shape(kernel, most, *sizes, x_dtype, weight.codes.dtype, group_size, weight.zero_points is not None)


def file_of(gpu: str) -> Path:
    """Return the file of a GPU, whose name is that of torch.cuda.get_device_name."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


@cache
def _launches_on(device: torch.device) -> Mapping[Shape, Launch]:
    return read(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}


def read(gpu: str) -> dict[Shape, Launch]:
    """Return the launches measured on this GPU; none if it has no file. Raises UserError if that is damaged, or another GPU's."""
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
            f"{path} is damaged ({reason}): delete it, or write it anew with tests/bench/tune_gpu.py"
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
    """Return an entry of the file: what `read` takes back, and the medians of this launch and of the one that it replaces."""
    dtypes = {name: str(getattr(shape, name)).removeprefix("torch.") for name in ("x_dtype", "code_dtype")}
    times = dict(zip(TIMES, (seconds, default_seconds), strict=True))
    return shape._asdict() | dtypes | {"launch": launch._asdict()} | times
