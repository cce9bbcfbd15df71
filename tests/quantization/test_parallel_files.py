"""Files of other tools in a model whose ranks are threads: the bits of one process."""

from pathlib import Path

import pytest

from tests.helpers.builders import run_config
from tests.helpers.divided import assert_same_bits, divided_steps, whole_steps
from tests.helpers.oracle import random_prompts
from tests.helpers.packed_layouts import write_twins
from tests.quantization.test_layouts_fp8 import SMALL_BLOCKS, encode
from tests.quantization.test_layouts_gguf import write_blocks, write_pair
from tests.quantization.test_layouts_packed import CASES, write_case

PROMPTS = random_prompts(96, (5, 1, 40))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_packed_integers(case: str, tp: int, tmp_path: Path) -> None:
    """Also with permuted channels, zero points, and one group for all channels."""
    packed, _ = write_case(case, tmp_path)
    assert_same_bits(whole_steps(run_config(packed), PROMPTS), divided_steps(run_config(packed), tp, PROMPTS))


@pytest.mark.parametrize("tp", [2, 3])
def test_fp8_blocks_that_ranks_share(tp: int, tmp_path: Path) -> None:
    packed, _ = write_twins(tmp_path, SMALL_BLOCKS, lambda name, weight: encode(SMALL_BLOCKS, weight))
    assert_same_bits(whole_steps(run_config(packed), PROMPTS), divided_steps(run_config(packed), tp, PROMPTS))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_whose_rows_are_turned_as_they_are_read(kind: str, tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama", kind)
    assert_same_bits(whole_steps(run_config(file), PROMPTS), divided_steps(run_config(file), 3, PROMPTS))


@pytest.mark.parametrize(("family", "tp"), [("llama", 3), ("mixtral", 2)])
def test_gguf_whose_blocks_stay_packed(family: str, tp: int, tmp_path: Path) -> None:
    file, _ = write_blocks(tmp_path, family)
    assert_same_bits(whole_steps(run_config(file), PROMPTS), divided_steps(run_config(file), tp, PROMPTS))
