"""Keys of GGUF files that are missing, contradict other keys or have no meaning in the family: one line each."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from conf.errors import UserError
from models.families.baichuan import BaichuanConfig
from models.formats.gguf.config import read_gguf_config
from models.formats.gguf.header import GGUFHeader, TensorInfo
from models.registry import find_architecture
from tests.helpers.cases import each

SIZES: dict[str, Any] = {
    **{"embedding_length": 64, "block_count": 40, "feed_forward_length": 96, "context_length": 128},
    **{"attention.head_count": 4, "attention.head_count_kv": 2},
}
RMS, MEAN = {"attention.layer_norm_rms_epsilon": 1e-5}, {"attention.layer_norm_epsilon": 1e-5}
KEYS: dict[str, dict[str, Any]] = {
    "falcon": MEAN,
    "internlm2": RMS,
    "baichuan": {**RMS, "attention.head_count_kv": 4},
    "jais2": MEAN,
    "bitnet": RMS,
    "minimax-m2": {**RMS, "expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2},
    "gemma3n": {
        **{**RMS, "attention.shared_kv_layers": 15, "attention.sliding_window": 9, "altup.num_inputs": 4},
        **{"embedding_length_per_layer_input": 8, "attention.sliding_window_pattern": np.arange(40) % 5 < 4},
        "activation_sparsity_scale": np.float32([1.6] * 40),
    },
}
TENSORS = {f"blk.{i}.attn_norm.weight": (64,) for i in range(40)} | {
    **dict.fromkeys(("token_embd.weight", "output.weight"), (96, 64)),
    "per_layer_token_embd.weight": (96, 320),
    "blk.0.laurel_l.weight": (8, 64),
}


def header(architecture: str, changes: dict[str, Any], tensors: dict[str, tuple[int, ...] | None]) -> GGUFHeader:
    """Return a header with a family's keys. A change of None removes a key or a tensor."""
    keys = {f"{architecture}.{key}": value for key, value in {**SIZES, **KEYS[architecture], **changes}.items()}
    arrays = {key: value for key, value in keys.items() if isinstance(value, np.ndarray)}
    scalars = {key: value for key, value in keys.items() if key not in arrays and value is not None}
    infos = {
        name: TensorInfo(Path("x.gguf"), shape, gguf.GGMLQuantizationType.F32, 0, 4)
        for name, shape in {**TENSORS, **tensors}.items()
        if shape is not None
    }
    return GGUFHeader(Path("x.gguf"), {"general.architecture": architecture, **scalars}, arrays, infos)


def read(architecture: str, changes: dict[str, Any], **tensors: tuple[int, ...] | None) -> Any:
    config = read_gguf_config([header(architecture, changes, tensors)])
    return find_architecture(config).read_config(config)


WIDE_HEADS = {"attention.key_length": 32, "attention.value_length": 32}


@each(
    "architecture, changes, message",
    [
        ("falcon", {"attention.layer_norm_epsilon": None}, "x.gguf: falcon: attention.layer_norm_epsilon is missing"),
        ("falcon", {"rope.dimension_count": 8}, "x.gguf: falcon: rope.dimension_count=8 is not supported: only 16"),
        ("falcon", WIDE_HEADS, "attention.key_length=32 is not supported: only 16"),
        ("falcon", {"attention.head_count_kv": 3}, "num_attention_heads=4 is not a multiple of num_kv_heads=3"),
        ("internlm2", {"rope.dimension_count": 8}, "rope.dimension_count=8 is not supported: only 16"),
        ("internlm2", {"context_length": None}, "internlm2: context_length is missing"),
        ("baichuan", {"block_count": 2}, "baichuan: block_count=2 is not supported: only 32, 40"),
        ("baichuan", {"attention.head_count_kv": 2}, "attention.head_count_kv=2 is not supported: only 4"),
        ("baichuan", WIDE_HEADS, "attention.key_length=32 is not supported: only 16"),
        ("baichuan", {"rope.freq_base": 5e5}, "rope_theta=500000.0 is not supported: only None, 10000"),
        ("jais2", {"rope.dimension_count": 8}, "rope.dimension_count=8 is not supported: only 16"),
        ("bitnet", {"attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon is missing"),
        ("minimax-m2", {"expert_gating_func": 1}, "expert_gating_func=1 is not supported: only 2"),
        ("minimax-m2", {"expert_gating_func": None}, "expert_gating_func=None is not supported: only 2"),
        ("minimax-m2", {"expert_count": None}, "minimax-m2: expert_count is missing"),
        ("minimax-m2", {"expert_used_count": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
        ("minimax-m2", {"expert_feed_forward_length": 48}, "expert_feed_forward_length=48 is not supported: only 96"),
        ("minimax-m2", {"expert_weights_scale": 2.0}, "expert_weights_scale=2.0 is not supported: only None"),
        ("gemma3n", {"attention.shared_kv_layers": None}, "gemma3n: attention.shared_kv_layers is missing"),
        ("gemma3n", {"attention.shared_kv_layers": 40}, "num_kv_shared_layers=40 is not from 0 to a number that"),
        ("gemma3n", {"attention.sliding_window_pattern": np.array([True])}, "pattern has 1 values, expected 40"),
        ("gemma3n", {"activation_sparsity_scale": None}, "scale must be an array of kind 'f', found none"),
        ("gemma3n", {"feed_forward_length": np.array([96] * 39 + [0])}, "has a number that is not above 0"),
        ("gemma3n", {"altup.num_inputs": None}, "gemma3n: altup.num_inputs is missing"),
        ("gemma3n", {"altup.active_idx": 4}, "altup_num_inputs=4 and altup_active_idx=4 are not"),
    ],
)
def test_refused_keys(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read(architecture, changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_tensors_that_the_config_needs() -> None:
    for name, architecture, wanted in (
        ("attn_q", "internlm2", 64),
        ("attn_k", "internlm2", 32),
        ("attn_v", "baichuan", 64),
    ):
        with pytest.raises(UserError, match=f"x.gguf: blk.3.{name}.weight has 48 rows, expected {wanted}: convert"):
            read(architecture, {}, **{f"blk.3.{name}.weight": (48, 64)})
    for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"):
        with pytest.raises(UserError, match=f"x.gguf: the tensor '{name}' is missing"):
            read("gemma3n", {}, **{name: None})


@pytest.mark.long
def test_versions_of_baichuan(caplog: pytest.LogCaptureFixture) -> None:
    """The number of layers tells the size, and the vocabulary the version."""
    for num_layers, vocab_size in ((32, 64000), (40, 64000), (32, 125696), (40, 96)):
        config = read("baichuan", {"block_count": num_layers}, **{"token_embd.weight": (vocab_size, 64)})
        assert isinstance(config, BaichuanConfig)
        assert (config.alibi, config.normalised_head) == (num_layers == 40, vocab_size == 125696)
    assert not caplog.messages
