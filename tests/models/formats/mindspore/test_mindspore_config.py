"""MindFormers' YAML converted to the keys of config.json, or refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.errors import UserError
from models.families.llama import LlamaConfig, read_config
from models.formats.mindspore.config import read_mindformers_config
from tests.helpers.cases import each
from tests.helpers.mindspore_files import MODEL_CONFIG, write_yaml


def read(folder: Path, **config: Any) -> LlamaConfig:
    return read_config(read_mindformers_config(write_yaml(folder, **config)))


def test_yaml_in_the_terms_of_config_json(tmp_path: Path) -> None:
    config = read(tmp_path, theta=500000, max_position_embedding=256)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (
        96,
        64,
        88,
        2,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps) == (4, 2, 1e-6)
    assert (config.context_length, config.rotary.theta, config.rotary.type) == (256, 500000.0, "default")
    assert read(tmp_path).context_length == 128
    assert read(tmp_path, n_kv_heads=None).num_key_value_heads == 4


@each(
    "sizes, expected",
    [
        ({"hidden_size": 4096, "num_heads": 32, "multiple_of": 256}, 11008),  # configs/llama2/predict_llama2_7b.yaml
        ({"hidden_size": 5120, "num_heads": 40, "multiple_of": 256}, 13824),  # 13b
        ({"hidden_size": 8192, "num_heads": 64, "multiple_of": 256, "ffn_dim_multiplier": 1.3}, 28672),  # 70b
    ],
)
def test_feed_forward_sizes_of_published_models(sizes: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert read(tmp_path, intermediate_size=None, n_kv_heads=None, **sizes).intermediate_size == expected


def test_extended_contexts(tmp_path: Path) -> None:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama3 = read(tmp_path, extend_method="LLAMA3", scaling_factor=factors, max_position_embedding=131072)
    assert (llama3.rotary.type, llama3.rotary.factor, llama3.context_length) == ("llama3", 8.0, 131072)
    linear = read(tmp_path, extend_method="PI", scaling_factor=2.0)
    assert (linear.rotary.type, linear.rotary.factor, linear.context_length) == ("linear", 2.0, 128)
    assert read(tmp_path, extend_method="NTK", scaling_factor=2.0).rotary.theta == 20000.0


@each(
    "config, message",
    [
        ({"type": "ChatGLM2Config"}, r"predict\.yaml: type='ChatGLM2Config' is not supported: only 'LlamaConfig'"),
        ({"num_layers": "2"}, r"predict\.yaml: num_layers='2' is not of type int"),
        ({"hidden_size": -1}, r"hidden_size=-1 is not a number above 0"),
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps='1e-6' is not of type float"),
        ({"qkv_concat": True}, "qkv_concat=True is not supported"),
        ({"extend_method": "YARN"}, "extend_method='YARN' is not supported"),
        ({"quant": "w8a8"}, "quant='w8a8' is not supported"),
        ({"moe_config": {"expert_num": 8}}, "moe_config=.* is not supported"),
    ],
)
def test_refused_settings(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, **config)


# Nine levels of ten: a billion values.
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
BOMB += "model: {model_config: {hidden_size: *a9}}"


@each(
    "text, message",
    [
        ("a: [", r"predict\.yaml cannot be read: while parsing"),
        ("\x00", r"predict\.yaml cannot be read: "),
        ("!!python/object/apply:os.getcwd []", r"predict\.yaml cannot be read: could not determine a constructor"),
        ("[" * 1500, r"predict\.yaml cannot be read: "),
        (BOMB, r"predict\.yaml: model\.model_config holds more than 1000 values"),
        ("model: {model_config: &a {hidden_size: *a}}", "model_config holds more than 1000 values"),
        ("model: 3", "but neither config.json nor one YAML of MindFormers with model.model_config$"),
    ],
)
def test_unreadable_yaml(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "predict.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_mindformers_config(tmp_path)


def test_separate_experts_are_refused(tmp_path: Path) -> None:
    content = {"moe_config": {"expert_num": 8}, "model": {"model_config": MODEL_CONFIG}}
    (tmp_path / "predict.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="moe_config=.* is not supported"):
        read_mindformers_config(tmp_path)


def test_two_yaml_files(tmp_path: Path) -> None:
    shutil.copy(write_yaml(tmp_path) / "predict.yaml", tmp_path / "train.yaml")
    with pytest.raises(UserError, match=r"nor one YAML .* \(found: predict\.yaml, train\.yaml\)"):
        read_mindformers_config(tmp_path)
