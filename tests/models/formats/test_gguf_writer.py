"""Checkpoints written as GGUF: read back to equal tensors and token ids, with the keys that llama.cpp requires."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Olmo2ForCausalLM, Qwen2ForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.gguf.writer import write_gguf
from models.tokenizers.tiktoken import QWEN_PATTERN
from tests.helpers.builders import REPOSITORY, SHARED, SMALL, all_logits, complete, engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import ROWS
from tests.helpers.deepseek import YARN
from tests.helpers.gguf_families import write_family
from tests.helpers.gguf_files import write_twin
from tests.helpers.gguf_models import CASES, FULL, assert_equals_transformers, build
from tests.helpers.hybrid_families import HYBRID, LINEAR
from tests.helpers.oracle import random_prompts, write_model
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_fallback, byte_level, save

MIXED_LAYERS = {"layer_types": ["mamba", "attention"] * 2}
DELTA_LAYERS = {"layer_types": [LINEAR, FULL] * 2}
UNKNOWN = ("qwen3_biases", "gemma3_no_windows")
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
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


@each(
    "family, dtype",
    [(family, dtype) for family in MODELS for dtype in DTYPES],
    quick=[("llama", "float32"), ("mixtral", "bfloat16")],
)
def test_reads_back_equal(family: str, dtype: str, tmp_path: Path) -> None:
    model_class, config = MODELS[family]
    model = write_model(tmp_path / "hf", model_class, **config)
    model.to(DTYPES[dtype]).save_pretrained(tmp_path / "hf")
    file = convert(tmp_path / "hf", dtype)
    expected, actual = weights(tmp_path / "hf"), weights(file)
    assert actual.keys() == expected.keys() - ({"lm_head.weight"} if config.get("tie_word_embeddings") else set())
    for name, tensor in actual.items():
        assert torch.equal(tensor.to(DTYPES[dtype]), expected[name]), name
        is_matrix = tensor.ndim == 2 and ".gate." not in name
        assert tensor.dtype == (DTYPES[dtype] if is_matrix else torch.float32)
    prompts, decode = random_prompts(SMALL["vocab_size"] or 0), DecodeConfig(max_new_tokens=16)
    for one, other in zip(
        *(complete(engine_of(path), prompts, decode) for path in (file, tmp_path / "hf")), strict=True
    ):
        assert one.token_ids == other.token_ids


def test_q8_0_is_the_packages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM)  # its intermediate_size of 88 is not a multiple of 32
    tensors = weights(convert(tmp_path / "hf", "q8_0"))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in weights(tmp_path / "hf").items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            tensor = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), q8_0), q8_0))
        elif tensor.ndim == 2:
            tensor = tensor.half()
        assert torch.equal(tensors[name].float(), tensor.float()), name
    assert caplog.messages == [
        "q8_0: the rows of 2 tensors are not a multiple of the block size, so their type is F16 (the first is blk.0.ffn_down.weight)"
    ]


@each("family", ["llama", "mixtral", "qwen2"])
def test_is_what_llama_cpp_reads(family: str, tmp_path: Path) -> None:
    """With the package's own reader: the same tensors and keys as a twin written by llama.cpp's rules."""
    model_class, config = MODELS[family]
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


@each("name", [name for name in CASES if name not in UNKNOWN], quick=["gemma3"])
def test_architectures_that_are_read(name: str, tmp_path: Path) -> None:
    """Logits of transformers, and the tensors and keys of a twin by llama.cpp's rules. models/README.md has llama.cpp's
    own logits."""
    reference = build(tmp_path / "hf", name)
    file = convert(tmp_path / "hf", "float32")
    assert_equals_transformers(file, reference)
    ours = gguf.GGUFReader(file)
    twin = gguf.GGUFReader(write_family(tmp_path / "hf", tmp_path / "twin.gguf", splits_latent=False))
    expected = {t.name: t for t in twin.tensors}
    assert {t.name for t in ours.tensors} == expected.keys()
    for tensor in ours.tensors:
        np.testing.assert_array_equal(tensor.data, expected[tensor.name].data)
    for key, field in twin.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            assert ours.fields[key].contents() == pytest.approx(field.contents()), key


KIMI_LAYERS = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
WRITTEN: dict[str, list[dict[str, Any]]] = {
    "falcon_h1": [],  # its factors are rounded into the weights: test_gguf_converter.py compares logits
    "kimi_linear": [KIMI_LAYERS, {**KIMI_LAYERS, "q_lora_rank": 20}],
    "gpt_bigcode": [{}, {"n_inner": 100, "tie_word_embeddings": False}],
    "mpt": [{}, {"attn_config": {"clip_qkv": 0.4}, "n_heads": 6, "tie_word_embeddings": False}],
    "granite": [{"attention_multiplier": 0.4, "attention_bias": True, "mlp_bias": True}],
    "granitemoehybrid": [*HYBRID["granitemoehybrid"].variants[:4], {**MIXED_LAYERS, "attention_bias": True}],
    "mamba2": [{}, {"n_groups": 1, "tie_word_embeddings": True}],
    "nemotron_h": [HYBRID["nemotron_h"].variants[i] for i in (0, 2, 3, 4)],
    "qwen3_next": [*HYBRID["qwen3_next"].variants[:2], {**DELTA_LAYERS, "linear_num_value_heads": 6}],
    "qwen3_5_moe_text": [{}],
}
"""Settings with which llama.cpp 0.3.36 computes the same logits."""
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "falcon_h1": [
        ({"attention_bias": True}, "with biases of attention_bias"),
        ({"projectors_bias": True}, "with biases of attention_bias"),
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate=true"),
        ({"tie_word_embeddings": True}, "a tied head and embedding_multiplier other than lm_head_multiplier"),
    ],
    "kimi_linear": [
        ({"layer_types": [LINEAR] * 4}, "without layers that have attention"),
        ({**KIMI_LAYERS, "linear_num_heads": 3}, "with linear heads other than num_attention_heads"),
        ({**KIMI_LAYERS, "mlp_layer_types": ["sparse", "dense"] * 2}, "dense layers after mixtures"),
        ({**KIMI_LAYERS, "moe_renormalize": False}, "moe_renormalize=false"),
    ],
    "gpt_bigcode": [
        ({"multi_query": False}, "a GPT-BigCode with multi_query=false"),
        ({"scale_attn_weights": False}, "a GPT-BigCode with .* another attention scale"),
        ({"activation_function": "gelu"}, "a GPT-BigCode with .* activation_function=gelu"),
    ],
    "mpt": [({"attn_config": {"softmax_scale": 0.5}}, "an MPT with softmax_scale")],
    "granitemoehybrid": [
        ({**MIXED_LAYERS, "time_step_limit": [0.5, 0.8]}, "with time_step_limit"),
        ({**MIXED_LAYERS, "mamba_proj_bias": True}, "with a bias of in_proj"),
        ({"layer_types": ["mamba"] * 4}, "a model without recurrent layers, or without layers that have attention"),
        ({"layer_types": ["attention"] * 4, "position_embedding_type": "nope"}, "a Granite 4 without recurrent layers"),
    ],
    "mamba2": [({"use_conv_bias": False}, "without a bias of conv1d"), ({"use_bias": True}, "a bias of in_proj")],
    "nemotron_h": [
        ({"layers_block_type": [LINEAR, "moe", FULL, "mlp"]}, "with mixtures of experts, and with dense layers"),
        ({"layers_block_type": [LINEAR, "mlp"]}, "without layers that have attention"),
    ],
    "qwen3_next": [
        ({**DELTA_LAYERS, "norm_topk_prob": False}, "norm_topk_prob=false or layers without experts"),
        ({**DELTA_LAYERS, "mlp_only_layers": [0]}, "norm_topk_prob=false or layers without experts"),
        ({**DELTA_LAYERS, "linear_key_head_dim": 9}, "a linear_value_head_dim other than linear_key_head_dim"),
        ({"layer_types": [FULL, LINEAR] * 2}, "layer_types without full_attention in every n-th layer"),
        ({"layer_types": [FULL] * 4}, "a model without recurrent layers"),
    ],
}


@each("family", WRITTEN, quick=["mamba2", "qwen3_next"])
def test_files_keep_logits(family: str, tmp_path: Path) -> None:
    """A file has the bits of its checkpoint's logits, if A_log is bfloat16 as in most models."""
    row = (HYBRID | ROWS)[family]
    for i, settings in enumerate(WRITTEN[family]):
        folder = tmp_path / str(i) / "hf"
        folder.mkdir(parents=True)
        row.write(folder, **settings)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {key: tensor.bfloat16().float() for key, tensor in tensors.items() if key.endswith("A_log")}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        engines = engine_of(convert(folder, "float32")), engine_of(folder)
        for prompt in random_prompts(96):
            actual, expected = (all_logits(engine, prompt) for engine in engines)
            assert torch.equal(actual, expected), settings
    for settings, message in REFUSED.get(family, ()):
        folder = tmp_path / message / "hf"
        folder.mkdir(parents=True, exist_ok=True)
        row.write(folder, **settings)
        with pytest.raises(UserError, match=f"{message}.* cannot be written as GGUF, because llama.cpp does not"):
            convert(folder, "float32")


