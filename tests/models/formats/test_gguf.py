"""GGUF files: written by the gguf package, read here; equal to the same model in Hugging Face's layout, or refused in one line."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats import Checkpoint, open_checkpoint
from tests.builders import SMALL, complete, engine_of
from tests.gguf_twins import add_shape, llama_cpp_tensors, pack, write_tensors, write_twin
from tests.oracle import random_prompts, write_model

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "llama_biases": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": (LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_wide_heads": (LlamaForCausalLM, {"head_dim": 80}),
    "mistral": (MistralForCausalLM, {"sliding_window": 7, "head_dim": 16}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2": (Qwen2ForCausalLM, {}),
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
KINDS = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL".split()


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.open_weights({}) for name, tensor in file.read(file.shapes)}


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(path, allow_pickle=False)


def greedy(path: Path) -> list[list[int]]:
    prompts = random_prompts(SMALL["vocab_size"] or 0)
    return [output.token_ids for output in complete(engine_of(path), prompts, DecodeConfig(max_new_tokens=20))]


def assert_equal(file: Path, folder: Path) -> None:
    """Equal weights to the bit, under equal names, and equal greedy tokens."""
    found, expected = weights(opened(file)), weights(opened(folder))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name
    assert greedy(file) == greedy(folder)


@pytest.mark.parametrize(("family", "merged"), [*((family, True) for family in FAMILIES), ("mixtral", False)])
def test_equals_the_other_layout(family: str, merged: bool, tmp_path: Path) -> None:
    model_class, config = FAMILIES[family]
    write_model(tmp_path, model_class, **config)
    file = write_twin(tmp_path, tmp_path / "twin.gguf", merged=merged)
    reader = opened(file).config
    assert reader.require("model_type", str) == family.partition("_")[0]
    assert_equal(file, tmp_path)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float16")])
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
    assert_equal(file, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_dequantised_as_the_package_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.formats.gguf.DEQUANTISED_AT_ONCE", 1000)  # several pieces, the last one shorter
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
    found = weights(opened(tmp_path / "x.gguf"))["model.layers.0.self_attn.v_proj.weight"]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, type).reshape(shape)
    np.testing.assert_array_equal(found.float().numpy(), expected)


def add_minimum(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(theta: float, head_dim: int, scaling: dict[str, float]) -> np.ndarray:
    """What llama.cpp's converter writes, by the formula of Llama 3.1, in float64."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = 2 * np.pi / frequencies
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (10000.0, LLAMA3),
        (500000.0, LLAMA3 | {"original_max_position_embeddings": 8192}),
        (500000.0, LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
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


@pytest.mark.parametrize(
    ("factors", "scaling"),
    [([1.0] * 8, None), ([1, 1, 1, 1, 1, 2, 3, 4], "holds factors that are not"), ([1.0] * 7, "expected")],
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


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 2.5}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
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
    assert config.raw("rms_norm_eps") == 1e-5  # and not 9.999999747378752e-06, which is what the file's float32 is
    assert (config.raw("bos_token_id"), config.raw("eos_token_id")) == (1, [2, 3])
    assert (config.raw("vocab_size"), config.raw("max_position_embeddings")) == (96, 128)
    engine_of(file)
    assert caplog.messages == [f"the config in {file} has keys that are not used: llama.new_key"]


def write_split(folder: Path, count: int, **first: Any) -> list[Path]:
    """The Llama of the folder in `count` files; `first`: keys that the first has instead of its own."""
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
        UserError, match="is one of 3 files of a model, but big-00003-of-00003.gguf is missing beside it"
    ):
        opened(alone)


def test_split_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM)
    files = write_split(tmp_path, 2, **{"split.no": 1})
    with pytest.raises(
        UserError, match=r"big-00001-of-00002.gguf says that it is file 1 of 2 \(split.no, split.count\)"
    ):
        opened(files[0])
    renamed = files[1].rename(tmp_path / "part.gguf")
    with pytest.raises(
        UserError, match=r"part.gguf says that it is file 1 of 2 \(split.no, split.count\): its name does not"
    ):
        opened(renamed)


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


