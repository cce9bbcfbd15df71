"""GGUF files with damaged headers, truncated files and changed bytes: each is refused in one line."""

import math
import re
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.gguf.config import read_gguf_config
from models.formats.gguf.header import GGUFHeader, TensorInfo
from models.formats.gguf.writer import write_gguf
from models.registry import ARCHITECTURES
from tests.helpers.builders import engine_of
from tests.helpers.cases import each
from tests.helpers.family import FULL, noted
from tests.helpers.gguf_files import opened, pack, write_changed, write_twin
from tests.helpers.hybrid_families import HYBRID, LINEAR
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


F32 = gguf.GGMLQuantizationType.F32
RMS, EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
KEY_HEADS, INNER_SIZES = "attention.head_count_kv", "feed_forward_length"
NOT_THE_MODEL = "does not hold the model that its config describes: "
AGAIN = "convert the model again"
DAMAGED: dict[str, list[tuple[str, Any, str]]] = {
    "granitemoehybrid": [
        ("blk.0.ssm_a", None, f"{NOT_THE_MODEL}missing: model.layers.0.mamba.A_log: {AGAIN}"),
        ("blk.0.ssm_a", np.negative, rf"mamba.A_log is -exp\(A_log\) in the file, but has .* above 0: {AGAIN}"),
        ("blk.0.ssm_norm.weight", lambda x: x[:, 1:], r"norm.weight \[127\], expected \[128\]: " + AGAIN),
        ("blk.0.ffn_gate.weight", None, "missing: .*shared_mlp.input_linear.weight; unexpected: blk.0.ffn_up.weight: "),
        ("blk.2.attn_q.weight", None, f"{KEY_HEADS}=2 of layer 2, but the file has no 'blk.2.attn_q.weight': {AGAIN}"),
        (KEY_HEADS, [0, 0, 2], f"{KEY_HEADS} has 3 values, expected 4"),
        (KEY_HEADS, [0, 0, 0, 2], f"{KEY_HEADS}=0 of layer 2, but the file has 'blk.2.attn_q.weight': {AGAIN}"),
        (KEY_HEADS, 2, f"{KEY_HEADS} must be an array of kind 'i', found 2"),
        (KEY_HEADS, None, f"{KEY_HEADS} must be an array of kind 'i', found none"),
        ("ssm.state_size", 8, r"mamba.in_proj.weight \[296, 64\], expected \[280, 64\] and 1 more: " + AGAIN),
        ("ssm.group_count", 0, "granitehybrid: ssm.group_count=0 is not a number above 0"),
        ("ssm.inner_size", 100, "ssm.inner_size=100 is not a multiple of embedding_length=64"),
    ],
    "nemotron_h": [
        ("blk.1.ffn_up.weight", None, f"layer 1 has none of the tensors ssm_in, attn_q, ffn_up, ffn_up_exps: {AGAIN}"),
        (INNER_SIZES, [0, 88, 0], f"nemotron_h.{INNER_SIZES} has 3 values, expected 4"),
        (
            INNER_SIZES,
            [0, 80, 0, 0],
            f"{INNER_SIZES}=80 of layer 1 contradicts 'blk.1.ffn_up.weight': expected 88: {AGAIN}",
        ),
        (INNER_SIZES, [88, 0, 0, 0], f"{INNER_SIZES}=88 of layer 0 contradicts 'blk.0.ssm_in.weight': expected 0"),
        (KEY_HEADS, [2, 0, 2, 0], f"{KEY_HEADS}=2 of layer 0 contradicts 'blk.0.ssm_in.weight': expected 0: {AGAIN}"),
        (KEY_HEADS, [0, 0, 0, 0], f"{KEY_HEADS}=0 of layer 2 contradicts 'blk.2.attn_q.weight': expected a number"),
        ("ssm.time_step_rank", 256, "ssm.inner_size=128 is not a multiple of ssm.time_step_rank=256"),
    ],
    "mamba2": [
        ("blk.1.ssm_out.weight", None, f"missing: backbone.layers.1.mixer.out_proj.weight: {AGAIN}"),
        ("ssm.inner_size", None, "mamba2: ssm.inner_size is missing"),
    ],
    "qwen3_next": [
        (
            "blk.0.ssm_ba.weight",
            None,
            f"missing: .*in_proj_b.weight, model.layers.0.linear_attn.in_proj_a.weight: {AGAIN}",
        ),
        (
            "blk.0.ssm_ba.weight",
            lambda x: x[1:],
            r"has the shape \[7, 64\], expected \[rows, columns\] with a multiple of 4",
        ),
        ("blk.0.attn_gate.weight", None, f"missing: model.layers.0.linear_attn.in_proj_z.weight: {AGAIN}"),
        ("ssm.time_step_rank", 3, "ssm.inner_size=64 is not a multiple of ssm.time_step_rank=3"),
    ],
}
"""By family: a tensor or a key, its change, or None where it is left out, and the message."""