def test_models_unknown_to_llama_cpp_are_refused(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"norm_topk_prob": False},
        "qwen3_yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "gemma2": {"query_pre_attn_scalar": 32},
        "deepseek_v3": {"rope_interleave": False},
        "gpt2": {"activation_function": "gelu"},
        "bloom": {"apply_residual_connection_post_layernorm": True},
    }
    for name in (*changes, *UNKNOWN):
        build(tmp_path / name, name, **changes.get(name, {}))
        with pytest.raises(UserError, match="cannot be written as GGUF, because llama.cpp does not support it"):
            convert(tmp_path / name, "float32")
    assert not list(tmp_path.glob("*.gguf*"))


def test_peak_memory_is_about_a_tensor(tmp_path: Path) -> None:
    # 1,000 x 512 float32 is the largest tensor, 2 MB, of 12 MB.
    write_model(tmp_path / "hf", LlamaForCausalLM, hidden_size=512, intermediate_size=512, vocab_size=1000)
    checkpoint = open_checkpoint(tmp_path / "hf", False)
    write_gguf(checkpoint, tmp_path / "warm.gguf", "float32")  # imports and caches
    tracemalloc.start()
    write_gguf(checkpoint, tmp_path / "x.gguf", "float32")
    peak = tracemalloc.get_traced_memory()[1]  # numpy's memory, which holds the data to write
    tracemalloc.stop()
    assert peak < 2.5 * 1000 * 512 * 4 < (tmp_path / "x.gguf").stat().st_size / 2


