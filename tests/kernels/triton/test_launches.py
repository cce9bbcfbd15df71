"""Measured launches: how they are found, errors of damaged files, and the use of a product's own shape."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from conf.errors import UserError
from kernels import launches
from kernels.launches import ROWS, Launch, Shape, entry_of, file_of, read, shape_of, tuned_launch
from kernels.linear import gpu_weight, triton
from kernels.moe import triton as moe
from tests.bench import tune_gpu
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, SHARED_BYTES, assert_near, noise
from tests.helpers.triton_experts import check_mixture, choose
from tests.helpers.triton_products import on_device, random_codes

REPOSITORY = Path(__file__).resolve().parents[3]
GPU = "NVIDIA H200"
SHAPE = Shape("product", 16, 70, 328, torch.bfloat16, torch.uint8, 64, False)
LAUNCH = Launch(32, 16, 4, 2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launches, "FOLDER", tmp_path)
    path = file_of(GPU)
    write(path, [entry_of(SHAPE, LAUNCH, 1e-6, 2e-6)])
    return path


@pytest.fixture
def _is_that_gpu(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the file of the tests' device."""
    monkeypatch.setattr(launches, "_launches_on", lambda device: read(GPU))


COMPILE = """
from functools import partial
from unittest.mock import patch
import torch
from tests.bench.tune_gpu import ONE_ROW, large_tiles, small_tiles
from tests.helpers.compile_ahead import compile_cases
from tests.helpers.triton_shapes import multiply, multiply_codes

def run(launch, product):
    with patch("kernels.linear.triton.tuned_launch", lambda *shape: launch):
        product()

lists = {1: ONE_ROW, 64: small_tiles(64), 4096: large_tiles()}
compile_cases({
    f"{rows} {launch} {product}": partial(run, launch, product)
    for rows, launches in lists.items()
    for launch in (min(launches), max(launches, key=lambda launch: (launch.outputs * launch.rows, launch.num_stages)))
    for product in (partial(multiply, rows, 4, 32), partial(multiply_codes, rows, torch.int8))
})
"""


def write(path: Path, entries: list[Any], gpu: str = GPU) -> None:
    path.write_text(json.dumps({"gpu": gpu, "entries": entries}))


def weight_of_4_bits() -> gpu_weight.GPUWeight:
    return on_device(gpu_weight.pack(random_codes(70, 328, 4, False), noise(70, 6).abs() + 0.1, None, 4))


def test_a_file_is_of_one_gpu(file: Path) -> None:
    assert file.name == "nvidia-h200.json"
    assert read(GPU) == {SHAPE: LAUNCH}
    assert read("NVIDIA H100 80GB HBM3") == {}
    assert file_of("Quadro RTX 6000/8000").parent == file.parent


def test_a_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    device = torch.device("cuda", 99)  # a shape that no other code has looked up
    assert launches._launches_on(device) == {SHAPE: LAUNCH}
    file.unlink()
    assert launches._launches_on(device) == {SHAPE: LAUNCH}


def test_files_are_installed() -> None:
    with open(REPOSITORY / "pyproject.toml", "rb") as project:
        patterns = tomllib.load(project)["tool"]["setuptools"]["package-data"]["kernels"]
    path = Path(launches.__file__).parent / "tuned" / "nvidia-h200.json"
    assert any(path.match(f"kernels/{pattern}") for pattern in patterns)


def test_without_a_gpu_nothing_is_looked_up(file: Path) -> None:
    assert (
        tuned_launch("product", 5, noise(5, 328, dtype=torch.bfloat16), weight_of_4_bits()) is None or DEVICE == "cuda"
    )