@each("family", DAMAGED)
def test_damaged_recurrent_models(family: str, tmp_path: Path) -> None:
    """Each error is a line with the file, the tensor or key, its value, and what is expected."""
    (tmp_path / "model").mkdir()
    variant = int(family == "qwen3_next")
    HYBRID[family].write(tmp_path / "model", **HYBRID[family].variants[variant])
    write_gguf(open_checkpoint(tmp_path / "model", False), tmp_path / "whole.gguf", "float32")
    data, file = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "x.gguf"
    assert re.search("the tensor .* ends at .*, but the file has .* bytes", load_damaged(data[: len(data) // 2], file))
    for name, change, message in DAMAGED[family]:
        write_changed(tmp_path / "whole.gguf", file, name, change)
        with pytest.raises(UserError, match=f"^{file}.*{message}") as caught:
            engine_of(file, batch_size=1)
        assert "\n" not in str(caught.value)


SIZES = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 64, "attention.head_count": 4}
SIZES |= {"context_length": 64, RMS: 1e-5}
PAIR = {"expert_count": 4, "expert_used_count": 2}
LATENT = {"attention.kv_lora_rank": 16, "attention.key_length": 12, "rope.dimension_count": 4}
DETAILS = {"expert_feed_forward_length": 32, "expert_shared_count": 1}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
METADATA: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "stablelm": (
        {EPSILON: 1e-5},
        [({EPSILON: None}, f"{EPSILON} is missing"), ({"rope.dimension_count": 3}, "turns 3 of 16 channels")],
    ),
    "phimoe": (
        PAIR,
        [
            ({"expert_count": None}, "expert_count is missing"),
            ({"expert_used_count": 1}, "num_experts_per_tok=1 is not supported: only 2"),
            ({"rope.dimension_count": 8}, "rope.dimension_count=8 is not supported: only 16"),
            ({"rope.scaling.type": "yarn"}, "rope.scaling.type='yarn' is not supported: only 'none'"),
            ({"rope.scaling.attn_factor": 1.2}, r"rope.scaling.attn_factor=1\.2 is not supported: only None"),
        ],
    ),
    "llama4": (
        PAIR | {"expert_feed_forward_length": 32, "interleave_moe_layer_step": 1},
        [
            ({"interleave_moe_layer_step": None}, "interleave_moe_layer_step is missing"),
            ({"expert_count": 0}, "expert_count=0 is not a number above 0"),
            ({"expert_used_count": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
            ({WINDOW: 0}, f"{WINDOW}=0 is not supported: only None, 8192"),
            ({PATTERN: 3}, f"{PATTERN}=3 is not supported: only None, 4"),
        ],
    ),
    "exaone-moe": (
        PAIR | DETAILS | {"expert_gating_func": 2},
        [
            ({"expert_gating_func": 1}, "expert_gating_func=1 is not supported: only 2"),
            ({"expert_shared_count": None}, "expert_shared_count is missing"),
            (
                {"expert_shared_feed_forward_length": 33},
                "expert_shared_feed_forward_length=33 is not supported: only 32",
            ),
            ({PATTERN: [True]}, f"exaone-moe.{PATTERN} has 1 values, expected 2"),
            ({PATTERN: [1, 0]}, f"exaone-moe.{PATTERN} must be an array of kind 'b', found i"),
            ({"nextn_predict_layers": 2}, "num_hidden_layers=0 is not a number above 0"),
        ],
    ),
    "mistral4": (
        PAIR | DETAILS | LATENT | YARN,
        [
            ({"rope.scaling.type": None}, "rope.scaling.type=None is not supported: only 'yarn'"),
            ({"rope.scaling.original_context_length": None}, "original_context_length is missing"),
            ({"attention.temperature_length": 8}, "attention.temperature_length=8 is not supported: only 16, None"),
            ({"attention.temperature_scale": -1.0}, r"llama_4_scaling_beta=-1\.0 is not a number from"),
            ({"expert_gating_func": 2}, "expert_gating_func=2 is not supported: only 1, None"),
            ({"expert_group_count": 3}, "n_routed_experts=4 is not a multiple of n_group=3"),
            ({"attention.key_length": 4}, "attention.key_length=4 is not above rope.dimension_count=4"),
        ],
    ),
    "minicpm3": (
        LATENT,
        [
            ({"attention.kv_lora_rank": None}, "attention.kv_lora_rank is missing"),
            ({"attention.head_count_kv": 2}, "attention.head_count_kv=2 is not supported: only 4, 1"),
            ({"rope.dimension_count": 3}, "qk_rope_head_dim=3 is odd"),
        ],
    ),
}
"""By architecture: its keys, and changes of them, or None where a key is left out, with the message."""


def test_missing_and_contradictory_keys() -> None:
    experts = {"blk.1.ffn_up_exps.weight": (4, 32, 64), "token_embd.weight": (96, 64), "blk.0.attn_norm.weight": (64,)}
    tensors = {name: TensorInfo(Path("a.gguf"), shape, F32, 0, 4 * math.prod(shape)) for name, shape in experts.items()}
    for architecture, (keys, refused) in METADATA.items():
        for changes, message in [({}, ""), *refused]:
            scalars, arrays = {"general.architecture": architecture}, {}
            for key, value in (SIZES | keys | changes).items():
                if isinstance(value, list):
                    arrays[f"{architecture}.{key}"] = np.array(value)
                elif value is not None:
                    scalars[f"{architecture}.{key}"] = value
            header = GGUFHeader(Path("a.gguf"), scalars, arrays, tensors)
            with noted((architecture, changes)), pytest.raises(UserError, match=message) if message else nullcontext():
                config = read_gguf_config([header])
                ARCHITECTURES[config.require("model_type", str)].read_config(config)


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


@pytest.fixture(scope="module")
def small_hybrid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a Nemotron-H of each kind of dense layer, whose file has arrays for each layer."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "head_dim": 4}
    sizes |= {"num_key_value_heads": 1, "mamba_num_heads": 2, "mamba_head_dim": 2, "n_groups": 1, "ssm_state_size": 2}
    HYBRID["nemotron_h"].write(folder, layers_block_type=[LINEAR, "mlp", FULL], **sizes)
    write_gguf(open_checkpoint(folder, False), folder / "x.gguf", "float32")
    return (folder / "x.gguf").read_bytes()


@pytest.mark.long
@each("kind", ["dense", "hybrid"])
def test_truncated_anywhere(small: bytes, small_hybrid: bytes, tmp_path: Path, kind: str) -> None:
    file, whole = tmp_path / "x.gguf", small if kind == "dense" else small_hybrid
    assert load_damaged(whole, file) == ""
    last = max(i for i, byte in enumerate(whole) if byte)  # the rest is padding
    for length in range(last):
        assert load_damaged(whole[:length], file), length


@pytest.mark.long
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_a_user_error(small: bytes, small_hybrid: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from([small, small_hybrid])))
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
