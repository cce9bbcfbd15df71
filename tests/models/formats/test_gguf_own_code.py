"""GGUF of families with code of their own (Qwen v1 and ChatGLM2 to GLM-4): written, with the gguf package's names, and
read."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.gguf.writer import write_gguf
from models.tokenizers.base import Tokenizer
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.real_tokenizers import REAL, real
from tests.helpers.small_tokenizers import TEXTS, TRICKY

PROMPTS = ([7], [5, 80, 33, 5, 5, 61, 12], list(range(3, 60)))


def copy_golden(name: str, folder: Path, **config: object) -> Path:
    folder.mkdir()
    shutil.copyfile(GOLDENS / name / "model.safetensors", folder / "model.safetensors")
    values = json.loads((GOLDENS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def write(folder: Path) -> Path:
    file = folder.with_suffix(".gguf")
    write_gguf(open_checkpoint(folder, False), file, "float32")
    return file


def logits(path: Path) -> Iterator[Tensor]:
    engine = engine_of(path)
    return (all_logits(engine, prompt) for prompt in PROMPTS)


def test_written_and_read_to_the_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """models/README.md has llama.cpp's own logits of such files."""
    for name, golden, architecture, config in (
        ("qwen", "qwen", gguf.MODEL_ARCH.QWEN, {}),
        ("qwen_plain", "qwen", gguf.MODEL_ARCH.QWEN, {"use_dynamic_ntk": False, "use_logn_attn": False}),
        ("chatglm2", "chatglm2", gguf.MODEL_ARCH.CHATGLM, {}),
        ("chatglm2_32k", "chatglm2", gguf.MODEL_ARCH.CHATGLM, {"rope_ratio": 4.0}),
        ("chatglm3", "chatglm3", gguf.MODEL_ARCH.CHATGLM, {}),
        ("glm4", "chatglm3", gguf.MODEL_ARCH.CHATGLM, {"rope_ratio": 500, "_name_or_path": "THUDM/glm-4-9b"}),
    ):
        folder = copy_golden(golden, tmp_path / name, **config)
        file = write(folder)
        names = gguf.get_tensor_name_map(architecture, 2)
        tensors = load_file(folder / "model.safetensors")
        expected = {
            names.get_name(tensor.removeprefix("transformer.") if "chatglm" in golden else tensor, (".weight", ".bias"))
            for tensor in tensors
            if "inv_freq" not in tensor
        }
        reader = gguf.GGUFReader(file)
        assert reader.fields["general.architecture"].contents() == gguf.MODEL_ARCH_NAMES[architecture]
        assert {tensor.name for tensor in reader.tensors} == expected, name
        for ours, theirs in zip(logits(file), logits(folder), strict=True):
            assert torch.equal(ours, theirs), name
        if name.startswith("qwen"):
            length = reader.fields["qwen.context_length"].contents()
            assert length == (2048 if name == "qwen" else 32768)
    assert caplog.messages == [
        "llama.cpp lacks Qwen's scalings for longer texts: the file's context length is 2048 tokens"
    ]


def test_refused(tmp_path: Path) -> None:
    wide = copy_golden("chatglm3", tmp_path / "wide", kv_channels=32, num_attention_heads=8)
    tensors = load_file(wide / "model.safetensors")
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            tensors[name] = torch.cat((tensor, tensor))
        elif name.endswith("dense.weight"):
            tensors[name] = torch.cat((tensor, tensor), dim=1)
    save_file(tensors, wide / "model.safetensors")
    for folder, message in (
        (copy_golden("chatglm", tmp_path / "chatglm"), "ChatGLM-6B cannot be written as GGUF"),
        (wide, r"a ChatGLM with num_attention_heads \* head_dim other than hidden_size cannot be written as GGUF"),
    ):
        with pytest.raises(UserError, match=message):
            write(folder)
    assert not list(tmp_path.glob("*.gguf*"))


def assert_same_ids(folder: Path, texts: list[str]) -> tuple[Tokenizer, Tokenizer]:
    pair = [open_checkpoint(path, False).load_tokenizer() for path in (write(folder), folder)]
    ours, other = (tokenizer for tokenizer in pair if tokenizer is not None)
    for text in texts:
        ids = other.encode(text, False)
        assert ours.encode(text, False) == ids, text
        assert ours.decode(ids, True) == other.decode(ids, True)
    assert ours.eos_token_id == other.eos_token_id
    assert {*other.turn_end_ids} <= {*ours.turn_end_ids}
    return ours, other


def test_ranks_of_a_small_qwen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_golden("qwen", tmp_path / "qwen")
    merges = [
        b"th",
        b"he",
        b" th",
        b" the",
        b"in",
        b"ing",
        "天".encode()[:2],
        "天".encode(),
        b"ll",
        b"ello"[:3],
        b"ello",
    ]

    def save(*merges: bytes) -> None:
        tokens = [*(bytes([byte]) for byte in range(256)), *merges]
        lines = [base64.b64encode(token).decode() + f" {rank}\n" for rank, token in enumerate(tokens)]
        (folder / "qwen.tiktoken").write_text("".join(lines))

    save(*merges)
    ours, _ = assert_same_ids(folder, [*TEXTS, TRICKY, "<|im_start|>user\nHi<|im_end|>", "e\u0301 1234 hello things"])
    assert ours.encode("in the", False) == [256 + merges.index(token) for token in (b"in", b" the")]
    assert "it normalises texts to Unicode NFC, which llama.cpp does not" in caplog.text
    save(*merges, b"xyz")
    with pytest.raises(UserError, match="has b'xyz', which no merge of two tokens gives"):
        write(folder)


@pytest.mark.long
@real
@each(
    "golden, vocabulary, key, size",
    [("qwen", "qwen1", "vocab_size", 151936), ("chatglm3", "chatglm2", "padded_vocab_size", 65024)],
)
def test_published_vocabularies(
    golden: str, vocabulary: str, key: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A word that contains ChatGLM's `eop` is split there, as in files of llama.cpp's converter: a text can contain
    GGUF's tokens."""
    folder = copy_golden(golden, tmp_path / golden, **{key: size})
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (
            "wte" in name or "lm_head" in name or "word_embeddings" in name or "output_layer" in name
        ):
            tensors[name] = torch.zeros(size, tensor.shape[1])
    save_file(tensors, folder / "model.safetensors")
    for file in (REAL / vocabulary).iterdir():
        shutil.copyfile(file, folder / file.name)
    cases = json.loads((REAL / "llama2" / "vectors.json").read_text(encoding="utf-8"))["cases"]
    ours, other = assert_same_ids(folder, [*TEXTS, TRICKY, *(case["text"] for case in cases)])
    if golden == "chatglm3":
        assert ours.encode("[gMASK]sop", False) == other.encode("", True)
        assert "it begins a text with [gMASK] sop, which a caller must write" in caplog.text
        assert ours.encode("people", False) != other.encode("people", False)
