"""Quantised caches in every family: logits near the floats', and rows of a batch, in chunks too, are those of a row alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from conf.decoding import DecodeConfig
from models.formats import open_checkpoint
from models.registry import ARCHITECTURES, CHATGLM2, find_architecture
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.deepseek import SMALL, V2_GROUPS, V3_GROUPS, build, change_config
from tests.helpers.goldens import FAMILIES as OF_GOLDENS
from tests.helpers.goldens import WHOLE_PROMPTS, link
from tests.helpers.oracle import random_prompts, write_random
from tests.models.families.test_ernie3_5 import CONFIG as ERNIE3_5
from tests.models.families.test_ernie3_5 import make_arrays
from tests.models.families.test_ernie3_5 import write as write_paddle
from tests.models.test_model_parts import OTHERS, write_other

PROMPT, *PROMPTS = random_prompts(60, (33, 9, 9, 9))
# 1.3 to 1.6 times the largest error of any family, as a share of the logits' standard deviation: that of random weights, where a router
# may take another expert.
BOUNDS = {"int8": 0.09, "fp8": 0.3, "int4": 0.4}


def write_kimi(folder: Path) -> None:
    build(3, n_group=1, topk_group=1).save_pretrained(folder)
    change_config(folder, model_type="kimi_k2")


def write_glm4_moe_lite(folder: Path) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "first_k_dense_replace"}
    write_random(folder, Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**sizes)))


FAMILIES: dict[str, Callable[[Path], object]] = {name: partial(write_other, family=name) for name in OTHERS}
FAMILIES |= {
    "deepseek_v2": lambda folder: build(2, **V2_GROUPS).save_pretrained(folder),
    "deepseek_v3": lambda folder: build(3, **V3_GROUPS).save_pretrained(folder),
    "ernie3_5": lambda folder: write_paddle(folder, make_arrays(ERNIE3_5), ERNIE3_5),
    "glm4_moe_lite": write_glm4_moe_lite,
    "kimi_k2": write_kimi,
}
FAMILIES |= {name: partial(link, name) for name in OF_GOLDENS if name not in WHOLE_PROMPTS}


def test_every_architecture_is_here(tmp_path: Path) -> None:
    """But for ChatGLM-6B, whose prompts cannot be cut."""
    found = []
    for family, write in FAMILIES.items():
        (tmp_path / family).mkdir()
        write(tmp_path / family)
        found.append(open_checkpoint(tmp_path / family, allow_pickle=True).config)
    architectures = {id(find_architecture(config)) for config in found}
    assert architectures == {id(each) for name, each in ARCHITECTURES.items() if name != "chatglm"} | {id(CHATGLM2)}


@pytest.mark.parametrize("kv_cache", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_that_of_the_row_alone(family: str, kv_cache: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path)
    floats, engine = (engine_of(tmp_path, allow_pickle=True, kv_cache=kind) for kind in ("none", kv_cache))
    expected = all_logits(floats, PROMPT)
    error = (all_logits(engine, PROMPT) - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < BOUNDS[kv_cache]
    decode = DecodeConfig(max_new_tokens=8, ignore_eos=True)
    alone = [complete(engine, [prompt], decode)[0].token_ids for prompt in PROMPTS]
    chunked = engine_of(tmp_path, allow_pickle=True, kv_cache=kv_cache, max_batched_tokens=5, block_size=4)
    assert [row.token_ids for row in complete(engine, PROMPTS, decode)] == alone
    assert [row.token_ids for row in complete(chunked, PROMPTS, decode)] == alone
