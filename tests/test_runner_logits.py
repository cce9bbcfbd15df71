"""The logits of the C++ runner, which it does not print: a small program prints them, and they have the model's bits."""

import shutil
import subprocess
from dataclasses import replace
from itertools import accumulate, chain, product
from pathlib import Path

import pytest
import torch

from conf.quantization import QuantConfig
from conf.schema import DType, RunConfig
from kernels import build
from models.exported.runner.build import LIBRARY
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import REPOSITORY, all_logits, run_config
from tests.helpers.cases import each
from tests.helpers.exports import FLOATS, INT8, VARIANTS, Exports, family_model
from tests.helpers.quantized_models import CACHES, STATIC_CACHES, make, quantize_run, random_rows, write_rows

pytestmark = [
    pytest.mark.skipif(build.library() is None, reason="the kernels are not built here"),
    pytest.mark.long,  # compiling the program takes 14 s
]
RECURRENT = (
    "lfm2",
    "bamba",
    "granitemoehybrid",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "qwen3_5_text",
    "qwen3_next",
    "kimi_linear",
)
LATENT = "deepseek_v2", "glm4_moe_lite", "kimi_k2", "minicpm3", "mistral4"
FORMATS = [name for name in CACHES if name != "none"]
STEPS = [[[*range(3, 43)], [9], [9], [10]], [[8], [9, 10, 11], [*range(20, 50)]]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, name = tmp_path_factory.mktemp("built"), build.instruction_set()
    shutil.copyfile(build.compiled(name), folder / LIBRARY)
    flags = [*build.FLAGS, *build.INSTRUCTION_SETS[name][1], f'-DINSTRUCTION_SET="{name}"']
    runner = REPOSITORY / "models/exported/runner"
    sources = [*{*runner.glob("*.cpp")} - {runner / "main.cpp"}, REPOSITORY / "tests/helpers/runner_logits.cpp"]
    linked = ["-L", str(folder), f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    made = folder / "runner_logits"
    build.run([build.compiler(), *flags, *map(str, sources), "-o", str(made), *linked])
    return made


@each(
    "family, dtype, quant",
    [
        *product(["llama3", "qwen2", "mixtral", "qwen2_moe", "lfm2_moe", *VARIANTS], [DType.bfloat16], [FLOATS]),
        *product([*RECURRENT, "deepseek_v3"], [DType.float32, DType.bfloat16], [FLOATS, INT8]),
        *product([*LATENT], [DType.bfloat16], [FLOATS]),
    ],
)
def test_logits_have_the_bits_of_the_model(
    family: str, dtype: DType, quant: QuantConfig, program: Path, exports: Exports, tmp_path: Path
) -> None:
    run = family_model(family, tmp_path / family, quant)
    check_bits(replace(run, model=replace(run.model, dtype=dtype)), program, exports)


@each(
    "family, dtype, cache",
    [
        *product(["llama3", "v2_no_q_lora", "kimi_linear"], [DType.bfloat16], FORMATS),
        *product(["v3"], [DType.float32, DType.float16], ["int8", "int4", "fp8, static"]),
    ],
)
def test_formats_of_the_cache(
    family: str, dtype: DType, cache: str, program: Path, exports: Exports, tmp_path: Path
) -> None:
    """The latents of latent attention are keys and values in one tensor, and are coded once."""
    run = family_model(family, tmp_path / family)
    if cache in STATIC_CACHES:
        data, quant = write_rows(tmp_path / "rows.jsonl", random_rows(14, 16)), QuantConfig(**STATIC_CACHES[cache])
        make(quantize_run(tmp_path / family, quant, tmp_path / "made", data), tmp_path / "run")
        run = run_config(tmp_path / "made")
    else:
        run = replace(run, quant=QuantConfig(**CACHES[cache]))
    check_bits(replace(run, model=replace(run.model, dtype=dtype)), program, exports)


def check_bits(run: RunConfig, program: Path, exports: Exports) -> None:
    """Check the logits of a prompt and new tokens, and of a prompt in parts, which are longer than a window."""
    made, engine = exports.of(run), load_engine(run, 1)
    for steps in STEPS:
        tokens, ends = [*chain(*steps)], [*accumulate(map(len, steps))]
        expected = all_logits(engine, tokens)[[end - 1 for end in ends]].float().contiguous()
        lines = "".join(f"{' '.join(map(str, step))}\n" for step in steps)
        command = [program, made, str(ends[0]), str(len(tokens))]
        ran = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stderr) == (0, "")
        bits = torch.tensor([[*map(int, line.split())] for line in ran.stdout.splitlines()], dtype=torch.int32)
        assert bits.equal(expected.view(torch.int32))
