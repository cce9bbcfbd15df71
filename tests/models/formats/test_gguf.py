"""GGUF files, written by the gguf package: equal to the same model in Hugging Face's layout, or refused in one line."""

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats.base import Checkpoint
from models.formats.gguf.config import FAMILIES
from models.formats.gguf.header import TYPES
from quantization.layouts.gguf import FORMATS
from tests.helpers.builders import SMALL, complete, engine_of
from tests.helpers.cases import each
from tests.helpers.gguf_files import add_shape, finish, llama_cpp_tensors, opened, write_tensors, write_twin
from tests.helpers.gguf_models import LLAMA_LIKE as MODELS
from tests.helpers.oracle import random_prompts, write_model

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
KINDS = """
F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0
MXFP4 NVFP4
""".split()


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.open_weights({}) for name, tensor in file.read(file.shapes)}


def greedy(path: Path, block_activations: str = "int8") -> list[list[int]]:
    prompts, engine = random_prompts(SMALL["vocab_size"] or 0), engine_of(path, block_activations=block_activations)
    return [output.token_ids for output in complete(engine, prompts, DecodeConfig(max_new_tokens=20))]


def assert_equal(file: Path, folder: Path, block_activations: str = "int8") -> None:
    """Compare weights by name and bit, and greedy tokens."""
    actual, expected = weights(opened(file)), weights(opened(folder))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name].float(), tensor.float()), name
    assert greedy(file, block_activations) == greedy(folder)


@each("family, merged", [*((family, True) for family in MODELS), ("mixtral", False)], quick=[("qwen2", True)])
def test_equals_the_other_layout(family: str, merged: bool, tmp_path: Path) -> None:
    model_class, config = MODELS[family]
    write_model(tmp_path, model_class, **config)
    file = write_twin(tmp_path, tmp_path / "twin.gguf", merged=merged)
    reader = opened(file).config
    assert reader.require("model_type", str) == family.partition("_")[0]
    assert_equal(file, tmp_path)


@each("kind, dtype", [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float16"), ("MXFP4", "float16")])
def test_rounded_weights_are_the_packages(kind: str, dtype: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, LlamaForCausalLM, intermediate_size=96)
    type = gguf.GGMLQuantizationType[kind]
    for parameter in model.parameters():
        if parameter.ndim == 2:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), type), type)
            parameter.data = torch.from_numpy(rounded.copy())
    file = write_twin(tmp_path, tmp_path / "twin.gguf", kind)
    model.save_pretrained(tmp_path)
    assert opened(file).config.raw("torch_dtype") == dtype
    assert_equal(file, tmp_path, block_activations="none" if kind in FORMATS else "int8")


@each("kind", KINDS)
def test_every_type_is_dequantised_as_the_package_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.formats.gguf.tensors.DEQUANTISED_AT_ONCE", 1000)  # several pieces, the last one shorter
    type = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type]
    shape = (37, 2 * block) if block > 1 else (37, 5)
    data = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_minimum(writer)
    writer.add_tensor_info("blk.0.attn_v.weight", shape, np.dtype(np.float32), data.nbytes, type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_tensor_data(data)
    writer.close()
    value_weight = weights(opened(tmp_path / "x.gguf"))["model.layers.0.self_attn.v_proj.weight"]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, type).reshape(shape)
    np.testing.assert_array_equal(value_weight.float().numpy(), expected)


def add_minimum(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)


