"""GLM-4.7-Flash against transformers, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.glm4_moe_lite import read_config
from tests.helpers.deepseek import SMALL
from tests.helpers.oracle import assert_equals_transformers, random_prompts, write_random

SIZES: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "first_k_dense_replace"}
HUB = SIZES | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_dense": {"mlp_layer_types": ["dense", "dense", "sparse"]},
    "no_dense": {"mlp_layer_types": ["sparse"] * 3, "routed_scaling_factor": 0.7, "norm_topk_prob": False},
    "half_split_biases": {"rope_interleave": False, "attention_bias": True},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**{**SIZES, **CASES[name]}))
    assert_equals_transformers(tmp_path, write_random(tmp_path, reference), random_prompts(96))


def test_dense_layers_of_hub_configs() -> None:
    """Which give their number; where they do not, the first is dense."""
    hub = HUB | {"topk_method": "noaux_tc"}
    assert read_config(ConfigReader(hub, "config.json")).layer_kinds == (False, True, True)
    given = hub | {"first_k_dense_replace": 2}
    assert read_config(ConfigReader(given, "config.json")).layer_kinds == (False, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "is not 3 times 'dense' and then 'sparse'"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "is not 3 times 'dense' and then 'sparse'"),
        ({"mlp_layer_types": 3}, "mlp_layer_types=3 is not 3 times"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(HUB | changes, "config.json"))
