"""Published configs are read without a warning, and describe the same model as transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conf.errors import UserError
from models.formats import open_checkpoint
from models.registry import find_architecture
from quantization.layouts import read_quantization
from tests.helpers.cases import each
from tests.helpers.hub_configs import CONFIGS
from tests.helpers.published_models import write_config

NUM_LAYERS = 4  # a pattern of windows or of rotation, and dense layers before sparse ones
ITS_OWN_CODE = ("internlm2", "internlm3", "telechat")  # their classes are in the checkpoints
THEIRS = {"kimi_k2": "deepseek_v3", "minimax": "minimax_m2"}
"""transformers' name of the model, if it differs."""
SIZES = {"internlm2_5-7b-chat": 7.74, "internlm3-8b-instruct": 8.80}
"""In billions of parameters, as the hub states."""


def num_parameters(model: torch.nn.Module) -> int:
    """Routers' corrections are buffers in transformers."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in (*model.parameters(), *buffers))


def built(values: dict[str, Any], folder: Path) -> torch.nn.Module:
    config = open_checkpoint(write_config(folder, values), allow_pickle=False).config
    architecture = find_architecture(config)
    with torch.device("meta"):
        return architecture.build(architecture.read_config(config))


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the first layers."""
    num_layers = values["num_hidden_layers"]
    lists = {
        key: values_by_layer[:NUM_LAYERS]
        for key, values_by_layer in values.items()
        if isinstance(values_by_layer, list | str) and len(values_by_layer) == num_layers
    }
    if section := values.get("linear_attn_config"):  # numbers of layers, from 1 on
        numbers = {key: [n for n in section[key] if n <= NUM_LAYERS] for key in ("full_attn_layers", "kda_layers")}
        lists["linear_attn_config"] = section | numbers
    return values | lists | {"num_hidden_layers": NUM_LAYERS}


@each("name", CONFIGS)
def test_every_key_is_known(name: str, tmp_path: Path) -> None:
    config = open_checkpoint(write_config(tmp_path, CONFIGS[name]), allow_pickle=False).config
    find_architecture(config).read_config(config)
    read_quantization(config, [])
    assert config.unread() == []


@pytest.mark.long
@each("name", [name for name in CONFIGS if CONFIGS[name]["model_type"] not in ITS_OWN_CODE])
def test_has_transformers_parameters(name: str, tmp_path: Path) -> None:
    text = open_checkpoint(write_config(tmp_path, CONFIGS[name]), allow_pickle=False).config.values
    values = shortened({key: value for key, value in text.items() if key != "quantization_config"})
    theirs = {key: value for key, value in values.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(THEIRS.get(values["model_type"], values["model_type"]), **theirs)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    assert num_parameters(built(values, tmp_path / "ours")) == num_parameters(reference)


@each("name", SIZES)
def test_has_the_published_size(name: str, tmp_path: Path) -> None:
    assert num_parameters(built(CONFIGS[name], tmp_path)) / 1e9 == pytest.approx(SIZES[name], abs=0.005)


def test_another_minimax_is_refused(tmp_path: Path) -> None:
    """In the first files of MiniMax-M2 only the class name identifies the model."""
    values = CONFIGS["MiniMax-M2"] | {"architectures": ["MiniMaxForCausalLM"]}
    config = open_checkpoint(write_config(tmp_path, values), allow_pickle=False).config
    with pytest.raises(UserError, match="model_type='minimax' is not supported: only "):
        find_architecture(config)