def llama3_divisors(theta: float, head_dim: int, scaling: dict[str, float]) -> np.ndarray:
    """Return the factors that llama.cpp's converter writes, by Llama 3.1's formula in float64."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = 2 * np.pi / frequencies
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    with np.errstate(divide="ignore"):
        smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


@each(
    "theta, scaling",
    [
        (10000.0, LLAMA3),
        (500000.0, LLAMA3 | {"original_max_position_embeddings": 8192}),
        (500000.0, LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
        # of Llama 4: a quotient by zero is below 0 or above 1
        (500000.0, LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}),
    ],
)
def test_llama3_scaling(theta: float, scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": theta} | scaling
    write_model(tmp_path, LlamaForCausalLM, head_dim=128, num_hidden_layers=1, rope_parameters=rope)
    file = tmp_path / "twin.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    add_shape(writer, tmp_path)
    factors = {"rope_freqs.weight": llama3_divisors(theta, 128, scaling)}
    write_tensors(writer, factors | llama_cpp_tensors(tmp_path), "F32")
    assert opened(file).config.raw("rope_scaling") == {"rope_type": "llama3"} | scaling
    assert_equal(file, tmp_path)


@each(
    "factors, scaling",
    [
        ([1.0] * 8, None),
        ([1, 1, 1, 1, 1, 2, 3, 4], "holds factors that Llama 3's scaling does not give"),
        ([1.0] * 7, "expected"),
    ],
)
def test_other_rotary_factors(factors: list[float], scaling: str | None, tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM)
    writer = gguf.GGUFWriter(tmp_path / "twin.gguf", "llama")
    add_shape(writer, tmp_path)
    array = {"rope_freqs.weight": np.array(factors, np.float32)}
    write_tensors(writer, array | llama_cpp_tensors(tmp_path), "F32")
    if scaling is None:
        assert opened(tmp_path / "twin.gguf").config.raw("rope_scaling") is None
    else:
        with pytest.raises(UserError, match=f"twin.gguf: rope_freqs.weight .*{scaling}"):
            opened(tmp_path / "twin.gguf")


@each(
    "rope, metadata",
    [
        ({"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 2.5}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
            | {"beta_fast": 16.0, "beta_slow": 2.0},
            {"type": "yarn", "factor": 4.0, "original_context_length": 32}
            | {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        ),
    ],
)
def test_other_scalings(rope: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM, rope_parameters={"rope_theta": 10000.0} | rope)
    keys = {f"llama__rope__scaling__{key}": value for key, value in metadata.items()}
    file = write_twin(tmp_path, tmp_path / "twin.gguf", **keys)
    assert_equal(file, tmp_path)
    assert opened(file).config.raw("rope_scaling") == rope


def test_config_in_the_terms_of_config_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, LlamaForCausalLM, rms_norm_eps=1e-5)
    ids = {f"tokenizer__ggml__{name}_token_id": i for i, name in enumerate(("bos", "eos", "eot"), start=1)}
    file = write_twin(tmp_path, tmp_path / "twin.gguf", **ids, llama__tensor_data_layout="x", llama__new_key=3)
    config = opened(file).config
    assert config.raw("rms_norm_eps") == 1e-5  # not 9.999999747378752e-06, the file's float32
    assert (config.raw("bos_token_id"), config.raw("eos_token_id")) == (1, [2, 3])
    assert (config.raw("vocab_size"), config.raw("max_position_embeddings")) == (96, 128)
    engine_of(file)
    assert caplog.messages == [f"the config in {file} has keys that are not used: llama.new_key"]


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    """The file is truncated after its header was read."""
    write_model(tmp_path, LlamaForCausalLM)
    file = write_twin(tmp_path, tmp_path / "twin.gguf")
    checkpoint = opened(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(
        UserError, match=r"twin.gguf has \d+ bytes of the tensor at \d+, expected \d+: the file was changed"
    ):
        weights(checkpoint)


def test_rows_that_are_not_halves_of_heads(tmp_path: Path) -> None:
    """The halves of a head of 15 channels cannot be paired for rotation."""
    write_model(tmp_path, LlamaForCausalLM)
    writer = gguf.GGUFWriter(tmp_path / "twin.gguf", "llama")
    add_shape(writer, tmp_path)
    tensors = llama_cpp_tensors(tmp_path)
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][:-4]
    write_tensors(writer, tensors, "F32")
    with pytest.raises(UserError, match=r"q_proj.weight has 60 rows, expected a multiple of 8$"):
        weights(opened(tmp_path / "twin.gguf"))


def write_split(folder: Path, count: int, **first: Any) -> list[Path]:
    """Write the Llama of the folder in `count` files. `first`: keys of the first file that replace its own."""
    tensors = list(llama_cpp_tensors(folder).items())
    files = [folder / f"big-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "llama")
        numbers = {"split.no": i, "split.count": count, **(first if i == 0 else {})}
        for key, value in numbers.items():
            writer.add_uint16(key, value)
        if i == 0:
            add_shape(writer, folder)
        write_tensors(writer, dict(tensors[i::count]), "F32")
    return files


def test_split_files(tmp_path: Path) -> None:
    write_model(tmp_path / "folder", LlamaForCausalLM)
    files = write_split(tmp_path / "folder", 3)
    assert_equal(files[1], tmp_path / "folder")
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in files:
        file.rename(alone / file.name)
    assert_equal(alone, tmp_path / "folder")
    (alone / files[2].name).unlink()
    with pytest.raises(
        UserError, match="is one of 3 files of a model, but big-00003-of-00003.gguf is missing in its folder"
    ):
        opened(alone)


def test_split_files_that_do_not_belong_together_or_hold_a_tensor_twice(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM)
    files = write_split(tmp_path, 2, **{"split.no": 1})
    with pytest.raises(UserError, match=r"big-00001-of-00002.gguf has split.no=1 and split.count=2"):
        opened(files[0])
    renamed = files[1].rename(tmp_path / "part.gguf")
    with pytest.raises(UserError, match=r"part.gguf has split.no=1 and split.count=2, which its name contradicts"):
        opened(renamed)

    files = write_split(tmp_path, 2)
    writer = gguf.GGUFWriter(files[1], "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    write_tensors(writer, llama_cpp_tensors(tmp_path), "F32")
    with pytest.raises(
        UserError, match="big-00002-of-00002.gguf holds the tensor '.*', which big-00001-of-00002.gguf also holds"
    ):
        opened(files[0])


def test_folders(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM)
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "README.gguf").write_text("not one")
    file = write_twin(tmp_path / "hf", folder / "a.gguf")
    assert greedy(folder) == greedy(tmp_path / "hf")
    (folder / "b.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\): give model.path=FILE.gguf"):
        opened(folder)
    named_otherwise = file.rename(tmp_path / "model.bin")
    assert greedy(named_otherwise) == greedy(tmp_path / "hf")


@each(
    "metadata, message",
    [
        ({"llama__attention__value_length": 8}, "attention.value_length=8 is not supported: only 16"),
        ({"llama__attention__causal": False}, "attention.causal=False is not supported"),
        ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type='longrope' is not supported"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.factor is missing"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor=2.0 is not supported"),
        ({"llama__expert_count": 4}, "expert_used_count is missing"),
        ({"llama__feed_forward_lengths": [1, 2]}, "'llama.feed_forward_lengths' has a value for each layer"),
        ({"llama__vocab_size": 97}, "does not hold the model .*wrong shape: model.embed_tokens.weight"),
        ({"llama__attention__sliding_window": -1}, "attention.sliding_window=-1 is not a number above 0"),
    ],
)
def test_refused_metadata(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM)
    with pytest.raises(UserError, match=message):
        engine_of(write_twin(tmp_path, tmp_path / "twin.gguf", **metadata))


@each(
    "tensors, message",
    [
        ({"blk.0.attn_q_norm.weight": (16,)}, "unexpected: blk.0.attn_q_norm.weight"),
        ({"blk.0.ffn_gate_exps.weight": (2, 4, 64)}, "unexpected: model.layers.0.block_sparse_moe.experts.0.w1.weight"),
        (
            {"blk.0.ffn_up.0.weight": (2, 2), "blk.0.ffn_up_exps.weight": (1, 2, 2)},
            "experts.0.w3.weight twice: the second is in",
        ),
    ],
)
def test_unexpected_tensors(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM)
    writer = gguf.GGUFWriter(tmp_path / "twin.gguf", "llama")
    add_shape(writer, tmp_path)
    more = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_tensors(writer, llama_cpp_tensors(tmp_path) | more, "F32")
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path / "twin.gguf")


@each(
    "keys, origin",
    [
        ({}, ""),
        (
            {"general.name": "A\nB", "general.base_model.0.repo_url": "https://huggingface.co/a/b"},
            r" \(general.name='A\\nB', general.base_model.0.repo_url='https://huggingface.co/a/b'\)",
        ),
    ],
)
def test_other_architectures(keys: dict[str, str], origin: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "bert")
    for key, value in keys.items():
        writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    supported = f"only {', '.join(map(repr, sorted(FAMILIES)))}"
    way = f"give the Hugging Face checkpoint from which the file was made{origin}$"
    with pytest.raises(UserError, match=f"x.gguf: general: architecture='bert' is not supported: {supported}: {way}"):
        opened(tmp_path / "x.gguf")


def test_every_type_that_the_package_unpacks_is_read() -> None:
    unpacked = set()
    for kind, (_, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError), np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            unpacked.add(kind)
    assert unpacked == TYPES
    assert {kind.name for kind in unpacked} == set(KINDS)


def test_a_vocabulary_is_not_a_model(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "x.gguf", "llama"))
    with pytest.raises(UserError, match="x.gguf holds a vocabulary and no tensors: give it as model.tokenizer=FILE"):
        opened(tmp_path / "x.gguf")
