"""GGUF files of the newer families: logits of transformers' model, and equal tokens; and refused values of their
keys."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.base import WeightFile
from models.formats.gguf.config import read_gguf_config
from models.formats.gguf.header import GGUFHeader, TensorInfo
from models.formats.gguf.reader import GGUFWeights
from models.formats.gguf.rotary import partial_rotary_factor
from models.formats.gguf.writer import write_gguf
from models.layers.linear import Linear
from quantization.linear import BlockMethod
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.cases import each
from tests.helpers.gguf_families import ARCHITECTURES, add_family_shape, converted_tensors, write_family
from tests.helpers.gguf_files import random_blocks, write_tensors
from tests.helpers.gguf_models import (
    CASES,
    FULL,
    ONE_GROUP,
    SLIDING,
    assert_equals_transformers,
    build,
)
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.oracle import random_prompts

# Row lengths are multiples of 32, the block of Q8_0, and there are few layers, which keeps errors small.
WIDE: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": None},
    "deepseek_v3": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32}
    | {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    | {"num_experts_per_tok": 8, **ONE_GROUP},
    # all experts: a choice could depend on a last bit, which another kernel changes
    "qwen3_moe": {"num_experts_per_tok": 6},
    "gpt2": {"n_embd": 64},
    "bloom": {"hidden_size": 96},
}


def opened(file: Path) -> list[WeightFile]:
    return open_checkpoint(file, allow_pickle=False).open_weights({})


@each("name", CASES, quick=("phi3", "glm4"))
def test_equals_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = build(tmp_path, name)
    file = write_family(tmp_path, tmp_path / "twin.gguf")
    caplog.clear()  # values of transformers' config
    assert_equals_transformers(file, reference)
    assert [
        name for name, _, _ in caplog.record_tuples if not name.startswith("transformers")
    ] == []  # every key was read
    twin, decode = engine_of(tmp_path), DecodeConfig(max_new_tokens=20)
    prompts = random_prompts(96)
    tokens, expected = (
        [output.token_ids for output in complete(engine, prompts, decode)] for engine in (engine_of(file), twin)
    )
    assert tokens == expected


def test_every_tensor_is_the_other_layouts(tmp_path: Path) -> None:
    """Equal bits, except Gemma's norms, from which 1 is subtracted."""
    for name in CASES:
        build(tmp_path, name)
        files = opened(write_family(tmp_path, tmp_path / "twin.gguf"))
        tensors = {key: tensor for file in files for key, tensor in file.read(file.shapes)}
        shapes = {key: shape for file in files for key, shape in file.shapes.items()}
        expected = load_file(tmp_path / "model.safetensors")
        assert tensors.keys() == expected.keys(), name
        for key, tensor in expected.items():
            assert shapes[key] == tuple(tensor.shape), key
            # 2e-7: float32 next to 2 has steps of 2.4e-7, by half of which 1 + w is rounded
            is_norm = name.startswith("gemma") and key.endswith("norm.weight")
            torch.testing.assert_close(tensors[key], tensor, atol=2e-7 if is_norm else 0, rtol=0)


def test_deepseek_before_its_latent_was_split(tmp_path: Path) -> None:
    reference = build(tmp_path, "deepseek_v2_yarn")
    assert_equals_transformers(write_family(tmp_path, tmp_path / "twin.gguf", splits_latent=False), reference)


def test_halves_in_two_files(tmp_path: Path) -> None:
    """attn_k_b is the last tensor of the first file, attn_v_b the first of the second."""
    reference = build(tmp_path, "deepseek_v3")
    reader = gguf.GGUFReader(write_family(tmp_path, tmp_path / "twin.gguf"))
    tensors = {tensor.name: np.array(tensor.data).reshape(tensor.shape[::-1]) for tensor in reader.tensors}
    cut = [name for name in tensors if "attn_v_b" not in name]
    config = json.loads((tmp_path / "config.json").read_text())
    for i, names in enumerate((cut, sorted(tensors.keys() - set(cut)))):
        writer = gguf.GGUFWriter(tmp_path / f"two-{i + 1:05}-of-00002.gguf", "deepseek2")
        add_family_shape(writer, config, splits_latent=True)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        write_tensors(writer, {name: tensors[name] for name in names}, "F32")
    assert_equals_transformers(tmp_path / "two-00001-of-00002.gguf", reference)


