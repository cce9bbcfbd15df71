"""config.json is untrusted: wrong or unsupported values are refused by name."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.errors import UserError
from models.config import ConfigReader
from models.families.llama import LlamaConfig, read_config
from models.layers.rotary import RotaryConfig, RotaryEmbedding, read_rotary_config
from models.registry import ARCHITECTURES, find_architecture
from tests.helpers.cases import each

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def reader(**values: Any) -> ConfigReader:
    return ConfigReader(values, "here")


def llama(**changes: Any) -> LlamaConfig:
    return read_config(ConfigReader(CONFIG | changes, "config.json"))


def without(*names: str) -> ConfigReader:
    return ConfigReader({key: value for key, value in CONFIG.items() if key not in names}, "config.json")


def rotary(length: int = 256, **values: Any) -> RotaryConfig:
    return read_rotary_config(ConfigReader(values, "config.json"), 8, length)


def from_text(folder: Path, content: str | bytes) -> ConfigReader:
    (folder / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return ConfigReader.from_folder(folder)


# The file


def test_file_is_read(tmp_path: Path) -> None:
    config = from_text(tmp_path, json.dumps(CONFIG))
    assert config.require("hidden_size", int) == 32


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json: model\.path must be a folder"):
        ConfigReader.from_folder(tmp_path)


@each(
    "content",
    [
        "",
        '{"hidden_size": 32',
        b'{"a": "\xff"}',
        "[" * 100_000,
        '{"hidden_size": ' + "1" * 5000 + "}",
    ],
)
def test_bad_json(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        from_text(tmp_path, content)


@each("content, kind", [("[1]", "list"), ('"a"', "str"), ("null", "NoneType"), ("3", "int")])
def test_not_an_object(tmp_path: Path, content: str, kind: str) -> None:
    with pytest.raises(UserError, match=rf"config\.json holds a {kind}, not a JSON object"):
        from_text(tmp_path, content)


# ConfigReader


@each(
    "value, kind",
    [
        ("3", int),
        (3.0, int),
        (True, int),
        ([3], int),
        ("3", float),
        (False, float),
        (10**400, float),
        (1, bool),
        (3, str),
        ([], dict),
    ],
)
def test_wrong_type_is_refused(value: object, kind: type) -> None:
    for read in (lambda: reader(a=value).require("a", kind), lambda: reader(a=value).get("a", kind, kind())):
        with pytest.raises(UserError, match=rf"^here: a=.* is not of type {kind.__name__}$"):
            read()


@each("value, kind", [(3, int), (0.5, float), (True, bool), ("a", str), ({"b": 1}, dict)])
def test_right_type_is_read(value: object, kind: type) -> None:
    assert reader(a=value).require("a", kind) == value
    assert reader(a=value).get("a", kind, kind()) == value


def test_int_serves_as_float() -> None:
    value = reader(a=3).require("a", float)
    assert (value, type(value)) == (3.0, float)


@each("values", [{}, {"a": None}])
def test_absent_and_null_are_the_same(values: dict[str, Any]) -> None:
    assert reader(**values).get("a", int, 7) == 7
    assert reader(**values).section("a") is None
    with pytest.raises(UserError, match="^here: a is missing$"):
        reader(**values).require("a", int)
    with pytest.raises(UserError, match="^here: a is missing$"):
        reader(**values).count("a")
    assert reader(**values).count("a", 5) == 5


@each("value", [0, -1])
def test_count_is_above_0(value: int) -> None:
    with pytest.raises(UserError, match=f"here: a={value} is not a number above 0"):
        reader(a=value).count("a")
    with pytest.raises(UserError, match=f"here: a={value} is not a number above 0"):
        reader(a=value).count("a", 5)


@each("value", [0, -1.0, 1e-31, 1e31, math.inf, math.nan])
def test_positive_is_neither_0_nor_beyond_all_products(value: float) -> None:
    with pytest.raises(UserError, match=r"^here: a=\S+ is not a number from 1e-30 to 1e\+30$"):
        reader(a=value).positive("a")


def test_expect_takes_supported_values_only() -> None:
    assert reader(a="x").expect("a", ("x", "y"), "y") == "x"
    assert reader().expect("a", ("x", "y"), "y") == "y"
    with pytest.raises(UserError, match=r"here: a='z' is not supported: only 'x', 'y'"):
        reader(a="z").expect("a", ("x", "y"), "y")


def test_section_errors_name_both_keys() -> None:
    section = reader(outer={"inner": "x"}).section("outer")
    assert section is not None
    with pytest.raises(UserError, match="here: outer: inner='x' is not of type int"):
        section.require("inner", int)


def test_unread_keys_are_reported() -> None:
    config = reader(a=1, b=2, c=None, d=4, e=5, f={"g": 1}, torch_dtype="float32", zebra=6)
    config.get("a", int, 0)
    config.count("d")
    config.expect("e", (5,), 5)
    config.raw("missing")
    assert config.unread() == ["b", "f", "zebra"]


def test_keys_that_change_the_model_are_unread_after_all_is_read() -> None:
    known = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "use_cache": True}
    config = ConfigReader(CONFIG | known | {"sliding_window": 4096, "attn_logit_softcapping": 50.0}, "config.json")
    find_architecture(config).read_config(config)
    assert config.unread() == ["attn_logit_softcapping", "sliding_window"]


# Architectures


def test_unsupported_model_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"model_type='mamba' is not supported: only .*llama"):
        find_architecture(reader(model_type="mamba"))


def test_missing_model_type_is_refused() -> None:
    with pytest.raises(UserError, match="model_type is missing"):
        find_architecture(without("model_type"))


def test_null_quantisation_is_none() -> None:
    assert find_architecture(reader(model_type="llama", quantization_config=None)) is ARCHITECTURES["llama"]


# Llama


def test_llama_defaults() -> None:
    config = llama()
    assert (config.num_key_value_heads, config.head_dim, config.context_length) == (4, 8, 2048)
    assert (config.rms_norm_eps, config.rotary.theta) == (1e-6, 10000.0)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (False, False, False)


def test_llama_reads_every_key() -> None:
    settings = {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 99}
    flags = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    config = llama(**settings, **flags)
    expected = {key: value for key, value in (CONFIG | settings | flags).items() if hasattr(config, key)}
    assert {key: getattr(config, key) for key in expected} == expected
    assert len(expected) == len(CONFIG) - 1 + len(settings) - 1 + len(flags)
    assert (config.context_length, config.rotary.head_dim) == (99, 16)


@each("key", [key for key in CONFIG if key != "model_type"])
def test_llama_needs_its_sizes(key: str) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: {key} is missing$"):
        read_config(without(key))


@each(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported: only 'silu'"),
        ({"hidden_size": "32"}, "hidden_size='32' is not of type int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a number above 0"),
        ({"vocab_size": 64.0}, "vocab_size=64.0 is not of type int"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not of type bool"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' is not of type float"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1 is not a number above 0"),
        ({"hidden_size": 33}, "hidden_size=33 is not a multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"head_dim": 0}, "head_dim=0 is not a number above 0"),
    ],
)
def test_llama_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama(**changes)


def test_explicit_head_dim_need_not_divide_the_hidden_size() -> None:
    assert llama(hidden_size=33, head_dim=8).head_dim == 8


# Rotary embedding


@each(
    "kind, fields",
    [
        ("default", {}),
        ("linear", {"factor": 2.0}),
        ("dynamic", {"factor": 4}),
        ("llama3", LLAMA3),
        ("yarn", {"factor": 4.0, "beta_fast": 16, "original_max_position_embeddings": 64}),
    ],
)
def test_both_spellings_are_the_same(kind: str, fields: dict[str, Any]) -> None:
    expected = rotary(rope_theta=5e5, rope_scaling={"type": kind, **fields})
    assert (expected.type, expected.theta) == (kind, 5e5)
    assert rotary(rope_theta=5e5, rope_scaling={"rope_type": kind, **fields}) == expected
    assert rotary(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **fields}) == expected


@each("key", ["rope_parameters", "rope_scaling"])
def test_parameters_without_a_type_are_the_default(key: str) -> None:
    assert rotary(**{key: {"rope_theta": 5e5}}) == RotaryConfig(8, 256, theta=5e5)


def test_two_spellings_at_once_are_refused() -> None:
    """transformers reads rope_scaling for a Llama, and merges both for a Gemma 3."""
    both = {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(UserError, match="has rope_parameters and rope_scaling: leave one of them out"):
        rotary(**both)
    equal = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "rope_scaling": both["rope_scaling"],
    }
    assert rotary(**equal) == rotary(rope_theta=5e5, rope_scaling=both["rope_scaling"])


@each(
    "values",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "original_max_position_embeddings": 64,
        },
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 128},
        {"rope_scaling": {"type": "default", "factor": 1.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "original_max_position_embeddings": 64},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": None}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1}},  # no ramp
    ],
)
def test_spellings_that_are_found_turn_as_in_transformers(values: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        max_position_embeddings=256, head_dim=8, hidden_size=8, num_attention_heads=1, **copy.deepcopy(values)
    )
    plain, position = LlamaRotaryEmbedding(config), torch.tensor([[5, 200]])
    with torch.no_grad():
        expected = plain(torch.zeros(1), position)[0][0, :, :4]
    cos, _ = RotaryEmbedding(rotary(**values)).angles(position[0], torch.tensor([256]), torch.float32)
    torch.testing.assert_close(cos, expected, atol=1e-6, rtol=0)  # the last bit of an angle of 200


def test_other_names_of_an_activation() -> None:
    assert llama(hidden_act="swish") == llama()
    with pytest.raises(UserError, match="hidden_act='gelu' is not supported: only 'silu'"):
        llama(hidden_act="gelu")


def test_no_scaling() -> None:
    assert rotary(rope_theta=5e5, rope_scaling=None) == RotaryConfig(8, 256, theta=5e5)


def test_llama3_fields() -> None:
    settings = {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 8}
    expected = RotaryConfig(8, 256, 10000.0, "llama3", 8.0, 64, low_freq_factor=2.0, high_freq_factor=8.0)
    assert rotary(rope_scaling=settings) == expected


@each(
    "scaling, expected",
    [
        ({"type": "linear", "factor": 2.5}, 640),
        ({"type": "dynamic", "factor": 2}, 512),
        ({"type": "llama3", **LLAMA3}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"type": "yarn", "factor": 4.0}, 1024),
    ],
)
def test_context_length(scaling: dict[str, Any], expected: int) -> None:
    assert rotary(rope_scaling=scaling).context_length == expected


def test_yarn_factor_follows_from_the_lengths() -> None:
    assert rotary(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64}).factor == 4.0


@each(
    "scaling, message",
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_scaling: rope_type='longrope' is not supported"),
        ({"type": "su", "factor": 2.0}, "rope_scaling: type='su' is not supported: only 'default', 'linear'"),
        ({"type": "linear"}, "rope_scaling: factor is missing"),
        ({"type": "linear", "factor": "2"}, "factor='2' is not of type float"),
        ({"type": "linear", "factor": 0.5}, "factor=0.5 is less than 1"),
        ({"type": "linear", "factor": float("inf")}, "factor=inf is not a number from 1e-30"),
        ({"type": "linear", "factor": float("nan")}, "factor=nan is not a number from 1e-30"),
        ({"type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        ({"type": "linear", "factor": 2.0, "finetuned": True}, "not supported: finetuned"),
        ({"type": "default", "factor": 2.0}, "factor=2.0 is not supported: only None, 1"),
        ({"type": "default", "short_factor": [1.0]}, "not supported: short_factor"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supp"),
        (["linear"], r"rope_scaling=\['linear'\] is not of type dict"),
    ],
)
def test_rotary_refuses(scaling: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rotary(rope_scaling=scaling)


@each(
    "values",
    [
        {"rope_theta": 0},
        {"rope_theta": -1.0},
        {"rope_theta": float("nan")},
        {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 0}},
        {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0}},
        {"rope_scaling": {"type": "linear", "factor": 1e308}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e308}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 1e-308}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": float("nan")}},
        {"rope_scaling": {"type": "yarn", "factor": math.e, "mscale": 1.0, "mscale_all_dim": -10.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": -64}},
    ],
)
def test_rotary_refuses_numbers_that_give_no_angles(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        RotaryEmbedding(rotary(**values))
