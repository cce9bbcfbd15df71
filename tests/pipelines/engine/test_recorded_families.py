"""Every family's steps are recorded, and a replayed step has the bits of a computed one."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3ForCausalLM

from conf.decoding import DecodeConfig
from kernels import build
from pipelines.engine import Engine, executor, recorded_steps
from pipelines.engine.recorded_steps import RecordedSteps
from tests.helpers.builders import engine_of, generate, write_llama
from tests.helpers.catalog import DEEPSEEK, GOLDEN_FAMILIES, OTHERS, prompts_for, write_family
from tests.helpers.deepseek import CASES
from tests.helpers.divided import LAYER_KINDS
from tests.helpers.oracle import write_model
from tests.helpers.tiers import tiers

pytestmark = pytest.mark.skipif(build.library() is None, reason="steps are recorded where the C++ kernels are")

GREEDY = DecodeConfig(max_new_tokens=6, logprobs=2, ignore_eos=True, prefix_cache=False)
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
SCALED: dict[str, dict[str, Any]] = {  # its rotary embedding depends on the text's length
    "llama, dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "phi3, longrope": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
}


def write(name: str, folder: Path) -> list[int]:
    """Write a model, and return a prompt for it."""
    if name not in SCALED:
        write_family(folder, name)
        return prompts_for(name)[0]
    if name.startswith("llama"):
        write_llama(folder, rope_parameters=SCALED[name], max_position_embeddings=16)
    else:
        longer = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
        write_model(folder, Phi3ForCausalLM, pad_token_id=0, eos_token_id=1, rope_parameters=SCALED[name], **longer)
    return list(range(3, 17))  # it grows past the original length


def answers(engine: Engine, prompt: list[int]) -> list[Any]:
    """Prompts of one shape are repeated, so that their steps are replayed, too."""
    turns = [generate(engine, [prompt, prompt[:1] + prompt[2:]], GREEDY) for _ in range(4)]
    return [(o.completions[0].token_ids, o.completions[0].logprobs) for outputs in turns for o in outputs]


QUICK, LONG = [*LAYER_KINDS.values(), *SCALED], [*GOLDEN_FAMILIES, *OTHERS, *DEEPSEEK]


@pytest.mark.parametrize("name", tiers(dict.fromkeys([*LONG, *CASES, *SCALED]), quick=QUICK, long=LONG))
def test_steps_are_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "PROMPTS_BEFORE_RECORDING", 1)
    prompt = write(name, tmp_path)
    engine = engine_of(tmp_path, allow_pickle=True)
    actual = answers(engine, prompt)
    for steps in (engine.executor.decode_steps, engine.executor.prompt_steps):
        assert isinstance(steps, RecordedSteps)
        assert steps.can_record
        assert steps.shapes
    monkeypatch.setattr(recorded_steps, "capture", lambda compute: (None, compute()))
    assert actual == answers(engine_of(tmp_path, allow_pickle=True), prompt)
