"""The bytes of the ranks of published models, on the meta device, compared with sums by hand.

E hidden channels, F feed-forward channels, D channels of a head, L layers, V vocabulary.
"""

from typing import Any

import pytest
import torch

from kernels.collectives import Threads
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.meta_model import build_meta_model
from models.parallel import shard_model, stage_layers
from models.registry import find_architecture
from models.sharding import ParallelLayout
from models.weights import module_bytes
from tests.helpers.tiers import tiers

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "num_hidden_layers": 80, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_hidden_layers": 28, "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "vocab_size": 129280, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
BFLOAT16 = 2  # bytes


def build(config: dict[str, Any]) -> CausalLM:
    reader = ConfigReader(config, "config.json")
    architecture = find_architecture(reader)
    return build_meta_model(architecture, architecture.read_config(reader), None)


def rank_bytes(config: dict[str, Any], parallel_layout: ParallelLayout) -> int:
    model = build(config)
    shard_model(model, parallel_layout, Threads.of(parallel_layout.tp)[parallel_layout.tp_rank], torch.bfloat16)
    return sum(module_bytes(model, torch.bfloat16).values())


@pytest.mark.long
def test_llama_70b_on_eight_ranks() -> None:
    e, f, v, layers, keys = 8192, 28672, 32000, 80, 8 * 128
    cut = 2 * v * e + layers * (2 * e * e + 2 * keys * e + 3 * e * f)
    norms = (2 * layers + 1) * e
    sizes = [rank_bytes(LLAMA_70B, ParallelLayout(8, 1, rank)) for rank in range(8)]
    assert sizes == [BFLOAT16 * (cut // 8 + norms)] * 8


def test_qwen2_7b_on_eight_ranks_has_its_four_keys_twice() -> None:
    e, f, v, layers, keys = 3584, 18944, 152064, 28, 4 * 128
    once = 2 * v * e + layers * (2 * e * e + e + 3 * e * f)
    twice = layers * 2 * keys * (e + 1)  # with biases
    norms = (2 * layers + 1) * e
    sizes = [rank_bytes(QWEN2_7B, ParallelLayout(8, 1, rank)) for rank in range(8)]
    assert sum(sizes) == BFLOAT16 * (once + 2 * twice + 8 * norms)
    assert max(sizes) < 1.02 * min(sizes)  # 3 heads and 4


@pytest.mark.parametrize("layers", tiers([(21,), (61,)], long=[(21,)]))
def test_deepseek_v3_on_four_stages_of_sixteen_ranks(layers: int) -> None:
    """For all its layers, and for the first layers, which are of both kinds."""
    config = DEEPSEEK_V3 | {"num_hidden_layers": layers}
    e, v, h, dense, x = 7168, 129280, 128, 3, 256
    attention = h * 192 * 1536 + 512 * h * 256 + e * h * 128
    cut = 2 * v * e + layers * attention + dense * 3 * e * 18432 + (layers - dense) * (x + 1) * 3 * e * 2048
    latents = (1536 + 576) * e + 1536 + 512
    whole_bytes = layers * (latents + 2 * e) + e
    routers = 4 * (layers - dense) * (x * e + x)  # float32
    sizes = [
        rank_bytes(config, ParallelLayout(16, 4, 5 * stage, stage)) for stage in range(4)
    ]  # all sizes are multiples of 16
    assert sum(sizes) == BFLOAT16 * (cut // 16 + whole_bytes) + routers
    a_layer = (BFLOAT16 * (attention + (x + 1) * 3 * e * 2048)) // 16 + 2**20 * 64
    assert max(sizes) - sum(sizes) / 4 < a_layer


def test_stages_of_a_large_vocabulary_differ_by_less_than_a_layer() -> None:
    """With the vocabulary at both ends, the outer stages have fewer layers."""
    model = build(QWEN2_7B)
    ranges = stage_layers(model, 4, torch.bfloat16)
    assert [len(stage) for stage in ranges] == [6, 8, 8, 6]
