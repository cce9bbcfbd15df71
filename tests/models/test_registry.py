"""The registry names modules that are imported when a checkpoint needs them: each name must exist."""

from models.causal_lm import CausalLM
from models.registry import ARCHITECTURES, CHATGLM2


def test_every_name_exists() -> None:
    for architecture in (*ARCHITECTURES.values(), CHATGLM2):
        assert callable(architecture.read_config), architecture
        assert issubclass(architecture.model_class, CausalLM), architecture
