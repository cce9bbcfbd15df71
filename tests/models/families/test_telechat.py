"""TeleChat against transformers' Llama with rearranged weights, how its angles grow, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import UserError
from models.config import ConfigReader
from models.families.telechat import read_config
from models.layers.rotary import RotaryEmbedding
from tests.helpers.family_twins import TeleChatTwin
from tests.helpers.oracle import assert_equals_transformers, check_equals_transformers, random_prompts, write_model

BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "one_key": {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 66},
    "a_key_for_each_query": {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
}
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_hidden_size": 88,
    "n_layer": 2,
    "n_head": 4,
    "training_seqlen": 8192,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_llama(name: str, tmp_path: Path) -> None:
    check_equals_transformers(tmp_path, TeleChatTwin, **BIASES, **CASES[name])


@pytest.mark.parametrize(("base_seqlen", "alpha"), [(128, 1), (127, 3), (64, 3), (50, 7), (200, 1)])
def test_longer_training_grows_the_base(base_seqlen: int, alpha: int, tmp_path: Path) -> None:
    """By the original code's formula: 2^ceil(log2(training_seqlen / base_seqlen) + 1) - 1, at least 1."""
    theta = 10000.0 * alpha ** (16 / 14)  # heads of 16 channels
    reference = write_model(tmp_path, TeleChatTwin, rope_theta=theta, **BIASES)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_seqlen": base_seqlen}))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def test_the_first_files_do_not_name_the_base() -> None:
    config = read_config(ConfigReader(dict(CONFIG), "config.json"))
    assert config.context_length == 8192
    assert config.num_key_value_heads == 4
    cos, _ = RotaryEmbedding(config.rotary).angles(torch.tensor([5]), torch.tensor([1]), torch.float32)
    theta = 10000.0 * 3 ** (16 / 14)  # 8192 is twice the 4096 of their code
    expected = [math.cos(5 * theta ** (-2 * i / 16)) for i in range(8)]
    torch.testing.assert_close(cos[0], torch.tensor(expected), atol=1e-6, rtol=0)  # float32 angles of at most 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "post_layernorm=True is not supported: only False"),
        ({"embed_layernorm": True}, "embed_layernorm=True is not supported: only False"),
        ({"logn": True}, "logn=True is not supported: only False"),
        ({"n_inner": 7}, "n_inner=7 is not supported: only None"),
        ({"num_key_value_heads": 3}, "n_head=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 60}, r"hidden_size=60 is not a multiple of 2 \* n_head=8"),
        ({"hidden_size": 8}, "training_seqlen above base_seqlen needs more than 2 channels"),
        ({"base_seqlen": 0}, "base_seqlen=0 is not a number above 0"),
        ({"ffn_hidden_size": None}, "ffn_hidden_size is missing"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
