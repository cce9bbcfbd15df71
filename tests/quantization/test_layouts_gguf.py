"""Packed weights of GGUF files compared with the gguf package's dequantisation."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, KVCacheScales, QuantConfig, QuantMethod, QuantScheme
from kernels.linear import BlockWeight, FloatWeight
from kernels.linear.block_weight import read_factors
from models.formats import open_checkpoint
from models.formats.gguf.reader import GGUFWeights
from models.formats.gguf.writer import write_gguf
from models.layers.linear import Linear
from models.layers.matrix_layer import MatrixLayer
from models.linear_layers import linear_layer
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.quantize import run_quantize
from quantization.layouts.gguf import GPU_FORMATS, GGUFWeight, read_gguf_quantization
from quantization.layouts.sharded import ShardedLayout
from quantization.linear import BlockMethod, IntMethod
from tests.helpers.builders import all_logits, complete, engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.gguf_files import add_shape, finish, llama_cpp_tensors, random_blocks, write_twin
from tests.helpers.gguf_twins import BLOCK_KINDS, FP4_KINDS, TWINS, TYPES, write_blocks, write_pair
from tests.helpers.hybrid_families import HYBRID, LINEAR
from tests.helpers.oracle import random_prompts, write_model
from tests.helpers.packed_layouts import assert_rows_are_independent
from tests.helpers.quantized_models import quantize_run


def is_in_blocks(module: nn.Module) -> bool:
    return isinstance(module, MatrixLayer) and isinstance(module.method, BlockMethod)


def is_int(module: nn.Module) -> bool:
    return isinstance(module, MatrixLayer) and isinstance(module.method, IntMethod)


@each("kind", TYPES)
@each("family", TWINS)
def test_codes_and_scales_are_the_files(family: str, kind: str, tmp_path: Path) -> None:
    file, folder = write_pair(tmp_path, family, kind)
    expected = load_file(folder / "model.safetensors")
    (weights,) = open_checkpoint(file, False).open_weights({})
    assert isinstance(weights, GGUFWeights)
    modules = [name for name in weights.coded_modules() if "embed" not in name]
    assert modules
    before = dict(weights.shapes)
    weights.keep_codes(modules)
    all_tensors = dict(weights.read(weights.shapes))
    assert {name: tuple(tensor.shape) for name, tensor in all_tensors.items()} == weights.shapes
    for module in modules:
        layout = GGUFWeight(kind, (before[f"{module}.weight"][0], before[f"{module}.weight"][1]))
        layer_tensors = {name: all_tensors[f"{module}.{name}"] for name in layout.tensors()}
        assert {name: tuple(tensor.shape) for name, tensor in layer_tensors.items()} == layout.tensors()
        assert layout.read(layer_tensors).weight.dequantize().equal(expected[f"{module}.weight"])
        on_a_gpu = replace(layout, keeps_blocks=False).read(layer_tensors).weight
        assert on_a_gpu.dequantize().equal(expected[f"{module}.weight"])
    scales = [read_factors(kind, all_tensors[f"{module}.blocks"]) for module in modules]
    assert any(bool((factors == 0).any()) for factors in scales)
    assert kind == "Q8_0" or all(bool((factors < 0).any()) for factors in scales)


@pytest.mark.long
@each("kind", TYPES)
@each("family", TWINS)
def test_a_file_runs_packed_without_an_option(family: str, kind: str, tmp_path: Path) -> None:
    file, folder = write_pair(tmp_path, family, kind)
    packed_engine, expected = engine_of(file, block_activations="none"), engine_of(folder)
    assert packed_engine.executor.weight_bytes < expected.executor.weight_bytes / 2
    prompts = random_prompts(96, (5, 1, 40))
    for prompt in prompts:
        # Kernels hold 32 inputs of a row in 16 bits: 2^-16 of the largest at every layer, of logits of the order 10.
        torch.testing.assert_close(all_logits(packed_engine, prompt), all_logits(expected, prompt), atol=2e-3, rtol=0)
    decode = DecodeConfig(max_new_tokens=12)
    ids = [output.token_ids for output in complete(expected, prompts, decode)]
    assert [output.token_ids for output in complete(packed_engine, prompts, decode)] == ids
    assert_rows_are_independent(packed_engine, prompts)
    model = packed_engine.executor.model
    assert isinstance(model.head.method, BlockMethod)
    assert isinstance(model.embedding.method, BlockMethod)
    rows = model.embedding(torch.arange(model.config.vocab_size))
    assert rows.equal(load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(rows.dtype))


def test_other_types_are_dequantised_next_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, LlamaForCausalLM, intermediate_size=256)
    file = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    add_shape(writer, tmp_path)
    kinds = {"attn_v": "Q8_0", "ffn_up": "Q4_0", "ffn_down": "TQ2_0", "attn_q": "F16"}
    for name, array in llama_cpp_tensors(tmp_path).items():
        type = gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], "F32")]
        writer.add_tensor(name, gguf.quants.quantize(array, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with caplog.at_level("WARNING"):
        model = engine_of(file).executor.model
    packed = {name.rpartition(".")[2] for name, module in model.named_modules() if is_in_blocks(module)}
    assert packed == {"v_proj", "up_proj"}
    assert caplog.messages == ["weights are unpacked to floats, which take more memory: 2 of TQ2_0"]


def test_options_with_a_packed_file(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama", "Q8_0")
    run = run_config(file)
    with pytest.raises(UserError, match=r"quant=int4 contradicts .* is Q8_0 there, not int4 .*: leave quant out"):
        load_engine(replace(run, quant=QuantConfig(QuantScheme.int4)), 3)
    with pytest.raises(UserError, match="quant.embedding=int8 is not used by a quantised checkpoint: leave it out"):
        load_engine(replace(run, quant=QuantConfig(QuantScheme.int8, group_size=32, embedding="int8")), 3)
    floats = write_twin(tmp_path, tmp_path / "floats.gguf", "F16")
    with pytest.raises(
        UserError, match="quant.block_activations=none, but no layer is in blocks of llama.cpp: leave it out"
    ):
        engine_of(floats, block_activations="none")


def test_codes_are_not_calibrated_again(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama", "Q8_0")
    run = quantize_run(file, QuantConfig(QuantScheme.int4, QuantMethod.gptq), tmp_path / "made", None)
    for dry_run in (True, False):
        with pytest.raises(UserError, match="twin.gguf is quantised already: give the float model"):
            run_quantize(replace(run, quantize=replace(run.quantize, dry_run=dry_run)), tmp_path / "run", dump)
    static = QuantConfig(kv_cache=KVCacheFormat.int8, kv_cache_scales=KVCacheScales.static)
    with pytest.raises(UserError, match="the checkpoint, which is quantised already, has no scales of the KV cache"):
        load_engine(replace(run_config(file), quant=static), 3)
    assert not (tmp_path / "made").exists()


def test_a_file_of_floats_is_quantised_where_an_option_says_so(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM, intermediate_size=96)
    file = write_twin(tmp_path, tmp_path / "twin.gguf", "F16")
    assert read_gguf_quantization(open_checkpoint(file, False).open_weights({})) is None
    engine = load_engine(replace(run_config(file), quant=QuantConfig(QuantScheme.int8)), 3)
    assert is_int(engine.executor.model.get_submodule("model.layers.0.mlp.up_proj"))


def test_a_damaged_scale_is_refused(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama", "Q8_0")
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.ffn_up.weight")
    data = bytearray(file.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16("nan").tobytes()
    file.write_bytes(data)
    with pytest.raises(UserError, match="model.layers.0.mlp.up_proj: its scales have values that are not finite"):
        engine_of(file)


@each("family", TWINS)
def test_blocks_run_packed(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kinds in (BLOCK_KINDS, FP4_KINDS):
        check_blocks(*write_blocks(tmp_path, family, kinds))
    assert not caplog.messages


def check_blocks(file: Path, floats: Path) -> None:
    (coded,), (expected_file,) = (open_checkpoint(path, False).open_weights({}) for path in (file, floats))
    for (name, tensor), (_, values) in zip(coded.read(coded.shapes), expected_file.read(coded.shapes), strict=True):
        assert tensor.equal(values), name  # dequantised, as for a GPU
    packed_engine, expected = engine_of(file, block_activations="none"), engine_of(floats)
    rounding_engine = engine_of(file)
    methods = {
        name: module.method
        for name, module in packed_engine.executor.model.named_modules()
        if isinstance(module, MatrixLayer)
    }
    blocks = {name for name, method in methods.items() if isinstance(method, BlockMethod)}
    assert {name for name in methods if "_proj" in name or "experts" in name} <= blocks
    for name in blocks:  # bit for bit
        weight = methods[name].weight
        assert isinstance(weight, BlockWeight)
        layer = expected.executor.model.get_submodule(name)
        assert isinstance(layer, MatrixLayer)
        other = layer.method.weight
        assert isinstance(other, Tensor | FloatWeight)
        assert weight.unpack().dequantize().equal(other if isinstance(other, Tensor) else other.unpack())
    prompts = random_prompts(96, (5, 1, 40))
    for prompt in prompts:
        logits = all_logits(expected, prompt)
        # Kernels hold 16 or 32 inputs of a row in 16 bits: 2^-16 of the largest, times weights that are differences of
        # larger numbers, at every layer.
        torch.testing.assert_close(
            all_logits(packed_engine, prompt), logits, atol=1e-3 * float(logits.abs().max()), rtol=0
        )
        # An activation is off by at most 2^-8 of the largest of 32, in each of seven products of both layers.
        differences = (all_logits(rounding_engine, prompt) - logits).abs().amax(1)
        assert 1e-3 < differences.median() / logits.abs().max() < 4e-2
    for engine in (packed_engine, rounding_engine):
        assert_rows_are_independent(engine, prompts)


@each(
    "mixture, expected_kinds",
    [
        # the head, and five values and five ffn_down of nine layers
        ("q4_k_m", {"Q4_K": 9 * 7 - 10, "Q6_K": 11}),
        # the values of two layers; the other values, attn_output and ffn_down
        ("q3_k_m", {"Q3_K": 9 * 4, "Q5_K": 2, "Q4_K": 7 + 9 + 9, "Q6_K": 1}),
    ],
)
def test_a_mixture_is_the_one_of_the_converted_file(
    mixture: str, expected_kinds: dict[str, int], tmp_path: Path
) -> None:
    write_model(tmp_path / "floats", LlamaForCausalLM, hidden_size=256, intermediate_size=512, num_hidden_layers=9)
    write_gguf(open_checkpoint(tmp_path / "floats", False), tmp_path / "file.gguf", mixture)
    run = run_config(tmp_path / "floats")
    packed_model = load_engine(replace(run, quant=QuantConfig(QuantScheme[mixture])), 1).executor.model
    stored = engine_of(tmp_path / "file.gguf").executor.model
    kinds = Counter[str]()
    for name, layer in stored.named_modules():
        if isinstance(layer, Linear):
            expected, weight = layer.method.weight, linear_layer(packed_model, name).method.weight
            assert isinstance(weight, BlockWeight)
            assert isinstance(expected, BlockWeight)
            assert (weight.kind, weight.memory.tolist()) == (expected.kind, expected.memory.tolist()), name
            kinds[weight.kind] += 1
    assert kinds == expected_kinds


def test_blocks_are_floats_for_a_gpu(tmp_path: Path) -> None:
    file, _ = write_blocks(tmp_path, "llama")
    files = open_checkpoint(file, False).open_weights({})
    assert read_gguf_quantization(files, torch.device("cuda")) is None
    assert GPU_FORMATS.keys() == {"Q8_0", "Q4_0", "MXFP4", "NVFP4"}
    file_quantization = read_gguf_quantization(files)
    assert file_quantization is not None
    assert set(file_quantization.types.values()) == {"Q4_1", "Q5_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


def test_a_share_of_blocks(tmp_path: Path) -> None:
    raw = torch.from_numpy(random_blocks("Q4_K", 40, 512, seed=3))
    layout = ShardedLayout(GGUFWeight("Q4_K", (40, 512)), (range(3, 9), range(20, 31)))
    rows = [*range(3, 9), *range(20, 31)]
    assert layout.tensors() == {"blocks": (17, 288)}
    stored = layout.read({"blocks": raw[rows]})
    assert stored.weight.dequantize().equal(
        GGUFWeight("Q4_K", (40, 512)).read({"blocks": raw}).weight.dequantize()[rows]
    )


def test_scales_of_fp4_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    for kind, byte in (("MXFP4", 0xFF), ("NVFP4", 0x7F), ("NVFP4", 0xFF), ("NVFP4", 0x81)):  # NaN, negative
        layout, raw = GGUFWeight(kind, (40, 512)), torch.from_numpy(random_blocks(kind, 40, 512, seed=3))
        layout.read({"blocks": raw, "global_scale": torch.ones(1)})
        for factor in (float("nan"), float("inf"), 0.0, -1.0) if kind == "NVFP4" else ():
            with pytest.raises(UserError, match="its scales have values that are not finite, or"):
                layout.read({"blocks": raw, "global_scale": torch.tensor([factor])})
        raw[39, -36 if kind == "NVFP4" else -17] = byte
        with pytest.raises(UserError, match="its scales have values that are not finite, or"):
            layout.read({"blocks": raw, "global_scale": torch.ones(1)})
    write_model(tmp_path, LlamaForCausalLM)
    writer, kind = gguf.GGUFWriter(tmp_path / "x.gguf", "llama"), gguf.GGMLQuantizationType.NVFP4
    add_shape(writer, tmp_path)
    writer.add_tensor("token_embd.weight", random_blocks("NVFP4", 96, 64, seed=0), raw_dtype=kind)
    writer.add_tensor("token_embd.scale", np.ones(2, np.float32))
    finish(writer)
    with pytest.raises(UserError, match=r"x.gguf: token_embd.scale is F32 \[2\], expected F32 \[1\]"):
        open_checkpoint(tmp_path / "x.gguf", False).open_weights({})


def test_blocks_of_several_heads_keep_the_files_order(tmp_path: Path) -> None:
    """Qwen3.5's `ssm_out` has head 0 of both key heads first, then head 1 of both. Heads are of 128 channels, blocks of
    256 (K-quants) or 32."""
    heads = {"linear_num_value_heads": 6, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    layers = {"layer_types": [LINEAR, "full_attention"] * 2, "hidden_size": 256, "intermediate_size": 256}
    HYBRID["qwen3_5_text"].write(tmp_path / "hf", **heads, **layers)
    for kind, type in (("q4_k_m", "Q4_K"), ("q6_k", "Q6_K"), ("q8_0", "Q8_0")):
        write_gguf(open_checkpoint(tmp_path / "hf", False), tmp_path / f"{kind}.gguf", kind)
        (stored,) = (t for t in gguf.GGUFReader(tmp_path / f"{kind}.gguf").tensors if t.name == "blk.0.ssm_out.weight")
        in_file = torch.from_numpy(gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType[type]))
        expected = in_file.unflatten(1, (3, 2, 128)).transpose(1, 2).flatten(1)
        (weights,) = open_checkpoint(tmp_path / f"{kind}.gguf", False).open_weights({})
        assert isinstance(weights, GGUFWeights)
        floats = dict(weights.read(weights.shapes))
        (name,) = (name for name in weights.coded_modules() if name.endswith("layers.0.linear_attn.out_proj"))
        assert floats[f"{name}.weight"].equal(expected)
        is_permuted = name in weights.permuted_modules()
        assert is_permuted == (type != "Q8_0")
        weights.keep_codes([name])
        layout = GGUFWeight(type, (256, 768), is_permuted=is_permuted)
        assert {leaf: weights.shapes[f"{name}.{leaf}"] for leaf in layout.tensors()} == layout.tensors()
        tensors = {leaf: dict(weights.read([f"{name}.{leaf}"]))[f"{name}.{leaf}"] for leaf in layout.tensors()}
        assert layout.read(tensors).weight.dequantize().equal(expected)
        if type == "Q8_0":
            on_a_gpu = replace(layout, keeps_blocks=False, is_permuted=True)
            reverse = tensors | {"permutation": torch.arange(768).flip(0)}
            assert on_a_gpu.read(reverse).weight.dequantize().equal(expected.flip(1))
        if type != "Q4_K":
            continue
        save_file({key: tensor.contiguous() for key, tensor in floats.items()}, tmp_path / "hf" / "model.safetensors")
        packed_engine = engine_of(tmp_path / "q4_k_m.gguf", block_activations="none")
        assert isinstance(linear_layer(packed_engine.executor.model, name).method, BlockMethod)
        float_engine = engine_of(tmp_path / "hf")
        for prompt in random_prompts(96, (5, 40)):
            # Kernels hold 16 inputs of a row in 16 bits, and the layer's norm enlarges small outputs. Heads in another
            # order change logits by up to 22.
            logits = all_logits(float_engine, prompt)
            torch.testing.assert_close(all_logits(packed_engine, prompt), logits, atol=1e-2, rtol=0)


@each(("tensor", "place"), [("ffn_up", 2), ("ffn_down", 208), ("attn_output", 0)])
def test_a_damaged_block_is_refused(tensor: str, place: int, tmp_path: Path) -> None:
    file, _ = write_blocks(tmp_path, "llama")
    file_tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == f"blk.0.{tensor}.weight")
    data = bytearray(file.read_bytes())
    data[file_tensor.data_offset + place : file_tensor.data_offset + place + 2] = np.float16("inf").tobytes()
    file.write_bytes(data)
    with pytest.raises(UserError, match="model.layers.0.*_proj: its scales have values that are not finite"):
        engine_of(file)