@each("make", [byte_level, byte_fallback])
def test_tokenizers_of_tokenizer_json(make: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM, vocab_size=700)
    save(make(), tmp_path / "hf")
    if make is byte_fallback:
        with pytest.raises(
            UserError, match="falls back to bytes, for which GGUF needs scores: put tokenizer.model next to"
        ):
            convert(tmp_path / "hf", "float16")
        return
    file = convert(tmp_path / "hf", "float16")
    ours, other = (open_checkpoint(path, False).load_tokenizer() for path in (file, tmp_path / "hf"))
    assert ours is not None
    assert other is not None
    assert ours.size == other.size  # although the file has 700 tokens, like the model
    assert (ours.bos_token_id, ours.eos_token_id) == (other.bos_token_id, other.eos_token_id)
    for text in ("Once upon a time 12345", "<s>今天</s> 🙂\n\n  x", ""):
        for special in (True, False):
            assert ours.encode(text, special) == other.encode(text, special)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.encode_messages(messages, None) == other.encode_messages(messages, None)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
@each("dtype", ["float32", "float16"])
def test_a_real_model_tells_its_story(dtype: str, tmp_path: Path) -> None:
    folder = SHARED / "data" / "models" / "stories260K"
    write_gguf(open_checkpoint(folder, False), tmp_path / "x.gguf", dtype)
    engine = engine_of(tmp_path / "x.gguf", tokenizer="")
    assert engine.tokenizer is not None
    completion = complete(engine, [[1]], DecodeConfig(max_new_tokens=200))[0]
    assert completion.text == (folder / "expected_200_steps.txt").read_text()


