"""An adapter, and the results of PEFT's merged model."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

PROMPT = list(range(3, 40))


def write_adapter(folder: Path, base: PreTrainedModel, **config: Any) -> Tensor:
    """Write a random adapter of the base. Return the logits [T, V] of PEFT's model with the saved adapter merged."""
    copy = type(base).from_pretrained(folder.parent / "base")
    model = get_peft_model(copy, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    fresh = type(base).from_pretrained(folder.parent / "base")
    merged = PeftModel.from_pretrained(fresh, folder).merge_and_unload().eval()
    with torch.inference_mode():
        return merged(torch.tensor([PROMPT])).logits[0]
