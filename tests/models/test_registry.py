"""The registry names modules that are imported when a checkpoint needs them: each name must exist."""

import pytest

from models.causal_lm import CausalLM
from models.registry import ARCHITECTURES, CHATGLM2, Architecture


@pytest.mark.parametrize(
    "architecture", [*ARCHITECTURES.values(), CHATGLM2], ids=lambda architecture: architecture.model
)
def test_every_name_exists(architecture: Architecture) -> None:
    assert callable(architecture.read_config)
    assert issubclass(architecture.model_class, CausalLM)