@each(
    "content, message",
    [
        ("{", r"h200.json is damaged \(JSONDecodeError: .*delete it, or write it again with tests/bench/tune_gpu.py"),
        ("[]", "is damaged"),
        ('{"gpu": "NVIDIA H200"}', r"is damaged \(KeyError: 'entries'\)"),
        ('{"gpu": "NVIDIA H100", "entries": []}', "it is of 'NVIDIA H100', and this is 'NVIDIA H200'"),
        ('{"gpu": "NVIDIA H200", "entries": [{"rows": 1}]}', r"an entry has the keys \['rows'\]"),
    ],
)
def test_a_damaged_file_is_one_error(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read(GPU)


@each(
    "change, message",
    [
        ({"rows": 17}, "for 17 rows"),
        ({"launch": {"outputs": 48, "rows": 16, "num_warps": 4, "num_stages": 2}}, "outputs=48"),
        ({"launch": {"outputs": 64, "rows": 16, "num_warps": 4, "num_stages": 0}}, "num_stages=0"),
        ({"launch": {"outputs": 64, "pairs": 16}}, "TypeError"),
        ({"x_dtype": "bfloat17"}, "bfloat17"),
    ],
)
def test_a_wrong_entry_is_one_error(file: Path, change: dict[str, Any], message: str) -> None:
    write(file, [entry_of(SHAPE, LAUNCH, 1e-6, 2e-6) | change])
    with pytest.raises(UserError, match=message):
        read(GPU)


@each("rows, most", [(1, 1), (2, 16), (16, 16), (17, 32), (65, 256), (4096, 4096), (9000, 4096)])
def test_rows_have_the_launch_of_at_most_so_many(rows: int, most: int) -> None:
    assert shape_of("product", rows, torch.bfloat16, weight_of_4_bits()) == SHAPE._replace(rows=most)
    assert most in ROWS


@pytest.mark.usefixtures("_is_that_gpu")
def test_only_the_exact_shape_is_found() -> None:
    weight, x = weight_of_4_bits(), noise(5, 328, dtype=torch.bfloat16)
    assert tuned_launch("product", 5, x, weight) == LAUNCH
    assert tuned_launch("gated experts", 5, x, weight) is None
    assert tuned_launch("product", 17, x, weight) is None
    assert tuned_launch("product", 5, x.float(), weight) is None
    other = on_device(gpu_weight.pack(random_codes(70, 328, 4, False), noise(70, 1), None, 4))
    assert tuned_launch("product", 5, x, other) is None


@pytest.mark.long
@pytest.mark.usefixtures("_is_that_gpu")
@each("rows", [1, 5, 70])
def test_a_product_takes_the_measured_launch(rows: int, file: Path) -> None:
    weight, x = weight_of_4_bits(), noise(rows, 328, dtype=torch.bfloat16).to(DEVICE)
    shape = shape_of("product", rows, x.dtype, weight)
    write(file, [])
    expected = triton.matmul(x, weight)
    write(file, [entry_of(shape, Launch(32, 16, 2, 2), 1e-6, 2e-6)])
    with patch.multiple(triton, LAUNCHES={}, LARGE=None):  # a launch by the constants fails
        assert_near(triton.matmul(x, weight), expected)


@pytest.mark.usefixtures("_is_that_gpu")
@each("tokens", [1, 8])
def test_experts_take_the_measured_launches(tokens: int, file: Path) -> None:
    gated = Shape("gated experts", 1 if tokens == 1 else 16, 40, 72, torch.float32, torch.int8, None, False)
    weighted = gated._replace(kernel="weighted experts", outputs=72, inputs=40)
    write(file, [entry_of(shape, Launch(16, 32, 2, 2), 1e-6, 2e-6) for shape in (gated, weighted)])
    with patch.multiple(moe, ONE_TOKEN=None, FLOAT32=None):
        check_mixture("w8a16", choose(tokens, 4, 2), 4, 72, 40)


def test_the_fastest_right_launch_is_kept() -> None:
    """The timer inspects the launch; one launch gives other numbers, one does not run."""
    wrong, broken, slow, fast = (Launch(outputs, 16, 4, 2) for outputs in (16, 32, 64, 128))
    launching = tune_gpu.Launching("product")

    def product() -> torch.Tensor:
        if launching.launch == broken:
            raise RuntimeError("out of resource: shared memory")
        return torch.full((2, 2), 2.0 if launching.launch == wrong else 1.0)

    seconds = {None: 10.0, wrong: 1.0, broken: 1.0, slow: 9.9, fast: 7.0}
    steps = [(product, 1.0)]
    candidates = [wrong, broken, slow, fast]
    seconds_by_launch, default_s = tune_gpu.attempt(steps, launching, candidates, lambda _: seconds[launching.launch])
    assert seconds_by_launch == {slow: 9.9, fast: 7.0}
    assert default_s == 10.0
    assert tune_gpu.best(seconds_by_launch, default_s) == fast
    assert tune_gpu.best({slow: 9.9}, default_s) is None  # 1 %: noise
    assert tune_gpu.best({}, default_s) is None


def test_the_file_holds_what_was_worth_it(file: Path) -> None:
    gpu = {"date": "today", "gpu": GPU, "torch": "2", "triton": "3", "cuda": "13"}
    file.unlink()
    tuned, other = tune_gpu.Tuned(gpu), SHAPE._replace(outputs=71)
    assert tuned.add(SHAPE, {LAUNCH: 7.0}, 10.0) == LAUNCH
    assert tuned.add(other, {LAUNCH: 9.9}, 10.0) is None
    assert read(GPU) == {SHAPE: LAUNCH}
    assert json.loads(file.read_text())["entries"][0]["default_seconds"] == 10.0
    again = tune_gpu.Tuned(gpu | {"date": "tomorrow"})
    again.add(other, {LAUNCH: 7.0}, 10.0)
    assert read(GPU) == {SHAPE: LAUNCH, other: LAUNCH}
    newer = tune_gpu.Tuned(gpu | {"triton": "4"})  # its compiler produces other code
    newer.add(other, {LAUNCH: 7.0}, 10.0)
    assert read(GPU) == {other: LAUNCH}
    newer.add(other, {LAUNCH: 9.9}, 10.0)
    assert read(GPU) == {}


def test_the_cases_are_in_the_files_terms() -> None:
    for case in tune_gpu.cases():
        assert case.rows in ROWS
        for launch in case.candidates():
            entry = entry_of(SHAPE._replace(rows=case.rows), launch, 1.0, 2.0)
            assert launches._parse(entry)[1] == launch


@pytest.mark.long
def test_candidates_compile_for_sm_90() -> None:
    """The largest and the smallest tiles of each list, with codes of 4 and of 8 bits. A launch that exceeds the shared
    memory for another shape is not an error, but not a candidate either."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({row["case"] for row in rows}) == 12
    for row in rows:
        print(row)
        assert row["shared"] <= SHARED_BYTES, row