SPACES = (
    " a",
    "  a",
    "a  b",
    " a  b ",
    "a ",
    " ",
    "\n a",
    "\ta",
    "'tis",
    "'save me'",
    "a 1",
    "1 2  3",
    "<s>a",
    "<s> a</s>b",
)


def messages(caplog: pytest.LogCaptureFixture, source: Path) -> list[str]:
    before = f"the tokenizer in {source} changes in GGUF: "
    assert all(message.startswith(before) for message in caplog.messages)
    return [message.removeprefix(before) for message in caplog.messages]


def test_the_bundled_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = REPOSITORY / "models" / "tiny"
    write_gguf(open_checkpoint(folder, False), tmp_path / "x.gguf", "float32")
    ours, other = (engine_of(path, tokenizer="") for path in (tmp_path / "x.gguf", folder))
    assert ours.tokenizer is not None
    assert other.tokenizer is not None
    for text in (*TEXTS, TRICKY, *SPACES):
        assert ours.tokenizer.encode(text, True) == other.tokenizer.encode(text, True)
    prompts = [ours.tokenizer.encode(text, True) for text in ("Once upon a time", "今天是晴天，")]
    one, two = (complete(engine, prompts, DecodeConfig(max_new_tokens=30)) for engine in (ours, other))
    assert [completion.text for completion in one] == [completion.text for completion in two]
    assert not caplog.messages


