"""Files of other tools in a model whose ranks are threads: the bits of one process."""

from pathlib import Path

import pytest

from tests.helpers.builders import run_config
from tests.helpers.cases import each
from tests.helpers.catalog import PROMPTS
from tests.helpers.divided import assert_same_bits, divided_steps, whole_steps
from tests.helpers.fp8_layouts import SMALL_BLOCKS, encode
from tests.helpers.gguf_twins import write_blocks, write_pair
from tests.helpers.packed_layouts import CASES, write_case, write_twins


@pytest.mark.long
@each("tp", [2, 3])
@each("case", CASES)
def test_packed_integers(case: str, tp: int, tmp_path: Path) -> None:
    """Also with permuted channels, zero points, and one group for all channels."""
    packed, _ = write_case(case, tmp_path)
    assert_same_bits(whole_steps(run_config(packed), PROMPTS), divided_steps(run_config(packed), tp, PROMPTS))


@each("tp", [2, 3])
def test_fp8_blocks_that_ranks_share(tp: int, tmp_path: Path) -> None:
    packed, _ = write_twins(tmp_path, SMALL_BLOCKS, lambda name, weight: encode(SMALL_BLOCKS, weight))
    assert_same_bits(whole_steps(run_config(packed), PROMPTS), divided_steps(run_config(packed), tp, PROMPTS))


@each("kind", ["Q8_0", "Q4_0"])
def test_gguf_whose_rows_are_turned_as_they_are_read(kind: str, tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama", kind)
    assert_same_bits(whole_steps(run_config(file), PROMPTS), divided_steps(run_config(file), 3, PROMPTS))


@each(("family", "tp"), [("llama", 3), ("mixtral", 2)])
def test_gguf_whose_blocks_stay_packed(family: str, tp: int, tmp_path: Path) -> None:
    file, _ = write_blocks(tmp_path, family)
    assert_same_bits(whole_steps(run_config(file), PROMPTS), divided_steps(run_config(file), tp, PROMPTS))
