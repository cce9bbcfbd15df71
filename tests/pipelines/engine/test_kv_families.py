"""Quantised caches in families that have no golden: rows of a batch, in chunks too, are those of a row alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from conf.decoding import DecodeConfig
from tests.helpers.builders import complete, engine_of
from tests.helpers.deepseek import SMALL, V2_GROUPS, build, change_config
from tests.helpers.oracle import write_random
from tests.helpers.quantized_models import random_rows
from tests.models.test_model_parts import OTHERS, write_other

PROMPTS = random_rows(3, 9)


def write_kimi(folder: Path) -> None:
    build(3, n_group=1, topk_group=1).save_pretrained(folder)
    change_config(folder, model_type="kimi_k2")


def write_glm4_moe_lite(folder: Path) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "first_k_dense_replace"}
    write_random(folder, Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**sizes)))


FAMILIES: dict[str, Callable[[Path], object]] = {name: partial(write_other, family=name) for name in OTHERS}
FAMILIES |= {
    "deepseek_v2": lambda folder: build(2, **V2_GROUPS).save_pretrained(folder),
    "glm4_moe_lite": write_glm4_moe_lite,
    "kimi_k2": write_kimi,
}


@pytest.mark.parametrize("kv_cache", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_that_of_the_row_alone(family: str, kv_cache: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path)
    engine, decode = engine_of(tmp_path, kv_cache=kv_cache), DecodeConfig(max_new_tokens=8, ignore_eos=True)
    alone = [complete(engine, [prompt], decode)[0].token_ids for prompt in PROMPTS]
    chunked = engine_of(tmp_path, kv_cache=kv_cache, max_batched_tokens=5, block_size=4)
    assert [row.token_ids for row in complete(engine, PROMPTS, decode)] == alone
    assert [row.token_ids for row in complete(chunked, PROMPTS, decode)] == alone
