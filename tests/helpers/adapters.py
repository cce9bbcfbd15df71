"""Random adapters of small models, and PEFT's results with them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from pipelines.engine import Engine, Output
from pipelines.loading.load_engine import load_engine

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[7, 3, 90, 20], [5], [33, 41, 8, 5, 17, 60, 2, 9, 11], [7, 3, 90, 20, 44], [12, 13]]
GREEDY = DecodeConfig(max_new_tokens=6, ignore_eos=True, logprobs=3, prefix_cache=False)
RANKS = {"four": 4, "eight": 8, "sixteen": 16, "sixty_four": 64}


def write_adapter(folder: Path, base: Path, kind: type[PreTrainedModel], seed: int = 1, **config: Any) -> Path:
    """Write an adapter for the model in `base`. Its random factors are so large that it changes tokens."""
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, **config}
    model = get_peft_model(kind.from_pretrained(base), LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def load_with(run: RunConfig, adapters: Mapping[str, Path], batch_size: int = 5) -> Engine:
    """Load the run's model with adapters."""
    folders = {name: str(folder) for name, folder in adapters.items()}
    return load_engine(replace(run, model=replace(run.model, adapters=folders or None)), batch_size)


Rows: TypeAlias = list[tuple[list[int], str | None]]
"""Prompts and the names of their adapters."""


def outputs(engine: Engine, rows: Rows, decode: DecodeConfig = GREEDY) -> list[Output]:
    """Return the outputs of rows, in their order."""
    requests = [engine.request(i, prompt, decode, adapter=name) for i, (prompt, name) in enumerate(rows)]
    checked_requests = []
    for output in engine.generate(requests):
        engine.scheduler.check_integrity()
        assert output.error is None
        checked_requests.append(output)
    return sorted(checked_requests, key=lambda output: output.request_id)


def completions(results: list[Output]) -> list[Any]:
    return [output.completions for output in results]


def check_as_peft(peft: PeftModel, rows: Rows, results: list[Output]) -> None:
    """Compare greedy tokens with PEFT's, and their log probabilities within 1e-4, both in float32."""
    for (prompt, name), output in zip(rows, results, strict=True):
        (completion,) = output.completions
        expected = peft_logprobs(peft, name, prompt + completion.token_ids)[len(prompt) - 1 : -1]
        assert completion.token_ids == expected.argmax(-1).tolist()
        assert completion.logprobs is not None
        for step, row in zip(completion.logprobs, expected, strict=True):
            for token, logprob in step.logprobs.items():
                assert abs(logprob - row[token].item()) < 1e-4


def change_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """Change an adapter's settings, and change, add or (None) remove tensors."""
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensors:  # otherwise the file keeps its bytes
        changed = load_file(weights) | tensors
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, weights)


def peft_model(base: Path, kind: type[PreTrainedModel], folders: dict[str, Path]) -> PeftModel:
    """Return transformers' model with all adapters loaded and none merged."""
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
