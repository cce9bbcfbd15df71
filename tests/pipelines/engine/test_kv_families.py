"""Quantised caches in every family: logits near the float cache's, and a row's bits do not depend on the batch, also in
chunks."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest

from conf.decoding import DecodeConfig
from models.formats import open_checkpoint
from models.registry import ARCHITECTURES, CHATGLM2, find_architecture
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.catalog import FAMILIES
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.oracle import random_prompts
from tests.helpers.tiers import in_turn, tiers

PROMPT, *PROMPTS = random_prompts(60, (33, 9, 9, 9))
# 1.3 to 1.6 times the largest error of any family, relative to the standard deviation of the logits. Weights are random,
# so a router may choose another expert.
BOUNDS = {"int8": 0.09, "fp8": 0.3, "int4": 0.4}
GROWTH = {"phimoe": 1.7}  # its weights jump where a score passes a threshold: 4 of 33 tokens have 0.2 to 0.45 in int8


def test_every_architecture_is_here(tmp_path: Path) -> None:
    """Except ChatGLM-6B, whose prompts cannot be cut, and recurrent architectures, which test_recurrent.py has."""
    errors = []
    for family, write in FAMILIES.items():
        (tmp_path / family).mkdir()
        write(tmp_path / family)
        errors.append(open_checkpoint(tmp_path / family, allow_pickle=True).config)
    architectures = {id(find_architecture(config)) for config in errors}
    assert architectures == {
        id(architecture) for name, architecture in ARCHITECTURES.items() if name not in ("chatglm", *HYBRID)
    } | {id(CHATGLM2)}


EVERY = FAMILIES | {name: partial(row.write, **row.variants[0]) for name, row in HYBRID.items() if name != "mamba2"}


# test_kv_formats.py tests every format with layers of every kind. Mamba-2 has no keys.
@pytest.mark.parametrize(("family", "kv_cache"), tiers(product(EVERY, BOUNDS), long=in_turn(EVERY, BOUNDS)))
def test_a_row_is_that_of_the_row_alone(family: str, kv_cache: str, tmp_path: Path) -> None:
    EVERY[family](tmp_path)
    floats, engine = (engine_of(tmp_path, allow_pickle=True, kv_cache=kind) for kind in ("none", kv_cache))
    expected = all_logits(floats, PROMPT)
    error = (all_logits(engine, PROMPT) - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < BOUNDS[kv_cache] * GROWTH.get(family, 1)
    decode = DecodeConfig(max_new_tokens=8, ignore_eos=True)
    alone = [complete(engine, [prompt], decode)[0].token_ids for prompt in PROMPTS]
    chunked = engine_of(tmp_path, allow_pickle=True, kv_cache=kv_cache, max_batched_tokens=5, block_size=4)
    assert [row.token_ids for row in complete(engine, PROMPTS, decode)] == alone
    assert [row.token_ids for row in complete(chunked, PROMPTS, decode)] == alone