@pytest.mark.parametrize(
    ("metadata", "message"),
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


@pytest.mark.parametrize(
    ("tensors", "message"),
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


@pytest.mark.parametrize("architecture", ["gemma2", "bert"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(UserError, match=f"architecture='{architecture}' is not supported: only 'llama', 'qwen2'"):
        opened(tmp_path / "x.gguf")


def test_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "x.gguf", "llama"))
    with pytest.raises(UserError, match="x.gguf holds a vocabulary and no tensors: it can be a tokenizer"):
        opened(tmp_path / "x.gguf")


U64, U32 = "<Q", "<I"
START = pack(b"GGUF", (U32, 3))
NO_PAIRS = (U64, 0)
ONE = ((U64, 1), NO_PAIRS)  # tensor, pairs


def tensor_of(*shape: int, name: str = "t", kind: int = 0, offset: int = 0) -> bytes:
    return pack(name, (U32, len(shape)), *((U64, n) for n in shape), (U32, kind), (U64, offset))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF", "the version needs 4 bytes at 4, but 0 are left: the file is truncated or damaged"),
        (pack(b"GGUF", (">I", 3)), "the file is big-endian, expected little-endian"),
        (pack(b"GGUF", (U32, 1), (U64, 0)), "version 1 is not supported: only 2, 3"),
        (pack(b"GGUF", (U32, 0), (U64, 0)), "version 0 is not supported"),
        (pack(START, (U64, 2**63)), "9223372036854775808 tensors are announced, but only 0 bytes are left"),
        (pack(START, (U64, 0), (U64, 2**40)), "1099511627776 key-value pairs are announced, but only 0 bytes are left"),
        (
            pack(START, (U64, 0), (U64, 1), (U64, 2**62), b"x" * 8),
            "a key has 4611686018427387904 bytes, expected at most 65535",
        ),
        (
            pack(START, (U64, 0), (U64, 1), "k", (U32, 8), (U64, 2**20)),
            "the value of 'k' has 1048576 bytes, expected at most 45",
        ),
        (pack(START, (U64, 0), (U64, 1), "k", (U32, 13), b"x"), "'k' has the value type 13, expected 0 to 12"),
        (pack(START, (U64, 0), (U64, 1), "k", (U32, 7), b"\2"), "'k' is 2, expected 0 or 1"),
        (pack(START, (U64, 0), (U64, 1), (U64, 1), b"\xff", (U32, 7), b"\1"), "a key at 32 is not UTF-8"),
        (pack(START, (U64, 0), (U64, 1), "k", (U32, 9), (U32, 9), (U64, 0)), "'k' is an array of arrays"),
        (
            pack(START, (U64, 0), (U64, 1), "k", (U32, 9), (U32, 6), (U64, 2**61)),
            "2305843009213693952 values of 'k' are announced",
        ),
        (
            pack(START, (U64, 0), (U64, 1), "k", (U32, 9), (U32, 8), (U64, 9), b"x" * 71),
            "9 values of 'k' are announced, but only 71",
        ),
        (pack(START, (U64, 0), (U64, 2), "k", (U32, 0), b"\1", "k", (U32, 0), b"\1"), "the key 'k' is there twice"),
        (
            pack(START, (U64, 0), (U64, 1), "general.alignment", (U32, 4), (U32, 12)),
            "general.alignment is '12', expected a power",
        ),
        (pack(START, *ONE, tensor_of(2, name="a\nb")), r"a tensor's name is 'a\\nb', which cannot be printed"),
        (pack(START, *ONE, tensor_of(2, name="n" * 65)), "a tensor's name has 65 bytes, expected at most 64"),
        (pack(START, *ONE, tensor_of(), b"x" * 8), "the tensor 't' has 0 dimensions, expected 1 to 4"),
        (pack(START, *ONE, tensor_of(1, 1, 1, 1, 1)), "the tensor 't' has 5 dimensions, expected 1 to 4"),
        (pack(START, *ONE, tensor_of(0)), r"the tensor 't' has the shape \[0\], which cannot be"),
        (pack(START, *ONE, tensor_of(2**32, 2**32)), r"the shape \[4294967296, 4294967296\], which cannot be"),
        (pack(START, *ONE, tensor_of(2**62)), "the tensor 't' ends at 18446744073709551680, but the file has 57 bytes"),
        (
            pack(START, *ONE, tensor_of(2, kind=999)),
            "the tensor 't' has the type number 999, which is not supported: only F32",
        ),
        (
            pack(START, *ONE, tensor_of(256, kind=19)),
            "the tensor 't' has the type IQ1_S, which is not supported: only F32",
        ),
        (pack(START, *ONE, tensor_of(48, kind=8)), "the tensor 't' has rows of 48, expected a multiple of 32 for Q8_0"),
        (pack(START, *ONE, tensor_of(2, offset=8)), "the tensor 't' has the offset 8, expected a multiple of 32"),
        (pack(START, *ONE, tensor_of(2, offset=2**63), bytes(99)), "the tensor 't' ends at 92233720368547758"),
        (pack(START, (U64, 2), NO_PAIRS, tensor_of(2), tensor_of(2), bytes(99)), "the tensor 't' is there twice"),
        (
            pack(START, (U64, 2), NO_PAIRS, tensor_of(9), tensor_of(2, name="u", offset=32), bytes(99)),
            "the tensors 't' and 'u' overlap at 128",
        ),
    ],
)
def test_damaged_headers(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(UserError, match=f"x.gguf: .*{message}"):
        opened(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model of a kilobyte with a vocabulary."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
    write_model(folder, LlamaForCausalLM, num_hidden_layers=1, vocab_size=5, max_position_embeddings=16, **sizes)
    keys = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁a", "b"], "scores": [0.0, 0.0, 0.0, -1.0, -2.0]}
    keys |= {"token_type": [2, 3, 3, 1, 1], "bos_token_id": 1, "eos_token_id": 2}
    more = {f"tokenizer__ggml__{key}": value for key, value in keys.items()}
    return write_twin(folder, folder / "twin.gguf", "F16", **more).read_bytes()


def load_damaged(data: bytes, file: Path) -> str:
    """The error, or nothing where the damage is one that no check can see."""
    file.write_bytes(data)
    message = ""
    try:
        engine_of(file, batch_size=1, tokenizer="")
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    return message


def test_truncated_anywhere(small: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    assert load_damaged(small, file) == ""
    last = max(i for i, byte in enumerate(small) if byte)  # the rest is padding
    for length in range(last):
        assert load_damaged(small[:length], file), length


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_a_user_error(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "number", "insert", "cut"]))
        at = data.draw(st.integers(0, len(damaged) - 1)) if damaged else 0
        if kind == "flip" and damaged:
            damaged[at] ^= data.draw(st.integers(1, 255))
        elif kind == "number":  # counts, lengths, shapes, offsets and types
            value = data.draw(st.sampled_from([0, 1, 9, 2**20, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]))
            damaged[at : at + 8] = struct.pack("<Q", value)
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del damaged[at : at + data.draw(st.integers(1, 9))]
    load_damaged(bytes(damaged), tmp_path / "x.gguf")
