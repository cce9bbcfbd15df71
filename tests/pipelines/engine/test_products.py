"""With the C++ kernels no product uses torch on a CPU, where the order of a sum may depend on the number of rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from conf.decoding import DecodeConfig
from conf.quantization import Activations, QuantConfig, QuantScheme
from conf.schema import DType
from kernels import build
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, link
from tests.helpers.deepseek import V3_GROUPS
from tests.helpers.deepseek import build as build_deepseek

pytestmark = pytest.mark.skipif(build.library() is None, reason="without the C++ kernels torch computes")

aten = torch.ops.aten
PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten.addr),
    *(aten.linear, aten.matmul, aten.einsum, aten.bilinear, aten._trilinear, aten.convolution),
    *(aten._int_mm, aten._scaled_mm, aten._weight_int8pack_mm, aten._weight_int4pack_mm_for_cpu),
    *(aten.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention_for_cpu),
}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [23, 24]]
GREEDY = DecodeConfig(max_new_tokens=4, ignore_eos=True)
CODES = {
    "int8": QuantConfig(QuantScheme.int8),
    "int4": QuantConfig(QuantScheme.int4, group_size=32, overrides={"*.down_proj": "int8"}),
    "a8w8": QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic),
    "fp8": QuantConfig(QuantScheme.fp8, activations=Activations.dynamic),
}


class NoProduct(TorchDispatchMode):
    """Refuses torch's products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in PRODUCTS, func
        return func(*args, **(kwargs or {}))


def check(
    folder: Path,
    dtype: str,
    decode: DecodeConfig = GREEDY,
    quant: QuantConfig | None = None,
    prompts: list[list[int]] = PROMPTS,
) -> None:
    """Check that prompts, chunks and tokens are computed without torch's products."""
    run = run_config(folder, allow_pickle=True)
    run = replace(run, model=replace(run.model, dtype=DType[dtype]), quant=quant or QuantConfig())
    engine = load_engine(replace(run, device=replace(run.device, max_batched_tokens=24)), 3)
    with NoProduct():
        generate(engine, prompts, decode)


@pytest.mark.long
@each("family", GOLDEN_FAMILIES)
def test_every_family_in_every_dtype(family: str, tmp_path: Path) -> None:
    prompts = load_file(GOLDENS / family / "golden.safetensors")["input_ids"].tolist()
    (tmp_path / family).mkdir()
    link(family, tmp_path / family)
    for dtype in ("float32", "float16"):
        check(tmp_path / family, dtype, prompts=prompts * 3)


@each("version, options", [(2, {}), (3, V3_GROUPS)])
def test_deepseek(version: int, options: dict[str, Any], tmp_path: Path) -> None:
    build_deepseek(version, **options).save_pretrained(tmp_path / str(version))
    for dtype in ("float32", "bfloat16", "float16"):
        check(tmp_path / str(version), dtype)


def test_every_scheme_in_every_dtype(tmp_path: Path) -> None:
    write_llama(tmp_path)
    for quant in CODES.values():
        for dtype in ("float32", "bfloat16", "float16"):
            check(tmp_path, dtype, quant=quant)


def test_contrastive_search(tmp_path: Path) -> None:
    write_llama(tmp_path)
    check(tmp_path, "float32", replace(GREEDY, penalty_alpha=0.6, top_k=3))
