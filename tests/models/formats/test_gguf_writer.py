"""Checkpoints written as GGUF: read back to equal tensors and token ids, with the keys that llama.cpp asks for."""

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma2ForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.gguf_writer import write_gguf
from models.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.builders import SHARED, SMALL, complete, engine_of
from tests.gguf_twins import write_twin
from tests.oracle import random_prompts, write_model
from tests.tokenizers_for_tests import byte_fallback, byte_level, save

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {"attention_bias": True}),
    "llama3": (
        LlamaForCausalLM,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "yarn": (LlamaForCausalLM, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
    "linear": (LlamaForCausalLM, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": (MistralForCausalLM, {"sliding_window": 7, "head_dim": 24}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2": (Qwen2ForCausalLM, {}),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def weights(path: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in open_checkpoint(path, False).open_weights({})
        for name, tensor in file.read(file.shapes)
    }


def convert(folder: Path, dtype: str) -> Path:
    file = folder.parent / f"{dtype}.gguf"
    write_gguf(open_checkpoint(folder, False), file, dtype)
    return file


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_reads_back_equal(family: str, dtype: str, tmp_path: Path) -> None:
    model_class, config = FAMILIES[family]
    model = write_model(tmp_path / "hf", model_class, **config)
    model.to(DTYPES[dtype]).save_pretrained(tmp_path / "hf")
    file = convert(tmp_path / "hf", dtype)
    expected, found = weights(tmp_path / "hf"), weights(file)
    assert found.keys() == expected.keys() - ({"lm_head.weight"} if config.get("tie_word_embeddings") else set())
    for name, tensor in found.items():
        assert torch.equal(tensor.to(DTYPES[dtype]), expected[name]), name
        is_matrix = tensor.ndim == 2 and ".gate." not in name
        assert tensor.dtype == (DTYPES[dtype] if is_matrix else torch.float32)
    prompts, decode = random_prompts(SMALL["vocab_size"] or 0), DecodeConfig(max_new_tokens=16)
    for one, other in zip(
        *(complete(engine_of(path), prompts, decode) for path in (file, tmp_path / "hf")), strict=True
    ):
        assert one.token_ids == other.token_ids


def test_q8_0_is_the_packages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM)  # its intermediate_size of 88 is no multiple of 32
    found = weights(convert(tmp_path / "hf", "q8_0"))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in weights(tmp_path / "hf").items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            tensor = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), q8_0), q8_0))
        elif tensor.ndim == 2:
            tensor = tensor.half()
        assert torch.equal(found[name].float(), tensor.float()), name
    assert caplog.messages == [
        "2 tensors are float16 instead of q8_0: rows of no multiple of 32 (blk.0.ffn_down.weight first)"
    ]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2"])
def test_is_what_llama_cpp_reads(family: str, tmp_path: Path) -> None:
    """By the package's own reader: the same tensors and keys as a twin made by llama.cpp's rules."""
    model_class, config = FAMILIES[family]
    write_model(tmp_path / "hf", model_class, **config)
    ours = gguf.GGUFReader(convert(tmp_path / "hf", "float32"))
    twin = gguf.GGUFReader(write_twin(tmp_path / "hf", tmp_path / "twin.gguf"))
    assert {t.name for t in ours.tensors} == {t.name for t in twin.tensors}
    expected = {t.name: t for t in twin.tensors}
    for tensor in ours.tensors:
        np.testing.assert_array_equal(tensor.data, expected[tensor.name].data)
        assert tensor.tensor_type == expected[tensor.name].tensor_type
    for key, field in twin.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key].contents() == field.contents(), key


def test_peak_memory_is_about_a_tensor(tmp_path: Path) -> None:
    # 1,000 x 512 float32 is the largest tensor, 2 MB, of 12 MB.
    write_model(tmp_path / "hf", LlamaForCausalLM, hidden_size=512, intermediate_size=512, vocab_size=1000)
    checkpoint = open_checkpoint(tmp_path / "hf", False)
    write_gguf(checkpoint, tmp_path / "warm.gguf", "float32")  # imports and caches
    tracemalloc.start()
    write_gguf(checkpoint, tmp_path / "x.gguf", "float32")
    peak = tracemalloc.get_traced_memory()[1]  # of numpy's memory, which holds what is to be written
    tracemalloc.stop()
    assert peak < 2.5 * 1000 * 512 * 4 < (tmp_path / "x.gguf").stat().st_size / 2


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokenizers_of_tokenizer_json(make: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM, vocab_size=700)
    save(make(), tmp_path / "hf")
    if make is byte_fallback:
        with pytest.raises(
            UserError, match="falls back to bytes, and GGUF needs its scores: put tokenizer.model beside"
        ):
            convert(tmp_path / "hf", "float16")
        return
    file = convert(tmp_path / "hf", "float16")
    ours, other = (open_checkpoint(path, False).load_tokenizer() for path in (file, tmp_path / "hf"))
    assert ours is not None
    assert other is not None
    assert ours.size == other.size  # though the file has 700 tokens, as the model has
    assert (ours.bos_token_id, ours.eos_token_id) == (other.bos_token_id, other.eos_token_id)
    for text in ("Once upon a time 12345", "<s>今天</s> 🙂\n\n  x", ""):
        for special in (True, False):
            assert ours.encode(text, special) == other.encode(text, special)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.encode_messages(messages, None) == other.encode_messages(messages, None)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real models stand beside the repository")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_real_model_tells_its_story(dtype: str, tmp_path: Path) -> None:
    folder = SHARED / "data" / "models" / "stories260K"
    write_gguf(open_checkpoint(folder, False), tmp_path / "x.gguf", dtype)
    engine = engine_of(tmp_path / "x.gguf", tokenizer="")
    assert engine.tokenizer is not None
    completion = complete(engine, [[1]], DecodeConfig(max_new_tokens=200))[0]
    assert completion.text == (folder / "expected_200_steps.txt").read_text()
    plain = SentencePieceTokenizer(folder / "tokenizer.model")  # tokenizer.json keeps double spaces
    for text in ("Once upon a time", " Lily ran.\n\nThe  end ", "今天 🙂", "<s> Tim</s>"):
        assert engine.tokenizer.encode(text, True) == plain.encode(text, True)


def test_a_gguf_file_can_be_written_again(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM, vocab_size=700)
    save(byte_level(), tmp_path / "hf")
    first = convert(tmp_path / "hf", "float32")
    write_gguf(open_checkpoint(first, False), tmp_path / "again.gguf", "float32")
    assert (tmp_path / "again.gguf").read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    ("model_class", "config", "dtype", "message"),
    [
        (LlamaForCausalLM, {}, "q4_0", "dtype='q4_0' is not supported in GGUF: only float32, float16, bfloat16, q8_0"),
        (
            Gemma2ForCausalLM,
            {},
            "float16",
            "model_type='gemma2' cannot be written as GGUF: only llama, mistral, mixtral, q",
        ),
        (
            LlamaForCausalLM,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "float16",
            "rope_scaling of type 'dynamic' with these fields cannot be written as GGUF",
        ),
        (
            Qwen2ForCausalLM,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "float16",
            "a Qwen2 with sliding windows cannot be written as GGUF",
        ),
    ],
)
def test_refused(model_class: Any, config: dict[str, Any], dtype: str, message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", model_class, **config)
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "hf", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]  # nothing half-written


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "hf", LlamaForCausalLM)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="blk.1.ffn_up.weight holds 100000, more than float16 can: give bfloat16"):
        convert(tmp_path / "hf", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
