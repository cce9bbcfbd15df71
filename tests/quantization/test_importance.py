"""Importance matrices: both forms of llama.cpp's files, the sums compared with transformers' inputs, and their use."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, MixtralForCausalLM

from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig, QuantMethod, QuantScheme
from conf.schema import RunConfig, Task
from kernels.linear import BlockWeight
from models.causal_lm import CausalLM
from models.formats import open_checkpoint
from models.formats.gguf.imatrix import read_imatrix, write_imatrix
from models.formats.gguf.writer import write_gguf
from models.layers.linear import Linear
from models.linear_layers import linear_layer
from pipelines.loading.load_engine import load_engine
from pipelines.loading.quantize.calibration_data import read_calibration_data
from quantization.importance import read_importance
from tests.helpers.builders import engine_of, run_config
from tests.helpers.catalog import write_other
from tests.helpers.oracle import write_model
from tests.helpers.quantized_models import quantize_run, random_rows, write_rows

WEIGHTED = QuantConfig(QuantScheme.q4_k_m, QuantMethod.imatrix)
QUERY, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"


def write_binary(file: Path, entries: dict[str, tuple[int, Any]], end: bytes = b"") -> Path:
    """Write llama.cpp's older form: calls, and values that are sums over calls, by name."""
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += np.array(values, "<f4").tobytes()
    file.write_bytes(data + end)
    return file


def write_keys(file: Path, kind: str, **tensors: Any) -> Path:
    """Write a GGUF file of a type with float32 tensors of the query projection, by suffix."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type(kind)
    for suffix, values in tensors.items():
        writer.add_tensor(f"{QUERY}.{suffix}", np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_both_forms(tmp_path: Path) -> None:
    sums, file = np.arange(12, dtype=np.float32).reshape(3, 4), tmp_path / "made" / "x.gguf"
    entries = {EXPERTS: (sums, np.float32([2, 0, 8])), QUERY: (sums[:1], np.float32([4]))}
    write_imatrix(file, entries, "texts.txt", num_chunks=5, chunk_size=16)
    means = {QUERY: [0, 0.25, 0.5, 0.75], EXPERTS: [0, 0.5, 1, 1.5, 1, 1, 1, 1, 1, 1.125, 1.25, 1.375]}
    binary = {QUERY: (4, [0, 1, 2, 3]), EXPERTS: (8, [8 * value for value in means[EXPERTS]])}
    end = struct.pack("<ii", 5, 9) + b"texts.txt"
    for path in (file, write_binary(tmp_path / "x.dat", binary, end)):
        matrix = read_imatrix(path)
        assert {name: values.tolist() for name, values in matrix.entries.items()} == means
        assert (matrix.datasets, matrix.num_chunks) == (["texts.txt"], 5)
    assert read_imatrix(write_binary(tmp_path / "old.dat", binary)).entries.keys() == means.keys()

    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    numbers = {"imatrix.datasets": ["texts.txt"], "imatrix.chunk_count": 5, "imatrix.chunk_size": 16}
    assert keys == {"general.type": "imatrix", **numbers}
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}  # in ggml's order
    of_experts = {f"{EXPERTS}.in_sum2": [4, 3], f"{EXPERTS}.counts": [1, 3]}
    assert shapes == {f"{QUERY}.in_sum2": [4, 1], f"{QUERY}.counts": [1, 1], **of_experts}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    made = quantize_run(tmp_path / "model", WEIGHTED, None, data)
    return replace(made, task=Task.predict, quantize=QuantizeConfig())


def inputs_of(reference: Any, samples: list[list[int]], names: list[str]) -> dict[str, torch.Tensor]:
    """Return the sums of squares of the inputs of transformers' modules, in float64."""
    sums = dict[str, torch.Tensor]()

    def add(name: str, x: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) + x.double().square().flatten(0, -2).sum(0)

    for name in names:
        reference.get_submodule(name).register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
    with torch.inference_mode():
        for sample in samples:
            reference(torch.tensor([sample]))
    return sums


