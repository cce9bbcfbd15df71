"""Baichuan: detection of version and size, and the head of unit rows. test_goldens.py compares the numbers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.errors import UserError
from models.config import ConfigReader
from models.families.baichuan import Baichuan, NormHead, read_config, read_version
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS, link

CONFIG = {
    "model_type": "baichuan",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64000,
    "max_position_embeddings": 64,
}


def reader(**changes: Any) -> ConfigReader:
    return ConfigReader(CONFIG | changes, "config.json")


@each("family", ["baichuan2-7b", "baichuan2-13b"])
def test_the_head_is_normalised_once(family: str, tmp_path: Path) -> None:
    golden = load_file(GOLDENS / family / "golden.safetensors")
    engine = engine_of(link(family, tmp_path))
    model = engine.executor.model
    assert isinstance(model, Baichuan)
    assert isinstance(model.lm_head, NormHead)
    stored, num_parameters = model.lm_head.weight, len(list(model.parameters()))
    logits = all_logits(engine, golden["input_ids"][0].tolist())
    assert (logits - golden["logits_unnormalised_head"][0]).abs().max() > 0.5  # a plain head's logits are 0.7 to 1 away
    bits = model.lm_head.unit_rows().clone()
    all_logits(engine, golden["input_ids"][0].tolist())
    assert model.lm_head.unit_rows().equal(bits)
    assert model.lm_head.unit_rows() is stored  # no second copy
    assert len(list(model.parameters())) == num_parameters
    embedding = model.model.embed_tokens.weight
    assert engine.executor.step_weight_bytes(1) == engine.executor.weight_bytes - embedding.nbytes


def test_a_head_that_is_loaded_again_is_normalised_again() -> None:
    with torch.device("meta"):
        model = Baichuan(read_config(reader(vocab_size=125696)))
    assert isinstance(model.lm_head, NormHead)
    assert model.lm_head.unit_rows().is_meta  # requested too early
    model.lm_head.weight = torch.nn.Parameter(torch.full((5, 32), 3.0), requires_grad=False)
    torch.testing.assert_close(model.lm_head.unit_rows().norm(dim=1), torch.ones(5))


def test_alibi_slopes_are_not_weights_and_stay_float32() -> None:
    with torch.device("meta"):
        model = Baichuan(read_config(reader(max_position_embeddings=None, model_max_length=64)))
    model.to(torch.bfloat16)
    constant = model.model.layers[0].self_attn.slopes
    slopes = constant.on(torch.device("cpu"))
    assert slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    assert slopes.dtype is torch.float32
    assert not any("slopes" in name for name in model.state_dict())


@each(
    "changes, version",
    [
        ({}, 1),
        ({"vocab_size": 125696}, 2),
        ({"vocab_size": 100, "architectures": ["BaiChuanForCausalLM"]}, 1),
        ({"vocab_size": 100, "tokenizer_class": "BaichuanTokenizer"}, 2),
        ({"vocab_size": 100, "z_loss_weight": 0}, 2),
    ],
)
def test_version(changes: dict[str, Any], version: int, caplog: pytest.LogCaptureFixture) -> None:
    assert read_version(reader(**changes)) == version
    assert not caplog.messages


def test_no_sign_of_a_version_is_1_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_version(reader(vocab_size=100)) == 1
    assert "taken for Baichuan 1" in caplog.text
    assert '"tokenizer_class": "BaichuanTokenizer"' in caplog.text


@each(
    "changes, message",
    [
        (
            {"z_loss_weight": 0},
            r"contradicts itself: vocab_size=64000 is of Baichuan 1, z_loss_weight is of Baichuan 2",
        ),
        ({"architectures": ["BaiChuanForCausalLM"], "vocab_size": 125696}, r"contradicts itself: vocab_size=125696"),
        ({"tokenizer_class": "BaichuanTokenizer"}, r"tokenizer_class=BaichuanTokenizer is of Baichuan 2: take out"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported: only 'silu'"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings=True is not supported"),
        ({"rope_theta": 5}, r"rope_theta=5 is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling=.* is not supported"),
        ({"hidden_size": 30}, r"hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"hidden_size": 36}, r"hidden_size=36 over num_attention_heads=4 is odd"),
        ({"max_position_embeddings": None}, r"model_max_length is missing"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(reader(**changes))


def test_every_key_of_the_goldens_is_known() -> None:
    for family in ("baichuan-7b", "baichuan-13b", "baichuan2-7b", "baichuan2-13b"):
        config = ConfigReader(json.loads((GOLDENS / family / "config.json").read_text(encoding="utf-8")), "config.json")
        read_config(config)
        assert config.unread() == []


def test_lengths_match_either_position_encoding() -> None:
    assert read_config(reader()).context_length == 64
    assert read_config(reader(max_position_embeddings=None, model_max_length=77)).context_length == 77
