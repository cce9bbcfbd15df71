"""Ernie 4.5's mixtures of experts against transformers, and what their config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.ernie4_5_moe import read_config
from tests.helpers.builders import SMALL, all_logits, engine_of
from tests.helpers.oracle import check_equals_transformers, write_model

SIZES: dict[str, Any] = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every_second": {"moe_layer_interval": 2, "moe_layer_start_index": 0},
    "middle": {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "no_shared": {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    "least_sum": {"moe_norm_min": 0.9, "moe_k": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, Ernie4_5_MoeForCausalLM, **{**SIZES, **CASES[name]})


def test_the_layers_for_more_tokens_are_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, Ernie4_5_MoeForCausalLM, **SIZES)
    before = all_logits(engine_of(tmp_path), [5, 6, 7])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.mtp_block.0.mlp.up_proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert torch.equal(all_logits(engine_of(tmp_path), [5, 6, 7]), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "use_bias=True is not supported: only False"),
        ({"moe_k": 7}, "moe_k=7 is more than moe_num_experts=6"),
        ({"moe_layer_interval": 0}, "moe_layer_interval=0 is not a number above 0"),
        ({"moe_norm_min": -1}, "moe_norm_min=-1.0 is not a number from"),
        ({"moe_num_shared_experts": -1}, "moe_num_shared_experts=-1 is not a number above 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader({**SMALL, **SIZES, **changes}, "config.json"))
