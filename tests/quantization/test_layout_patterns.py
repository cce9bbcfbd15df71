"""Regular expressions of a checkpoint's quantization_config: common ones are accepted; those with unbounded time are
refused."""

import re
import time
from types import SimpleNamespace

import pytest

from conf.errors import UserError
from quantization.layouts.compressed_tensors import CompressedTensors
from quantization.layouts.patterns import compile_pattern
from tests.helpers.cases import each

LAYERS = [f"model.layers.{i}.{part}" for i in (0, 7, 19) for part in ("self_attn.q_proj", "mlp.experts.12.down_proj")]


@each(
    "text",
    [
        ".*lm_head", r".*\.18\..*gate.*", r".*\.(?:1[0-9]|[0-9])\..*(q|k|v|o)_proj$", r"model\.layers\.(?!7)\d+\.mlp.*",
        r".*mlp\.experts\.\d+\..*", r"^(?!.*(?:o_proj|down_proj)).*", "vision_model.*", r".*\.layers\.\d{1,2}\.self_attn.*?",
    ],
)  # fmt: skip
def test_expressions_in_use_match_as_they_did(text: str) -> None:
    expected = [re.match(text, name) is not None for name in [*LAYERS, "lm_head"]]
    assert [compile_pattern(text).match(name) is not None for name in [*LAYERS, "lm_head"]] == expected


@each(
    "text",
    ["(.*)*x", r"(\w+\.?)+$!", "(.|.)*!", "(.|.)" * 60 + "!", ".?" * 200 + "!", ".*" * 30 + "!", r"(.*)\1\1!", "((a?)*)*!", "a" * 1001]
    + ["(?=(.*)*!)", "(?>.*)*!", ".{0,40}" * 8 + "!"])  # fmt: skip
def test_hostile_expressions_are_refused_before_they_match(text: str) -> None:
    checkpoint = CompressedTensors((), (f"re:{text}",))
    with pytest.raises(UserError, match="could take too long to match a layer's name: write it without") as refused:
        checkpoint.scheme(SimpleNamespace(name=LAYERS[-1]), {})  # type: ignore[arg-type]
    assert len(str(refused.value)) < 250


@each("text", ["(", "[z-a]", "(" * 900, "a{99999999999999999999}"])
def test_an_invalid_regular_expression_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"quantization_config: '.*' is not a regular expression: "):
        compile_pattern(text)


def test_the_slowest_that_is_taken_is_fast() -> None:
    pattern = compile_pattern(".*.*.*.*(.|.|.|.)!")
    start = time.process_time()
    assert pattern.match("m" * 64) is None
    assert time.process_time() - start < 2  # seconds; 0.03 were measured, and (.*)*! takes practically forever
