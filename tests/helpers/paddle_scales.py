"""Models quantised by PaddleNLP's PTQ, and the logits that they define."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.helpers.catalog import GOLDENS
from tests.helpers.paddle_files import Arrays, save_safetensors, write_paddle

FAMILY, HEADS, GROUPS = "llama3", 4, 2
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
PROMPT = load_file(GOLDENS / FAMILY / "golden.safetensors")["input_ids"][0].tolist()


def is_quantised(name: str) -> bool:
    # a layer that PTQ skipped
    return name.endswith("_proj.weight") and not name.startswith("llama.layers.1.mlp.down_proj")


def quantise(folder: Path, largest: float, quant_type: str, per_tensor: bool = False) -> Arrays:
    """Write PTQ's files: integers in float arrays, and thresholds. Returns the arrays."""
    settings = {"quant_type": quant_type, "smooth": True, "shift": False, "shift_smooth_all_linears": False}
    arrays, _ = write_paddle(folder, GOLDENS / FAMILY, quantization_config=settings)
    inputs, weights, cache = {}, {}, {}
    for name in filter(is_quantised, list(arrays)):
        module = name.removesuffix(".weight")
        threshold = np.abs(arrays[name]).max(None if per_tensor else 0)  # of [inputs, outputs]: one scale per output
        arrays[name] = np.round(arrays[name] / threshold * largest).astype(np.float32)
        weights[f"{module}.weight_quanter"] = threshold.tolist()
        if module.rpartition(".")[2] not in SHARED:
            inputs[f"{module}.activation_quanter"] = 3.0 + len(inputs) / 8
    for layer in range(2):
        for cache_name in ("cachek", "cachev"):
            thresholds = [2.0 + layer + head / 4 for head in range(HEADS)]
            cache[f"llama.layers.{layer}.self_attn.{cache_name}_matmul.activation_quanter"] = thresholds
    (folder / "act_scales.json").write_text(json.dumps(inputs))
    (folder / "weight_scales.json").write_text(json.dumps(weights))
    if "c8" in quant_type:
        (folder / "cachekv_scales.json").write_text(json.dumps(cache))
    save_safetensors(folder / "model.safetensors", arrays)
    return arrays


def thresholds(folder: Path, file: str, module: str, end: str) -> Any:
    return json.loads((folder / file).read_text())[f"{module}.{end}"]


def expected_logits(
    folder: Path, arrays: Arrays, factors: Arrays | None = None, floats: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return logits of transformers' Llama whose layers compute PaddleNLP's a8w8 with its thresholds, in float64.

    factors: by PaddleNLP's module name, multiplied with the inputs before they are quantised. floats: weights that
    differ from the golden's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((GOLDENS / FAMILY / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**config)).double().eval()
    state = load_file(GOLDENS / FAMILY / "model.safetensors") | (floats or {})
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()}, strict=False)
    for name in filter(is_quantised, arrays):
        module = name.removesuffix(".weight")
        parent, _, child = module.rpartition(".")
        t_a = thresholds(folder, "act_scales.json", f"{parent}.{SHARED.get(child, child)}", "activation_quanter")
        t_w = torch.tensor(thresholds(folder, "weight_scales.json", module, "weight_quanter"), dtype=torch.float64)
        codes = torch.from_numpy(arrays[name]).double()

        def compute(x: torch.Tensor, codes: Any = codes, t_a: float = t_a, t_w: Any = t_w) -> torch.Tensor:
            rounded = (127 * x / t_a).round().clamp(-127, 127)
            return rounded @ codes * (t_w * t_a / (127 * 127))

        model.get_submodule(module.replace("llama.", "model.", 1)).forward = compute
    for module, of_inputs in (factors or {}).items():
        layer = model.get_submodule(module.replace("llama.", "model.", 1))
        layer.register_forward_pre_hook(lambda _, args, by=of_inputs: (args[0] * torch.from_numpy(by),))
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]