PACKED = {
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
    "glm4": ("self_attn.q_proj", "mlp.gate_up_proj"),
    "qwen3_moe": ("self_attn.k_proj", "mlp.experts.5.down_proj"),
    "gemma3": ("self_attn.o_proj", "mlp.down_proj"),
    "deepseek_v3": ("self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.gate_proj"),
    "gpt2": ("attn.c_attn", "mlp.c_proj"),
    "bloom": ("self_attention.query_key_value", "mlp.dense_4h_to_h"),
}


@pytest.mark.long
@each("name", PACKED)
def test_codes_match_the_rounded_weights(name: str, tmp_path: Path) -> None:
    """The weights stay packed, and the logits are near the logits of transformers with the package's dequantised weights."""
    reference = build(tmp_path, name, **WIDE.get(name, {}))
    file = write_family(tmp_path, tmp_path / "twin.gguf", "Q8_0")
    with torch.no_grad():
        read = {key: tensor for weight_file in opened(file) for key, tensor in weight_file.read(weight_file.shapes)}
        state = load_file(tmp_path / "model.safetensors")
        for key, tensor in read.items():
            # half a step of the codes, and float16's rounding of the scale; wrongly ordered rows differ by far more
            assert (tensor - state[key]).abs().max() <= state[key].abs().max() * (1 / 254 + 2**-11), key
        save_file({key: tensor.contiguous() for key, tensor in read.items()}, tmp_path / "model.safetensors")
    rounded = type(reference).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    engine = engine_of(file, block_activations="none")
    first = next(module for module in engine.executor.model.modules() if isinstance(module, nn.ModuleList))[-1]
    for weight_name in PACKED[name]:
        assert isinstance(first.get_submodule(weight_name).method, BlockMethod), weight_name
    for prompt in random_prompts(96):
        with torch.no_grad():
            expected = rounded(torch.tensor([prompt])).logits[0]
        # Kernels hold 32 inputs of a row in 16 bits: 2^-16 of the largest at every layer, of logits of the order
        # 10.
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=2e-3, rtol=0)