def blocks_of(model: CausalLM) -> dict[str, tuple[str, list[int]]]:
    """Return the type and the packed bytes of each linear layer in blocks."""
    weights = {name: layer.method.weight for name, layer in model.named_modules() if isinstance(layer, Linear)}
    return {name: (w.kind, w.memory.tolist()) for name, w in weights.items() if isinstance(w, BlockWeight)}


def test_collected_and_used(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the bytes of the file that `convert` writes with the same matrix, and not the unweighted bytes."""
    reference = write_model(tmp_path / "model", LlamaForCausalLM, hidden_size=256, intermediate_size=288)
    blocks = blocks_of(load_engine(run, 1).executor.model)
    (file,) = (tmp_path / "imatrix").glob("*.gguf")
    matrix, specs = read_imatrix(file), [f"model.layers.{i}.{name}" for i in (0, 1) for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    )]  # fmt: skip
    samples = read_calibration_data(run.calibrate, None, 128, are_prompts=False).samples
    expected = inputs_of(reference, samples, [*specs, "lm_head"])
    model = engine_of(tmp_path / "model").executor.model
    found = read_importance(str(file), model, "llama")
    assert found.keys() == expected.keys()
    for name, sums in expected.items():  # float32 activations of another order of sums
        torch.testing.assert_close(found[name].double(), sums / sum(map(len, samples)), rtol=1e-4, atol=1e-6)

    write_gguf(open_checkpoint(tmp_path / "model", False), tmp_path / "x.gguf", "q4_k_m", imatrix=matrix)
    assert blocks == blocks_of(engine_of(tmp_path / "x.gguf").executor.model)
    assert {kind for kind, _ in blocks.values()} == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert fields["quantize.imatrix.file"].contents() == str(file)
    assert fields["quantize.imatrix.entries_count"].contents() == len(matrix.entries) == 15

    monkeypatch.setattr("pipelines.loading.quantize.importance.SequentialCalibrator", None)  # must not collect again
    for quant in (WEIGHTED, replace(WEIGHTED, imatrix=str(file))):
        calibrate = run.calibrate if quant.imatrix is None else CalibrateConfig()
        again = load_engine(replace(run, quant=quant, calibrate=calibrate), 1)
        assert blocks == blocks_of(again.executor.model)
    plain = replace(run, quant=QuantConfig(QuantScheme.q4_k_m), calibrate=CalibrateConfig())
    unweighted = blocks_of(load_engine(plain, 1).executor.model)
    assert {name: kind for name, (kind, _) in unweighted.items()} == {name: kind for name, (kind, _) in blocks.items()}
    # codes of Q8_0 do not depend on the weights
    assert not any(unweighted[name] == blocks[name] for name in blocks if blocks[name][0] != "Q8_0")


@pytest.mark.long
def test_entries_of_separate_projections(tmp_path: Path) -> None:
    """llama.cpp has an entry for each of q, k and v, whose rows one layer has here."""
    write_other(tmp_path, "internlm2")
    entries = {f"blk.1.attn_{part}.weight": (1, range(64)) for part in "qkv"}
    file = write_binary(tmp_path / "x.dat", entries)
    found = read_importance(str(file), engine_of(tmp_path).executor.model, "internlm2")
    assert {name: values.tolist() for name, values in found.items()} == {"model.layers.1.attention.wqkv": [*range(64)]}


def refused_files(file: Path) -> list[tuple[Path, str]]:
    """Return files that are no importance matrix of the model, next to `file`, and their messages."""
    folder, ours = file.parent, [1.0] * 64
    some = write_binary(folder / "some.dat", {QUERY: (1, ours)})
    short, text = folder / "short.dat", folder / "text.dat"
    short.write_bytes(some.read_bytes()[:-4])
    text.write_text("An ordinary text, in which no number is a count.")
    (folder / "empty.dat").write_bytes(b"")
    (folder / "half.gguf").write_bytes(file.read_bytes()[:-64])
    others = {f"blk.{i}.attn_q.weight": (1, ours) for i in range(12)} | {"blk.0.attn_k.weight": (1, ours * 2)}
    fine = {"in_sum2": [ours], "counts": [[1]]}
    return [
        (folder / "absent.gguf", r"cannot be read \(No such file or directory\): give a file of llama-imatrix"),
        (folder, r"cannot be read \(Is a directory\)"),
        (short, "short.dat is truncated, or not an importance matrix: give"),
        (text, "text.dat is truncated, or not an importance matrix: give"),
        (folder / "empty.dat", "empty.dat is empty: give"),
        (folder / "half.gguf", "half.gguf: .* it is truncated or damaged"),
        (write_binary(folder / "none.dat", {}), "none.dat has no entries"),
        (write_binary(folder / "a.dat", {"\n": (1, ours)}), "a.dat is not an importance matrix"),
        (
            write_binary(folder / "b.dat", {QUERY: (1, [-1.0] * 64)}),
            f"b.dat: {QUERY} has a value that is negative or",
        ),
        (write_binary(folder / "c.dat", {QUERY: (1, [torch.nan] * 64)}), f"c.dat: {QUERY} has a value that is neg"),
        (write_binary(folder / "d.dat", {"blk.0.ffn_gate_inp.weight": (1, ours)}), "d.dat has no entry for a tensor"),
        (
            write_binary(folder / "e.dat", others),
            r"another model: blk.0.attn_k.weight with 128 values instead of 64, blk.2.attn_q.weight, .* and 3 more, which this",
        ),
        (write_keys(folder / "f.gguf", "model", **fine), "is not an importance matrix, but has general.type='model'"),
        (write_keys(folder / "g.gguf", "imatrix", in_sum2=[ours]), f"{QUERY} has no in_sum2 and counts that fit"),
        (write_keys(folder / "h.gguf", "imatrix", **fine | {"counts": [[-1]]}), "count that is negative or not"),
        (write_keys(folder / "i.gguf", "imatrix", **fine | {"in_sum2": [[torch.inf] * 64]}), "a value that is neg"),
    ]


def test_experts_and_what_is_refused(run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = write_model(tmp_path / "model", MixtralForCausalLM, num_local_experts=4, num_experts_per_tok=2)
    run = replace(run, quant=replace(WEIGHTED, scheme=QuantScheme.q4_1))
    model = load_engine(run, 1).executor.model
    (file,) = (tmp_path / "imatrix").glob("*.gguf")
    reader = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(file).tensors}
    samples = read_calibration_data(run.calibrate, None, 128, are_prompts=False).samples
    routed = inputs_of(reference, samples, ["model.layers.1.mlp.gate"])["model.layers.1.mlp.gate"]
    sums, counts = (reader[f"blk.1.ffn_up_exps.weight.{part}"] for part in ("in_sum2", "counts"))
    assert sums.shape == (4, 64)
    assert counts.sum() == 2 * sum(map(len, samples))  # two experts for each token
    np.testing.assert_allclose(sums.sum(0), 2 * routed.numpy(), rtol=1e-4)
    expert = linear_layer(model, "model.layers.1.block_sparse_moe.experts.2.w3")
    layout: Any = expert.method._layout  # type: ignore[union-attr]
    np.testing.assert_array_equal(layout.importance.numpy(), sums[2] / counts[2])

    warn_once.cache_clear()
    ours = [1.0] * 64
    some = write_binary(tmp_path / "some.dat", {QUERY: (1, ours), "blk.0.ffn_gate_inp.weight": (1, ours)})
    given = replace(run_config(tmp_path / "model"), quant=replace(run.quant, imatrix=str(some)))
    load_engine(given, 1)
    assert "24 of 25 layers in blocks are quantised without importance, because" in caplog.text
    for path, message in refused_files(file):
        with pytest.raises(UserError, match=message) as error:
            load_engine(replace(given, quant=replace(given.quant, imatrix=str(path))), 1)
        assert "\n" not in str(error.value)
    write_gguf(open_checkpoint(tmp_path / "model", False), tmp_path / "x.gguf", "q4_1")
    stored = replace(run_config(tmp_path / "x.gguf"), quant=given.quant)
    with pytest.raises(UserError, match="quant.imatrix=.*some.dat is not used by a quantised checkpoint"):
        load_engine(stored, 1)
