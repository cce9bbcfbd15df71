"""Random adapters of small models, and PEFT's own results with them."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS = {"four": 4, "eight": 8, "sixteen": 16, "sixty_four": 64}


def write_adapter(folder: Path, base: Path, kind: type[PreTrainedModel], seed: int = 1, **config: Any) -> Path:
    """Write an adapter of random factors, so large that it changes tokens, for the model in `base`."""
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, **config}
    model = get_peft_model(kind.from_pretrained(base), LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def change_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """Give an adapter other settings, and tensors that are changed, added or (None) taken away."""
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    changed = load_file(weights) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, weights)


def peft_model(base: Path, kind: type[PreTrainedModel], folders: dict[str, Path]) -> PeftModel:
    """Return transformers' model with all adapters beside it, none merged."""
    first, *others = folders
    model = PeftModel.from_pretrained(kind.from_pretrained(base), folders[first], adapter_name=first).eval()
    for name in others:
        model.load_adapter(folders[name], adapter_name=name)
    return model


@torch.inference_mode()
def peft_logprobs(model: PeftModel, adapter: str | None, token_ids: list[int]) -> Tensor:
    """Return log probabilities [T, V], float32."""
    if adapter is None:
        with model.disable_adapter():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    model.set_adapter(adapter)
    return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
