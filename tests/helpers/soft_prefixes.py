"""Soft prefixes in the layouts of PEFT and PaddleNLP, and models that compute with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache

from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DeviceConfig, DeviceType
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import run_config

PEFT_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "prefix_tuning": (PrefixTuningConfig, {}),
    "prefix_tuning, projected": (PrefixTuningConfig, {"prefix_projection": True, "encoder_hidden_size": 24}),
    "prompt_tuning": (PromptTuningConfig, {}),
    "p_tuning, MLP": (PromptEncoderConfig, {"encoder_hidden_size": 24}),
    "p_tuning, LSTM": (PromptEncoderConfig, {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 24}),
}


def write_peft(folder: Path, base: Any, kind: str, num_tokens: int, seed: int = 0) -> Any:
    """Write a random adapter and return PEFT's model with it."""
    config_class, settings = PEFT_CONFIGS[kind]
    torch.manual_seed(seed)
    config = config_class(task_type="CAUSAL_LM", num_virtual_tokens=num_tokens, **settings)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_(0.0, 0.5)
    model.eval()
    model.save_pretrained(folder)
    return model


def peft_logits(model: Any, prompt: list[int]) -> Tensor:
    """Return PEFT's logits [T, V] of the prompt's tokens."""
    assert isinstance(model, PeftModel)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return logits[-len(prompt) :]


def write_paddle(path: Path, num_tokens: int, num_layers: int = 2, heads: int = 2, channels: int = 16) -> Tensor:
    """Write random keys and values as PaddleNLP does: [L, 2, G, P, D]. Return them."""
    values = np.random.default_rng(0).normal(size=(num_layers, 2, heads, num_tokens, channels)).astype(np.float32)
    np.save(path, values)
    return torch.from_numpy(values)


def paddle_logits(model: Any, values: Tensor, prompt: list[int]) -> Tensor:
    """Return transformers' logits [T, V] in float64 after keys and values [L, 2, G, P, D], with positions from 0."""
    model = model.double()
    past = DynamicCache(config=model.config)
    for number, (keys, own_values) in enumerate(values.double()):
        past.update(keys[None], own_values[None], number)
    ids, num_tokens = torch.tensor([prompt]), values.shape[3]
    with torch.no_grad():
        logits: Tensor = model(
            ids,
            past_key_values=past,
            position_ids=torch.arange(len(prompt))[None],
            attention_mask=torch.ones(1, num_tokens + len(prompt), dtype=torch.long),
        ).logits[0]
    return logits


def engine_with(
    folder: Path, prefixes: dict[str, Path], kv_cache: str = "none", batch_size: int = 3, **device: Any
) -> Engine:
    """Return a float32 engine on the CPU. `device`: fields of DeviceConfig."""
    run = run_config(folder, prefixes={name: str(path) for name, path in prefixes.items()})
    config = DeviceConfig(DeviceType.cpu, **device)
    return load_engine(replace(run, device=config, quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache])), batch_size)
