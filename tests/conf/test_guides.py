"""Guides as settings: exactly one kind with a value of its type; contradicting settings are named."""

import json
from typing import Any

import pytest

from conf.compose import compose_run_config
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.guides import CALL_SPACING, MAX_BYTES, MAX_CHOICES, MAX_LARK_RULES, guide_text
from tests.helpers.cases import each

ONE_OF = r"is not allowed: give one of \{json_schema: \{\.\.\.\}\}, \{json_object: true\}, .* or null$"
SPACING = json.dumps(CALL_SPACING)
deep: Any = []
for _ in range(100_000):
    deep = [deep]


@each(
    ("guide", "message"),
    [
        ({}, ONE_OF),
        ("json", ONE_OF),
        ({"json": {}}, ONE_OF),
        ({"regex": "a", "lark": "start: /a/"}, ONE_OF),
        ({3: "a"}, ONE_OF),
        ({"json_schema": True}, r"json_schema=True is not allowed: give a JSON schema that is an object"),
        ({"json_schema": '{"type": "object"}'}, "give a JSON schema that is an object"),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "without x-guidance$"),
        ({"json_object": False}, "json_object=False is not allowed: give true"),
        ({"json_object": {}}, "give true"),
        ({"regex": ""}, "regex='' is not allowed: give a regular expression that is not empty"),
        ({"regex": ["a"]}, "give a regular expression"),
        ({"choice": []}, f"choice=.* give 1 to {MAX_CHOICES} texts that are not empty"),
        ({"choice": ["a", ""]}, "texts that are not empty"),
        ({"choice": [1, 2]}, "texts that are not empty"),
        ({"choice": "yes"}, "texts that are not empty"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "texts that are not empty"),
        ({"lark": " \n"}, f"give a Lark grammar of at most {MAX_LARK_RULES} rules"),
        ({"lark": "a: /a/\n" * (MAX_LARK_RULES + 1)}, f"of at most {MAX_LARK_RULES} rules"),
        ({"lark": 'start: %json {"x-guidance": {"lenient": true}}'}, "without x-guidance$"),
        ({"lark": 'start: %json {"x\\u002dguidance": {"lenient": true}}'}, "without x-guidance$"),
        ({"lark": f'start: %json {{"x-guidance": {SPACING[:-1]}, "lenient": true}}}}'}, "without x-guidance$"),
        (
            {"lark": f'start: %json {{"x-guidance": {SPACING[:-2]}\\u0022}}", "lenient": true}}}}'},
            "without x-guidance$",
        ),
        (
            {"regex": "a" * MAX_BYTES},
            rf"regex has {MAX_BYTES + 13} bytes as JSON: give at most {MAX_BYTES}$",
        ),
        (
            {"json_schema": {"const": object()}},
            "json_schema is no JSON: Object of type object is not JSON serializable",
        ),
        ({"json_schema": {"const": float("nan")}}, "json_schema is no JSON: Out of range float values"),
        ({"json_schema": {"const": deep}}, "json_schema is no JSON: .*recursion"),
        ({"choice": ["\ud83d"]}, "choice is no JSON: .*surrogates not allowed"),
    ],
)
def test_invalid_guide_settings_are_refused(guide: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^decode\.guide.*{message}") as error:
        DecodeConfig(guide=guide)
    assert len(str(error.value)) < 500
    with pytest.raises(UserError, match=message):
        DecodeConfig().replaced({"guide": guide})


def test_overrides_say_a_guide() -> None:
    schema = "{type:object,properties:{b:{type:integer},a:{enum:[x,y]}},required:[b]}"
    run = compose_run_config([f"decode.guide={{json_schema:{schema}}}"])
    expected = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "y"]}},
        "required": ["b"],
    }
    assert run.decode.guide == {"json_schema": expected}
    assert list(run.decode.guide["json_schema"]["properties"]) == ["b", "a"]  # the order in the config
    assert compose_run_config(["decode.guide={choice:[yes_,no_]}"]).decode.guide == {"choice": ["yes_", "no_"]}
    with pytest.raises(UserError, match=r"decode\.guide=\{'grammar': 'x'\} is not allowed"):
        compose_run_config(["decode.guide={grammar:x}"])


def test_a_guide_as_text_keeps_the_order_of_keys() -> None:
    guide = {"json_schema": {"properties": {"é": {}, "a": {}}}}
    assert json.loads(guide_text(guide)) == guide
    assert guide_text(guide).index("é") < guide_text(guide).index('"a"')
