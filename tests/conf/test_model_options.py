"""Every option of `model=` composes, says what it takes, and is of a family that there is."""

import re

import pytest

from conf.compose import CONF, compose_run_config, options
from models.registry import ARCHITECTURES

MODEL_TYPES = {  # of the checkpoints whose options begin so
    "baichuan": "baichuan",
    "bloom": "bloom",
    "chatglm": "chatglm",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_9b": "glm",
    "glm4_9b_0414": "glm4",
    "gpt2": "gpt2",
    "llama": "llama",
    "mixtral": "mixtral",
    "qwen1_5": "qwen2",
    "qwen1_5_moe": "qwen2_moe",
    "qwen2": "qwen2",
    "qwen2_57b_a14b": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_235b_a22b": "qwen3_moe",
    "qwen3_30b_a3b": "qwen3_moe",
    "tinyllama": "llama",
}
OF_THE_HUB = sorted({*options("model")} - {"tiny"})


def model_type(option: str) -> str:
    return MODEL_TYPES[max((beginning for beginning in MODEL_TYPES if option.startswith(beginning)), key=len)]


@pytest.mark.parametrize("option", OF_THE_HUB)
def test_composes_and_is_of_a_family(option: str) -> None:
    assert re.fullmatch(r"[\w-]+/[\w.-]+", compose_run_config([f"model={option}"]).model.path)
    assert model_type(option) in ARCHITECTURES
    comment = (CONF / "model" / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert re.search(r"\d (billion )?parameters.*: [\d.]+ [GT]B in bfloat16\.", comment)


def test_every_beginning_has_an_option() -> None:
    assert {model_type(option) for option in OF_THE_HUB} == {*MODEL_TYPES.values()}
    assert len({compose_run_config([f"model={option}"]).model.path for option in OF_THE_HUB}) == len(OF_THE_HUB)
