"""Checkpoints of other schemes through parallel layouts: whole, tp 2, tp 3 x pp 2 and whole again, bit-identical."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import Phi3ForCausalLM

from kernels.collectives import Threads
from models.formats.huggingface import SafetensorsFile
from models.sharding import ParallelLayout
from quantization.smoothing_record import FOLDS
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import PROMPTS
from tests.helpers.conversion import SHARDED, contents, convert, tensors_in
from tests.helpers.divided import assert_same_bits, divided_steps, rank_plan, stage_steps, whole_steps
from tests.helpers.fp8_layouts import SMALL_BLOCKS, encode
from tests.helpers.huggingface_files import assert_same
from tests.helpers.oracle import write_model
from tests.helpers.packed_layouts import GPTQ, gptq_tensors, write_twins
from tests.helpers.quantized_models import CALIBRATED, make, quantize_run, random_rows, write_rows


def calibrated(scheme: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_llama(folder / "float", intermediate_size=96, num_hidden_layers=2)
        rows = write_rows(folder / "rows.jsonl", random_rows(20, 16))
        make(quantize_run(folder / "float", CALIBRATED[scheme], folder / "made", rows), folder / "run")
        return folder / "made"

    return write


def permuted_gptq(folder: Path) -> Path:
    config: dict[str, Any] = {**GPTQ, "desc_act": True}

    def shuffled(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return gptq_tensors(weight, config, shuffled=True)

    return write_twins(folder, config, shuffled)[0]


def fp8_blocks(folder: Path) -> Path:
    return write_twins(folder, SMALL_BLOCKS, lambda name, weight: encode(SMALL_BLOCKS, weight))[0]


def fused(folder: Path) -> Path:
    write_model(folder / "phi3", Phi3ForCausalLM, pad_token_id=0, eos_token_id=1)
    return folder / "phi3"


SOURCES = {
    **{name: calibrated(name) for name in ("int4 awq", "a8w8 static smoothquant", "int8 gptq, static cache")},
    "gptq, permuted": permuted_gptq,
    "fp8 blocks that ranks share": fp8_blocks,
    "fused": fused,
}


@each("name", SOURCES, quick=["a8w8 static smoothquant", "fused"])
def test_through_divisions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES[name](tmp_path / "source")
    halves = convert(source, tmp_path / "2", format=SHARDED, tp=2)
    thirds = convert(halves, tmp_path / "3x2", format=SHARDED, tp=3, pp=2)
    last = convert(thirds, tmp_path / "last")
    without = {FOLDS} & contents(source).keys()
    assert_same(tensors_in(last), tensors_in(source))
    assert {name: contents(last)[name] for name in without} == {name: contents(source)[name] for name in without}
    expected = whole_steps(run_config(source), PROMPTS)
    assert_same_bits(expected, divided_steps(run_config(thirds), 2, PROMPTS))
    reads: list[str] = []
    read = SafetensorsFile.read

    def watched(self: SafetensorsFile, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        reads.append(self.path.name)
        return read(self, names)

    monkeypatch.setattr(SafetensorsFile, "read", watched)
    for stage in range(2):
        for rank, group in enumerate(Threads.of(3)):
            files = rank_plan(run_config(thirds), ParallelLayout(3, 2, rank, stage), group).files
            reads.clear()
            for file in files:
                assert [*file.read(file.shapes)]
            assert {*reads} == {f"rank_{stage}_{rank}.safetensors"}
    monkeypatch.undo()
    assert_same_bits(expected, stage_steps(run_config(thirds), 3, 2, PROMPTS))
