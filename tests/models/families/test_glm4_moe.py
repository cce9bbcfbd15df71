"""GLM-4.5's mixtures of experts against transformers, and what their config.json may not say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.glm4_moe import read_config
from tests.helpers.builders import SMALL, all_logits, engine_of
from tests.helpers.oracle import check_equals_transformers, write_model

SIZES: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms_and_biases": {"use_qk_norm": True, "attention_bias": True},
    "two_dense": {"first_k_dense_replace": 2, "n_shared_experts": 2},
    "scaled": {"routed_scaling_factor": 2.5, "norm_topk_prob": False},
    "groups": {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
    "quarter_turning": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Glm4MoeForCausalLM, **{**SIZES, **CASES[name]})


def test_the_layer_for_more_tokens_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, Glm4MoeForCausalLM, **SIZES, num_nextn_predict_layers=1)
    before = all_logits(engine_of(tmp_path), [5, 6, 7])
    tensors = load_file(tmp_path / "model.safetensors")
    added = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128), "model.layers.3.enorm.weight": torch.zeros(64)}
    save_file(tensors | added, tmp_path / "model.safetensors")
    assert torch.equal(all_logits(engine_of(tmp_path), [5, 6, 7]), before)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}))
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than the 6 experts of topk_group=1 groups"),
        ({"n_group": 4}, "n_routed_experts=6 is not a multiple of n_group=4"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1 turns 1 of 16 channels"),
        ({"use_qk_norm": "yes"}, "use_qk_norm='yes' is not of type bool"),
        ({"n_routed_experts": None}, "n_routed_experts is missing"),
        ({"num_nextn_predict_layers": 2**40}, "num_nextn_predict_layers=1099511627776 is not between 0 and num_hidden"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **SIZES, "rms_norm_eps": 1e-5, **changes}, "config.json"))
