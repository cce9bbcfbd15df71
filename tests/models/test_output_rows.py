"""The last layer omits rows without outputs, which does not change the output rows."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from kernels import build
from pipelines.engine.batch import prompt_batch
from pipelines.engine.operations import Hidden
from tests.helpers.builders import engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, QUICK, link


@each("family", GOLDEN_FAMILIES, quick=QUICK)
@torch.inference_mode()
def test_output_rows_match_all_rows(family: str, tmp_path: Path) -> None:
    engine = engine_of(link(family, tmp_path), allow_pickle=True)
    prompt = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    prompts = [prompt, prompt[:1] + prompt[2:]] if len(prompt) > 8 else [prompt, prompt]
    blocks = engine.scheduler.block_manager
    tables = [blocks.allocate(blocks.num_blocks_for(len(ids))) for ids in prompts]
    features = [engine.executor.prompt_features(ids) for ids in prompts]

    def hidden(*num_outputs: int) -> torch.Tensor:
        batch = prompt_batch(prompts, [*num_outputs], tables, features, blocks.block_size)
        return engine.executor.run(Hidden(batch))

    first, second = map(len, prompts)
    of_first, of_second = hidden(first, second).split((first, second))
    # torch's products of fewer rows may sum in another order; ours do not
    tolerance = 0 if build.library() else 1e-5
    for wanted in (1, 1), (0, 3), (2, 0), (first, 1), (0, 0):
        expected = torch.cat((of_first[first - wanted[0] :], of_second[second - wanted[1] :]))
        torch.testing.assert_close(hidden(*wanted), expected, atol=tolerance, rtol=0)
