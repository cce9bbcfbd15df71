"""Every option of `model=` composes, states its memory, and belongs to a supported family."""

import re
from functools import cache

import pytest
import yaml

from conf.compose import CONF, compose_run_config, options
from models.registry import ARCHITECTURES
from tests.helpers.cases import each

MODEL_TYPES = {  # by the beginning of the options' names
    "baichuan2": "baichuan",
    "baichuan": "baichuan",
    "bloom": "bloom",
    "chatglm2": "chatglm",
    "chatglm3": "chatglm",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_9b": "glm",
    "glm4_9b_0414": "glm4",
    "gpt2": "gpt2",
    "llama2": "llama",
    "llama3": "llama",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "mixtral": "mixtral",
    "qwen1_5": "qwen2",
    "qwen1_5_moe": "qwen2_moe",
    "qwen2": "qwen2",
    "qwen2_5": "qwen2",
    "qwen2_57b_a14b": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_235b_a22b": "qwen3_moe",
    "qwen3_30b_a3b": "qwen3_moe",
    "tinyllama": "llama",
}
OF_THE_HUB = sorted({*options("model")} - {"tiny"})


def beginning(option: str) -> str:
    return max((beginning for beginning in MODEL_TYPES if f"{option}_".startswith(f"{beginning}_")), key=len)


@cache
def path_of(option: str) -> str:
    return compose_run_config([f"model={option}"]).model.path


def keys_of(option: str) -> list[str]:
    return [*yaml.safe_load((CONF / "model" / f"{option}.yaml").read_text(encoding="utf-8"))]


@pytest.mark.long
@each("option", OF_THE_HUB)
def test_composes_and_is_of_a_family(option: str) -> None:
    assert re.fullmatch(r"[\w-]+/[\w.-]+", path_of(option))
    assert MODEL_TYPES[beginning(option)] in ARCHITECTURES
    comment = (CONF / "model" / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[0]
    size = re.search(r" ([\d.]+) billion parameters.*: ([\d.]+) ([GT])B in bfloat16\.", comment)
    assert size is not None
    # two bytes per parameter; parameters are rounded to two or three digits
    assert float(size[2]) * {"G": 1, "T": 1000}[size[3]] == pytest.approx(2 * float(size[1]), rel=0.05)


@pytest.mark.long
def test_every_beginning_has_an_option() -> None:
    assert {beginning(option) for option in OF_THE_HUB} == MODEL_TYPES.keys()
    assert all(
        keys_of(option) == ["path"] for option in OF_THE_HUB
    )  # test_compose.py tests one of them over a saved config
    assert len({*map(path_of, OF_THE_HUB)}) == len(OF_THE_HUB)
