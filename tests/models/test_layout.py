"""The readers of norms that each architecture's layers declare, compared with the actual readers in a step."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.linear import Linear
from models.layers.norm import AddRMSNorm, LayerNorm, RMSNorm
from tests.helpers.builders import all_logits, run_config, unpacked_engine
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, WHOLE_PROMPTS, link
from tests.helpers.deepseek import CASES, build


def readers_of(layer: nn.Module, compute: Any) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return, for each norm of a layer, the linear layers that are called with its output, and the declared layers."""
    made: dict[int, tuple[str, Tensor]] = {}  # the tensors stay alive, so that no other gets the same id
    seen: dict[str, set[str]] = {}
    declared: dict[str, set[str]] = {}
    names = {module: name for name, module in layer.named_modules()}

    def note(name: str, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        made[id(tensor)] = name, tensor
        if isinstance(inputs[-1], list | tuple) and inputs[-1]:
            declared[name] = {names[reader] for reader in inputs[-1]}

    def find(name: str, x: Tensor) -> None:
        if id(x) in made:
            seen.setdefault(made[id(x)][0], set()).add(name)

    hooks = []
    for module, name in names.items():
        if isinstance(module, Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, name=name: find(name, inputs[0])))
        elif isinstance(module, RMSNorm | AddRMSNorm | LayerNorm):
            hooks.append(module.register_forward_hook(lambda _, *call, name=name: note(name, *call)))
    compute()
    for hook in hooks:
        hook.remove()
    return seen, declared


def check_readers(folder: Path) -> None:
    engine = unpacked_engine(run_config(folder, allow_pickle=True), 3)
    model, prompt = engine.executor.model, list(range(2, 20))
    for layer in model.layers:
        seen, declared = readers_of(layer, lambda: all_logits(engine, prompt))
        if any("experts" in name for name, _ in layer.named_modules()):  # a mixture reads floats
            seen = {norm: names for norm, names in seen.items() if min(names).startswith(model.layout.attention)}
        assert declared == seen


# ChatGLM-6B, which accepts only some prompts, declares no norm: its residual stream is normed
@each("family", [family for family in GOLDEN_FAMILIES if family not in WHOLE_PROMPTS])
@torch.inference_mode()
def test_of_every_family(family: str, tmp_path: Path) -> None:
    check_readers(link(family, tmp_path))


@each("name", ["v2", "v3"])
@torch.inference_mode()
def test_of_deepseek(name: str, tmp_path: Path) -> None:
    version, config = CASES[name]
    build(version, **config).save_pretrained(tmp_path)
    check_readers(tmp_path)
