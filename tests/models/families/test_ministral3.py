"""Ministral 3 against transformers past its first length, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Ministral3ForCausalLM

from conf.errors import UserError
from models.config import ConfigReader
from models.families.ministral3 import read_config
from tests.helpers.builders import SMALL
from tests.helpers.oracle import check_equals_transformers

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 7,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "other_mscale": {"rope_parameters": {**ROPE, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 2.0}},
    "queries_that_do_not_grow": {"rope_parameters": {**ROPE, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}},
    "own_length": {"rope_parameters": {**ROPE, "max_position_embeddings": 128}},
    "window": {"sliding_window": 9, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    config = {"head_dim": 16, "rope_parameters": ROPE, **CASES[name]}
    check_equals_transformers(tmp_path, Ministral3ForCausalLM, **config)


CONFIG = {**SMALL, "rms_norm_eps": 1e-5, "rope_parameters": ROPE}


def test_the_base_of_the_angles_beside_the_other_settings() -> None:
    """Where transformers takes it, too, unless these name it."""
    rope = {key: value for key, value in ROPE.items() if key != "rope_theta"}
    reader = ConfigReader(CONFIG | {"rope_theta": 5e5, "rope_parameters": rope}, "config.json")
    assert read_config(reader).rotary.theta == 5e5
    assert reader.unread() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "rope_parameters is missing"),
        ({"rope_parameters": {**ROPE, "llama_4_scaling_beta": None}}, "llama_4_scaling_beta is missing"),
        ({"rope_parameters": {**ROPE, "llama_4_scaling_beta": -1}}, "llama_4_scaling_beta=-1.0 is not a number from"),
        ({"rope_parameters": {**ROPE, "original_max_position_embeddings": 0}}, "is not a number above 0"),
        (
            {"rope_parameters": {**ROPE, "max_position_embeddings": 32}},
            "max_position_embeddings=32 is not supported: only 128",
        ),
        (
            {"max_position_embeddings": 2**21},
            "original_max_position_embeddings=7 is less than 1 / 65536 of the context, 2097152",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has rope_parameters and rope_scaling"),
        ({"rope_parameters": {**ROPE, "sharpness": 1}}, "rope_scaling has fields that are not supported: sharpness"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
