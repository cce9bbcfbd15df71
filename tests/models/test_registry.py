"""The registry names modules that are imported when a checkpoint needs them: each name must exist."""

from models.causal_lm import CausalLM
from models.registry import ARCHITECTURES, CHATGLM2, Architecture
from tests.helpers.cases import each


@each("architecture", [*ARCHITECTURES.values(), CHATGLM2])
def test_every_name_exists(architecture: Architecture) -> None:
    assert callable(architecture.read_config)
    assert issubclass(architecture.model_class, CausalLM)
