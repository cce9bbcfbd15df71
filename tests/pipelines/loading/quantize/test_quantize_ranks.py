"""task=quantize with ranks: with any method the files equal those of one process bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.compose import dump
from conf.errors import UserError
from conf.quantization import QuantConfig, SparsityConfig, SparsityMethod, SparsityPattern
from conf.schema import DType
from pipelines.jobs.interrupt import RankLost
from pipelines.tasks.quantize import run_quantize
from quantization.part_files import PartFiles
from tests.helpers.builders import all_logits
from tests.helpers.calibrated_ranks import quantized_by
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, WHOLE_PROMPTS
from tests.helpers.divided_engines import close, parallel
from tests.helpers.quantized_models import CALIBRATED, SHIFT, make, quantize_run, random_rows, reloaded, write_rows

LLAMA = GOLDENS / "llama3"  # four query heads of two key heads
PRUNED = {
    "2:4 wanda": QuantConfig(sparsity=SparsityConfig(SparsityMethod.wanda, pattern=SparsityPattern["2:4"])),
    "int8 gptq, magnitude": replace(CALIBRATED["int8 gptq"], sparsity=SparsityConfig(SparsityMethod.magnitude, 0.3)),
}
QUANTS = {**CALIBRATED, **PRUNED, "shift": SHIFT}
PROMPT = list(range(5, 40))


def has_bits_of_one_process(
    family: str, quant_name: str, *parallel_layouts: tuple[int, int], dtype: DType = DType.float32
) -> bool:
    run = quantize_run(GOLDENS / family, QUANTS[quant_name], None, None)
    run = replace(run, model=replace(run.model, dtype=dtype))
    golden = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    samples = random_rows(6, 16, golden[-2:] if family in WHOLE_PROMPTS else ())
    one = quantized_by(run, samples)
    return all(quantized_by(run, samples, tp, pp) == one for tp, pp in parallel_layouts)


def test_ranks_choose_the_codes_of_one_process() -> None:
    """Unequal parts, two of which have the same key head; a tied head, in the last stage."""
    assert has_bits_of_one_process("llama3", "int8 gptq, static cache", (3, 1))
    assert has_bits_of_one_process("llama_tied_bias", "a8w8 static smoothquant", (1, 2))


@pytest.mark.long
@each("name", {**CALIBRATED, **PRUNED})
def test_every_method_has_the_bits_of_one_process(name: str) -> None:
    assert has_bits_of_one_process("llama3", name, (2, 1), (1, 2), (2, 2))
    assert has_bits_of_one_process("llama3", name, (2, 1), dtype=DType.bfloat16)


@pytest.mark.long
@each("family", GOLDEN_FAMILIES)
def test_every_family_has_the_bits_of_one_process(family: str) -> None:
    for name in ("int8 gptq, static cache", "a8w8 static smoothquant", "int8 gptq, magnitude"):
        assert has_bits_of_one_process(family, name, (2, 1), (1, 2))


@pytest.mark.long
def test_shifts_have_the_bits_of_one_process() -> None:
    assert has_bits_of_one_process("opt", "shift", (2, 1), (1, 2))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the files' bytes without the values that count a tied embedding in both of its stages: the report, and the
    manifest with its sha256."""
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name not in ("report.md", "manifest.json")
    }


@pytest.mark.long
def test_the_folder_of_ranks_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a run of one process was ended and ranks continue with its parts. The measurements equal those of the
    folder."""
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    for name, tp, pp in (
        ("int8 gptq, static cache", 2, 1),
        ("int4 awq", 1, 2),
        ("a8w8 static smoothquant", 2, 2),
        ("2:4 wanda", 2, 1),
    ):
        one, ranks = (
            quantize_run(LLAMA, QUANTS[name], tmp_path / f"{which} {name}", data) for which in ("one", "ranks")
        )
        made = make(one, tmp_path / "run")
        expected = json.loads((tmp_path / "run" / "metrics.json").read_text())
        with monkeypatch.context() as patched:
            patched.setattr(PartFiles, "complete", _ended)
            with pytest.raises(KeyboardInterrupt):
                make(ranks, tmp_path / "ended")
        (partial,) = tmp_path.glob(".*.partial")
        (partial / "model-00001.safetensors").unlink()  # the first layer exists, the second is still missing
        close(make(parallel(ranks, tp, pp), tmp_path / "run"))
        metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
        assert bytes_of(tmp_path / f"ranks {name}") == bytes_of(tmp_path / f"one {name}")
        measured = "perplexity_before", "perplexity", "kl_mean", "top1_agreement"
        assert [metrics[key] for key in measured] == [expected[key] for key in measured]
        assert all_logits(reloaded(tmp_path / f"ranks {name}"), PROMPT).equal(all_logits(made, PROMPT))


def _ended(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_a_failure_of_another_rank_is_one_line(tmp_path: Path) -> None:
    """And no folder is left."""
    source, target = tmp_path / "source", tmp_path / "quantized"
    source.mkdir()
    tensors = load_file(LLAMA / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    run = parallel(quantize_run(source, CALIBRATED["a8w8 static"], target, data), 1, 2)
    with pytest.raises(
        (RankLost, UserError), match=r"^the weights hold NaN or infinite numbers: model.layers.1.mlp.up_proj"
    ) as caught:
        run_quantize(run, tmp_path / "run", dump)
    assert "\n" not in str(caught.value)
    assert not target.exists()