@each(
    "name, settings, module",
    [
        ("bloom", {"hidden_size": 256, "n_head": 4}, "transformer.h.1.self_attention.query_key_value"),
        ("gpt2", {"n_embd": 256}, "transformer.h.1.attn.c_attn"),
    ],
)
def test_blocks_are_in_the_order_of_the_weight(
    name: str, settings: dict[str, int], module: str, tmp_path: Path
) -> None:
    """Rows of blocks are permuted like rows of floats; a block is [O, I], also where Hugging Face stores [I, O]."""
    build(tmp_path, name, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", name)
    add_family_shape(writer, config, splits_latent=True)
    kind = gguf.GGMLQuantizationType.Q4_K
    for weight_name, array in converted_tensors(tmp_path).items():
        if weight_name == "blk.1.attn_qkv.weight":
            writer.add_tensor(weight_name, random_blocks("Q4_K", 768, 256, seed=0), raw_dtype=kind)
        else:
            writer.add_tensor(weight_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (weights,) = opened(tmp_path / "x.gguf")
    assert isinstance(weights, GGUFWeights)
    (weight,) = (tensor for _, tensor in weights.read([f"{module}.weight"]))
    weights.keep_codes([module])
    (blocks,) = (tensor for _, tensor in weights.read([f"{module}.blocks"]))
    unpacked = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
    assert unpacked.shape == (768, 256)
    assert unpacked.equal(weight.T if name == "gpt2" else weight)


FUSED = {  # the module, its parts in the file, and whether the rows of a rotary pair are adjacent in the file
    "falcon": ("transformer.h.0.self_attention.query_key_value", ("attn_qkv",), False),
    "internlm2": ("model.layers.0.attention.wqkv", ("attn_q", "attn_k", "attn_v"), True),
}


@pytest.mark.long
@each("name", FUSED)
def test_blocks_of_queries_keys_and_values(name: str, tmp_path: Path) -> None:
    """Heads 0 and 1 share key head 0. The blocks and the floats have the rows of each key head together."""
    module, parts, is_paired = FUSED[name]
    writer, kind, dim = gguf.GGUFWriter(tmp_path / "x.gguf", name), gguf.GGMLQuantizationType.Q8_0, 16
    sizes = (writer.add_embedding_length, 64), (writer.add_head_count, 4), (writer.add_head_count_kv, 2)
    more = (writer.add_block_count, 1), (writer.add_feed_forward_length, 96), (writer.add_vocab_size, 96)
    for add, value in (*sizes, *more, (writer.add_context_length, 64)):
        add(value)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    raw = random_blocks("Q8_0", 8 * dim, 64, seed=1)
    for part, rows in zip(parts, np.split(raw, (64, 96) if is_paired else ()), strict=True):
        writer.add_tensor(f"blk.0.{part}.weight", np.ascontiguousarray(rows), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    heads = gguf.quants.dequantize(raw, kind).reshape(8, dim, 64)  # 4 of queries, 2 of keys, 2 of values
    if is_paired:
        heads[:6] = heads[:6, [*range(0, dim, 2), *range(1, dim, 2)]]
    expected = heads[[0, 1, 4, 6, 2, 3, 5, 7]].reshape(-1, 64)
    (weights,) = opened(tmp_path / "x.gguf")
    assert isinstance(weights, GGUFWeights)
    ((_, weight),) = weights.read([f"{module}.weight"])
    weights.keep_codes([module])
    ((_, blocks),) = weights.read([f"{module}.blocks"])
    assert np.array_equal(weight.numpy(), expected)
    assert np.array_equal(gguf.quants.dequantize(blocks.numpy(), kind), expected)


ROWS_OF_256: dict[str, dict[str, Any]] = {  # whole blocks of K-quants, and a router that chooses all experts
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "qwen3_moe": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    | {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 4},
    "gemma2": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "query_pre_attn_scalar": 64},
    "gemma3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "query_pre_attn_scalar": 64}
    | {"num_hidden_layers": 2, "layer_types": None},
    "phi3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "glm4": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "deepseek_v3": {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    | {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64}
    | {"num_experts_per_tok": 8, **ONE_GROUP},
    "gpt2": {"n_embd": 256},
    "bloom": {"hidden_size": 256, "n_head": 4},
}


def write_random_blocks(folder: Path) -> tuple[Path, Path]:
    """Write a model whose matrices are random blocks of all four types in turn. Return the package's dequantised
    floats."""
    config = json.loads((folder / "config.json").read_text())
    architecture = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    files = folder / "packed.gguf", folder / "floats.gguf"
    packed, floats = (gguf.GGUFWriter(file, architecture) for file in files)
    for writer in (packed, floats):
        add_family_shape(writer, config, splits_latent=True)
    for i, (name, array) in enumerate(converted_tensors(folder).items()):
        if array.ndim == 1 or "ffn_gate_inp" in name:
            packed.add_tensor(name, array)
            floats.add_tensor(name, array)
            continue
        kind = ("Q4_K", "Q6_K", "Q5_K", "Q5_0")[i % 4] if array.shape[-1] % 256 == 0 else "Q5_0"
        type = gguf.GGMLQuantizationType[kind]
        raw = random_blocks(kind, int(np.prod(array.shape[:-1])), array.shape[-1], seed=i)
        packed.add_tensor(name, raw.reshape(*array.shape[:-1], -1), raw_dtype=type)
        floats.add_tensor(name, np.array(gguf.quants.dequantize(raw, type)).reshape(array.shape))
    for writer in (packed, floats):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


@pytest.mark.long
@each("name", ROWS_OF_256)
def test_blocks_of_every_architecture(name: str, tmp_path: Path) -> None:
    """The weights stay packed, and the logits are near those with the package's own dequantisation of the same file."""
    build(tmp_path, name, **ROWS_OF_256[name])
    packed, floats = write_random_blocks(tmp_path)
    packed_engine, expected = engine_of(packed, block_activations="none"), engine_of(floats)
    layers = [
        module
        for key, module in packed_engine.executor.model.named_modules()
        if ".1." in key and isinstance(module, Linear)
    ]
    in_blocks = [module for module in layers if isinstance(module.method, BlockMethod)]
    assert len(in_blocks) >= len(layers) - 1 >= 3  # DeepSeek's kv_b_proj, split in the file, is not quantised
    for prompt in random_prompts(96):
        logits = all_logits(expected, prompt)
        differences = (all_logits(packed_engine, prompt) - logits).abs().amax(1)
        # Kernels hold 16 or 32 inputs of a row in 16 bits: 2^-16 of the largest, times weights that are differences of
        # larger numbers, at every layer. If random attention is nearly undecided between two tokens, one row's error
        # can be a hundred times larger.
        assert differences.median() <= 5e-4 * logits.abs().max()
        assert differences.max() <= 2e-2 * logits.abs().max()


@each(
    "name, kind, dtype",
    [
        ("qwen3", "Q8_0", "float16"),
        ("qwen3", "F16", "float16"),
        ("gemma2", "Q8_0", "bfloat16"),
        ("gemma3", "F16", "bfloat16"),
        ("gemma3", "F32", "float32"),
    ],
)
def test_dtype(name: str, kind: str, dtype: str, tmp_path: Path) -> None:
    """Gemma's hidden states exceed the range of float16."""
    build(tmp_path, name)
    file = write_family(tmp_path, tmp_path / "twin.gguf", kind)
    assert open_checkpoint(file, allow_pickle=False).config.raw("torch_dtype") == dtype


@pytest.mark.long
@each("name, layers, scale", [("gemma2", 46, 12.0), ("gemma3", 62, 12.0), ("gemma3", 61, 16.0)])
def test_scale_of_the_largest_gemmas(name: str, layers: int, scale: float, tmp_path: Path) -> None:
    """Gemma 2 and 3 27B divide by the root of hidden_size / heads. Their files lack it, and llama.cpp infers it from
    the number of layers."""
    build(tmp_path, name, hidden_size=48, num_hidden_layers=layers, layer_types=None)
    file = write_family(tmp_path, tmp_path / "twin.gguf")
    assert open_checkpoint(file, allow_pickle=False).config.raw("query_pre_attn_scalar") == scale


def test_gemma2_without_its_keys(tmp_path: Path) -> None:
    """The caps and the window are transformers' defaults, which are the values of all published Gemma 2 models."""
    published = transformers.Gemma2Config()
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    settings = {key: getattr(published, key) for key in keys}
    assert settings == {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    reference = build(tmp_path, "gemma2", **settings)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma2")
    add_family_shape(writer, json.loads((tmp_path / "config.json").read_text()), splits_latent=True)
    written = set(writer.kv_data[0])
    left_out = {key for key in written if key.endswith(keys)}
    assert len(left_out) == 3
    for key in left_out:
        del writer.kv_data[0][key]
    write_tensors(writer, converted_tensors(tmp_path), "F32")
    config = open_checkpoint(tmp_path / "x.gguf", allow_pickle=False).config
    assert {key: config.raw(key) for key in keys} == settings
    assert_equals_transformers(tmp_path / "x.gguf", reference)


def test_the_pattern_of_gemma3s_windows(tmp_path: Path) -> None:
    """The file names the pattern. Every second of three layers has full attention."""
    reference = build(tmp_path, "gemma3", num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING])
    file = write_family(tmp_path, tmp_path / "twin.gguf", gemma3__attention__sliding_window_pattern=2)
    assert_equals_transformers(file, reference)


def test_every_share_of_a_head_is_its_channels_again() -> None:
    """config.json readers multiply and round down: of 44 channels the share of 30 would become 29."""
    assert int(44 * (30 / 44)) == 29
    for head_dim in range(2, 257, 2):
        for channels in range(2, head_dim + 1, 2):
            assert int(head_dim * partial_rotary_factor(channels, head_dim)) == channels


def test_frequencies_of_gemma3s_windows(tmp_path: Path) -> None:
    build(tmp_path, "gemma3")
    file = write_family(tmp_path, tmp_path / "twin.gguf", gemma3__rope__freq_base_swa=20000.0)
    assert open_checkpoint(file, allow_pickle=False).config.raw("rope_local_base_freq") == 20000.0


@each(
    "name, metadata, message",
    [
        ("qwen3", {"qwen3__rope__dimension_count": 8}, "qwen3: rope.dimension_count=8 is not supported: only 16"),
        (
            "qwen3_moe",
            {"qwen3moe__expert_weights_norm": False},
            "expert_weights_norm=False is not supported: only True",
        ),
        ("qwen3_moe", {"qwen3moe__expert_gating_func": 2}, "expert_gating_func=2 is not supported: only 1"),
        ("qwen3_moe", {"qwen3moe__expert_weights_scale": 2.5}, "expert_weights_scale=2.5 is not supported: only None"),
        (
            "deepseek_v2",
            {"deepseek2__attention__temperature_scale": 0.1},
            "attention.temperature_scale=0.1 is not supported: only None, 0.0",
        ),
        ("gemma3", {"gemma3__attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("phi3", {"phi3__rope__scaling__type": "yarn"}, "rope.scaling.type='yarn' is not supported: only 'none'"),
        ("phi3", {"phi3__rope__scaling__attn_factor": 1.2}, "rope.scaling.attn_factor=1.2 is not supported: only None"),
        ("glm4", {"glm4__nextn_predict_layers": 1}, "nextn_predict_layers=1 is not supported: only None, 0"),
        (
            "glm4",
            {"glm4__rope__dimension_sections": [1, 2]},
            "'glm4.rope.dimension_sections' has a value for each layer",
        ),
        ("deepseek_v2", {"deepseek2__expert_gating_func": 3}, "expert_gating_func=3 is not supported: only 1, 2"),
        ("deepseek_v2", {"deepseek2__expert_weights_norm": True}, "norm_topk_prob=True is not supported"),
        (
            "deepseek_v2",
            {"deepseek2__rope__scaling__yarn_log_multiplier": 0.1},
            "yarn_log_multiplier needs rope.scaling.type=yarn",
        ),
        ("deepseek_v2", {"deepseek2__attention__key_length": 24}, "attention.key_length=24 is not supported: only 32"),
        (
            "deepseek_v2",
            {"deepseek2__attention__key_length_mla": 8},
            "key_length_mla=8 is not above rope.dimension_count=8",
        ),
        ("gpt2", {"gpt2__attention__head_count_kv": 2}, "attention.head_count_kv=2 is not supported: only 4"),
        ("bloom", {"bloom__attention__head_count_kv": 1}, "attention.head_count_kv=1 is not supported: only 6"),
    ],
)
def test_refused_metadata(name: str, metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    build(tmp_path, name)
    with pytest.raises(UserError, match=message):
        engine_of(write_family(tmp_path, tmp_path / "twin.gguf", **metadata))


def write_deepseek(folder: Path, tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    writer = gguf.GGUFWriter(folder / "x.gguf", "deepseek2")
    add_family_shape(writer, json.loads((folder / "config.json").read_text()), splits_latent=True)
    write_tensors(writer, tensors, kind)
    return folder / "x.gguf"


@each(
    "changed, shape",
    [
        (lambda half: half[:, :, :-1], [4, 10, 23]),
        (lambda half: half[:-1], [3, 10, 24]),
        (lambda half: half.reshape(40, 24), [40, 24]),
    ],
)
def test_halves_that_do_not_fit(changed: Callable[[np.ndarray], np.ndarray], shape: list[int], tmp_path: Path) -> None:
    build(tmp_path, "deepseek_v2")
    tensors = converted_tensors(tmp_path)
    tensors["blk.1.attn_v_b.weight"] = np.ascontiguousarray(changed(tensors["blk.1.attn_v_b.weight"]))
    message = f"blk.1.attn_k_b has the shape [4, 24, 12] and attn_v_b {shape}: expected [heads, latent, key]"
    with pytest.raises(UserError, match=re.escape(message)):
        engine_of(write_deepseek(tmp_path, tensors))


def test_halves_and_their_whole(tmp_path: Path) -> None:
    """One of the two would stay unread."""
    build(tmp_path, "deepseek_v2")
    fused = converted_tensors(tmp_path, splits_latent=False)["blk.1.attn_kv_b.weight"]
    file = write_deepseek(tmp_path, converted_tensors(tmp_path) | {"blk.1.attn_kv_b.weight": fused})
    with pytest.raises(
        UserError, match=r"layers.1.self_attn.kv_b_proj.weight twice: the second is in 'blk.1.attn_kv_b"
    ):
        engine_of(file)


@each("missing", ["attn_k_b", "attn_v_b"])
def test_a_half_alone(missing: str, tmp_path: Path) -> None:
    build(tmp_path, "deepseek_v2")
    tensors = converted_tensors(tmp_path)
    del tensors[f"blk.1.{missing}.weight"]
    with pytest.raises(UserError, match=r"missing: model.layers.1.self_attn.kv_b_proj.weight"):
        engine_of(write_deepseek(tmp_path, tensors))


def test_the_dtype_of_halves(tmp_path: Path) -> None:
    """The dtype of both halves if it is the same, else the dtype that can represent both."""
    build(tmp_path, "deepseek_v2")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "deepseek2")
    add_family_shape(writer, json.loads((tmp_path / "config.json").read_text()), splits_latent=True)
    kinds = {"blk.0.attn_k_b.weight": "F16", "blk.0.attn_v_b.weight": "F16", "blk.1.attn_k_b.weight": "BF16"}
    for name, array in converted_tensors(tmp_path).items():
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (weights,) = opened(tmp_path / "x.gguf")
    expected = load_file(tmp_path / "model.safetensors")
    for layer, dtype, keys in ((0, torch.float16, torch.float16), (1, torch.float32, torch.bfloat16)):
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        ((_, actual),) = weights.read([name])
        assert (weights.dtypes[name], actual.dtype) == (dtype, dtype)
        actual, fused = (weight.view(4, 12 + 10, 24) for weight in (actual, expected[name]))
        assert actual[:, :12].equal(fused[:, :12].to(keys).to(dtype))
        assert actual[:, 12:].equal(fused[:, 12:].to(dtype))


@each(
    "counts, message",
    [
        ([0, 2, 3], r"head_count_kv=\[0, 2, 3\] needs one number of key heads for all layers with attention, and 0"),
        ([0, 0, 0], "needs one number of key heads"),
        ([0, -2, -2], "needs one number of key heads"),
        ([0, 2], "lfm2.attention.head_count_kv has 2 values, expected 3"),
        ([0.0, 2.0, 2.0], "lfm2.attention.head_count_kv must be an array of kind 'i', found f"),
        (["a"], "lfm2.attention.head_count_kv must be an array of kind 'i', found 1 texts"),
        (None, "lfm2.attention.head_count_kv must be an array of kind 'i', found none"),
    ],
)
def test_key_heads_of_each_layer_are_checked(counts: list[Any] | None, message: str) -> None:
    sizes = {"embedding_length": 64, "block_count": 3, "feed_forward_length": 64, "attention.head_count": 4}
    sizes |= {"context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3}
    scalars = {"general.architecture": "lfm2", **{f"lfm2.{key}": value for key, value in sizes.items()}}
    values = counts if counts == ["a"] else np.array(counts)
    arrays = {} if counts is None else {"lfm2.attention.head_count_kv": values}
    tensor = TensorInfo(Path("a.gguf"), (96, 64), gguf.GGMLQuantizationType.F32, 0, 4 * 96 * 64)
    tensors = {"token_embd.weight": tensor, "blk.0.attn_norm.weight": tensor, "blk.1.attn_norm.weight": tensor}
    with pytest.raises(UserError, match=message):
        read_gguf_config([GGUFHeader(Path("a.gguf"), scalars, arrays, tensors)])


@torch.inference_mode()
def test_value_heads_of_blocks_are_put_in_order(tmp_path: Path) -> None:
    """Heads of 64 channels are whole blocks of Q8_0. A block of Q6_K has four of them, so `out_proj` permutes its input."""
    (tmp_path / "model").mkdir()
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
    HYBRID["qwen3_5_text"].write(tmp_path / "model", **sizes, linear_num_value_heads=8)
    for dtype, tolerance in (("q8_0", 0.01), ("q6_k", 0.04)):  # a step of the codes, of weights up to 0.7
        file = tmp_path / f"{dtype}.gguf"
        write_gguf(open_checkpoint(tmp_path / "model", False), file, dtype)
        layers = [engine_of(path).executor.model.layers[0].linear_attn for path in (file, tmp_path / "model")]
        assert isinstance(layers[0].out_proj.method, BlockMethod)
        assert (layers[0].out_proj.method.permutation is None) is (dtype == "q8_0")
        assert isinstance(layers[0].in_proj_qkv.method, BlockMethod)
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
            rows = torch.eye(8 * 64 if name == "out_proj" else 256)
            actual, expected = (getattr(layer, name)(rows, None) for layer in layers)
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(layers[0].A_log, layers[1].A_log)
        assert layers[0].conv1d.weight.equal(layers[1].conv1d.weight)