def with_tokenizer(folder: Path, *files: Path, **config: Any) -> Path:
    """Write a random model next to these tokenizer files."""
    write_model(folder, LlamaForCausalLM, **{"vocab_size": 520, **config})
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
def test_spaces_of_sentencepiece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tokenizer.json keeps spaces and adds one only if a text begins without, which GGUF cannot represent. The
    tokenizer.model next to it removes repeated spaces, which GGUF can represent."""
    source = SHARED / "data" / "models" / "stories260K"
    vectors = json.loads((SHARED / "data" / "tokenizers" / "llama2" / "vectors.json").read_text(encoding="utf-8"))
    texts = [*(case["text"] for case in vectors["cases"]), *TEXTS, TRICKY, *SPACES]
    source_folder = with_tokenizer(tmp_path / "whole", *source.glob("tokenizer*"))
    plain = with_tokenizer(tmp_path / "plain", source / "tokenizer.model")
    differing = {}
    for folder in (source_folder, plain):
        ours, other = (open_checkpoint(path, False).load_tokenizer() for path in (convert(folder, "float32"), folder))
        assert ours is not None
        assert other is not None
        differing[folder] = [text for text in texts if ours.encode(text, True) != other.encode(text, True)]
    assert differing[plain] == []
    assert all(text.startswith(" ") or "<s> " in text for text in differing[source_folder])
    assert " a  b " in differing[source_folder]
    assert "a  b" not in differing[source_folder]
    assert caplog.messages == [
        f"the tokenizer in {source_folder} changes in GGUF: it has rules that GGUF cannot express, so texts such as ' a', '  a', ' ' "
        "get other tokens",
        f"the tokenizer in {plain} changes in GGUF: it removes leading and repeated spaces, which llama.cpp keeps",
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
def test_missing_bytes_of_sentencepiece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = SHARED / "data" / "models" / "babyllama_tok105"
    folder = with_tokenizer(tmp_path / "hf", source / "tokenizer.model")
    convert(folder, "float32")
    lacks = "it lacks 256 of the 256 bytes, and llama.cpp fails at a character without a token"
    assert lacks in messages(caplog, folder)


def test_missing_bytes_of_byte_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_tokenizer(tmp_path / "hf")
    save(byte_level(), folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    del values["model"]["vocab"]["ÿ"]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    read = open_checkpoint(convert(folder, "float32"), False).load_tokenizer()
    assert messages(caplog, folder) == ["it lacks 1 of the 256 bytes, and some programs reject the file"]
    assert read is not None
    assert read.encode("aÿb", True) == Backend.from_file(str(folder / "tokenizer.json")).encode("aÿb").ids


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")
def test_tokens_that_other_files_add_to_the_pieces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An added token, and a token that replaces a piece. The text after such a token begins without a space, but
    llama.cpp adds one."""
    folder = with_tokenizer(
        tmp_path / "hf", SHARED / "data" / "tokenizers" / "llama2" / "tokenizer.model", vocab_size=32008
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 32000, "<|im_end|>": 32001, "<tool>": 31999}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|im_start|>"})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    file = convert(folder, "float32")
    ours, other = (open_checkpoint(path, False).load_tokenizer() for path in (file, folder))
    assert ours is not None
    assert other is not None
    assert ours.eos_token_id == 32001
    for text in (*TEXTS, TRICKY, "<|im_start|>user\nHi <|im_end|>\n", "x<tool>y", "  a</s>b", "<unk>"):
        assert ours.encode(text, True) == other.encode(text, True)
        assert ours.decode(other.encode(text, False), True) == other.decode(other.encode(text, False), True)
    header = gguf.GGUFReader(file)
    types, tokens = (header.fields[f"tokenizer.ggml.{name}"].contents() for name in ("token_type", "tokens"))
    assert [*zip(tokens, types, strict=True)][31999:32003] == [
        ("<tool>", 4),
        ("<|im_start|>", 3),
        ("<|im_end|>", 3),
        ("[PAD32002]", 5),
    ]
    (message,) = messages(caplog, folder)
    assert message == "it has rules that GGUF cannot express, so texts such as '<|im_end|>a' get other tokens"


def test_normalisation_of_byte_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    folder = with_tokenizer(tmp_path / "hf")
    save(tokenizer, folder)
    convert(folder, "float32")
    assert messages(caplog, folder) == ["it normalises texts to Unicode NFC, which llama.cpp does not"]


def test_a_gguf_file_can_be_written_again(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", LlamaForCausalLM, vocab_size=700)
    save(byte_level(), tmp_path / "hf")
    first = convert(tmp_path / "hf", "float32")
    write_gguf(open_checkpoint(first, False), tmp_path / "again.gguf", "float32")
    assert (tmp_path / "again.gguf").read_bytes() == first.read_bytes()


@each(
    "model_class, config, dtype, message",
    [
        (
            LlamaForCausalLM,
            {},
            "q2_k",
            "dtype='q2_k' is not supported in GGUF: only float32, float16, bfloat16, q4",
        ),
        (
            Olmo2ForCausalLM,
            {},
            "float16",
            "model_type='olmo2' cannot be written as GGUF: only bloom, chatglm, deepseek",
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
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]  # no partial file


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "hf", LlamaForCausalLM)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="blk.1.ffn_up.weight holds 100000, which float16 cannot: give bfloat16"):
        convert(tmp_path / "hf", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
def test_tokens_that_the_model_lacks_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_tokenizer(
        tmp_path / "hf", SHARED / "data" / "models" / "stories260K" / "tokenizer.model", vocab_size=500
    )
    file = convert(folder, "float32")
    assert "it has 512 tokens, and the model 500: the excess tokens are left out" in messages(caplog, folder)
    assert len(gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()) == 500
