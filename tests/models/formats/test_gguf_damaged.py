"""GGUF files with damaged headers, truncated files and changed bytes: each is refused in one line."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from conf.errors import UserError
from tests.helpers.builders import engine_of
from tests.helpers.cases import each
from tests.helpers.gguf_files import opened, pack, write_twin
from tests.helpers.oracle import write_model

U64, U32 = "<Q", "<I"
START = pack(b"GGUF", (U32, 3))
NO_PAIRS = (U64, 0)
ONE = ((U64, 1), NO_PAIRS)  # tensor, pairs


def tensor_of(*shape: int, name: str = "t", kind: int = 0, offset: int = 0) -> bytes:
    return pack(name, (U32, len(shape)), *((U64, n) for n in shape), (U32, kind), (U64, offset))


@each(
    "data, message",
    [
        (b"GGUF", "the version needs 4 bytes at 4, but 0 are left: the file is truncated or damaged"),
        (pack(b"GGUF", (">I", 3)), "the file is big-endian: convert it to little-endian"),
        (pack(b"GGUF", (U32, 1), (U64, 0)), "version 1 is not supported: only 2, 3"),
        (pack(b"GGUF", (U32, 0), (U64, 0)), "version 0 is not supported"),
        (pack(START, (U64, 2**63)), "9223372036854775808 tensors are declared, but only 0 bytes are left"),
        (pack(START, (U64, 0), (U64, 2**40)), "1099511627776 key-value pairs are declared, but only 0 bytes are left"),
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
            "2305843009213693952 values of 'k' are declared",
        ),
        (
            pack(START, (U64, 0), (U64, 1), "k", (U32, 9), (U32, 8), (U64, 9), b"x" * 71),
            "9 values of 'k' are declared, but only 71",
        ),
        (pack(START, (U64, 0), (U64, 2), "k", (U32, 0), b"\1", "k", (U32, 0), b"\1"), "the key 'k' occurs twice"),
        (
            pack(START, (U64, 0), (U64, 1), "general.alignment", (U32, 4), (U32, 12)),
            "general.alignment is '12', expected a power",
        ),
        (pack(START, *ONE, tensor_of(2, name="a\nb")), r"a tensor's name is 'a\\nb', which has control characters"),
        (pack(START, *ONE, tensor_of(2, name="n" * 65)), "a tensor's name has 65 bytes, expected at most 64"),
        (pack(START, *ONE, tensor_of(), b"x" * 8), "the tensor 't' has 0 dimensions, expected 1 to 4"),
        (pack(START, *ONE, tensor_of(1, 1, 1, 1, 1)), "the tensor 't' has 5 dimensions, expected 1 to 4"),
        (pack(START, *ONE, tensor_of(0)), r"the tensor 't' has the shape \[0\], which is not possible"),
        (pack(START, *ONE, tensor_of(2**32, 2**32)), r"the shape \[4294967296, 4294967296\], which is not possible"),
        (pack(START, *ONE, tensor_of(2**62)), "the tensor 't' ends at 18446744073709551680, but the file has 57 bytes"),
        (
            pack(START, *ONE, tensor_of(2, kind=999)),
            "the tensor 't' has the type number 999, which is not supported: only F32",
        ),
        (
            pack(START, *ONE, tensor_of(256, kind=15)),
            "the tensor 't' has the type Q8_K, which is not supported: only F32, .*: give the Hugging Face checkpoint",
        ),
        (
            pack(START, *ONE, tensor_of(48, kind=8)),
            "the tensor 't' has rows of 48 values, expected a multiple of 32 for Q8_0",
        ),
        (pack(START, *ONE, tensor_of(2, offset=8)), "the tensor 't' has the offset 8, expected a multiple of 32"),
        (pack(START, *ONE, tensor_of(2, offset=2**63), bytes(99)), "the tensor 't' ends at 92233720368547758"),
        (pack(START, (U64, 2), NO_PAIRS, tensor_of(2), tensor_of(2), bytes(99)), "the tensor 't' occurs twice"),
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
    """Return a model of a kilobyte with a vocabulary."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
    write_model(folder, LlamaForCausalLM, num_hidden_layers=1, vocab_size=5, max_position_embeddings=16, **sizes)
    keys = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁a", "b"], "scores": [0.0, 0.0, 0.0, -1.0, -2.0]}
    keys |= {"token_type": [2, 3, 3, 1, 1], "bos_token_id": 1, "eos_token_id": 2}
    more = {f"tokenizer__ggml__{key}": value for key, value in keys.items()}
    return write_twin(folder, folder / "twin.gguf", "F16", **more).read_bytes()


def load_damaged(data: bytes, file: Path) -> str:
    """Return the error; None if the damage is undetectable."""
    file.write_bytes(data)
    message = ""
    try:
        engine_of(file, batch_size=1, tokenizer="")
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    return message


@pytest.mark.long
def test_truncated_anywhere(small: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    assert load_damaged(small, file) == ""
    last = max(i for i, byte in enumerate(small) if byte)  # the rest is padding
    for length in range(last):
        assert load_damaged(small[:length], file), length


@pytest.mark.long
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
