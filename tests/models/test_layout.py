"""What each architecture's layout says of its norms, against what reads their outputs in a step."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.linear import Linear
from models.layers.norm import AddRMSNorm, RMSNorm
from models.linear_layers import connect_norms
from tests.helpers.builders import all_logits, run_config, unpacked_engine
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, WHOLE_PROMPTS, link
from tests.helpers.deepseek import CASES, build


def readers_seen(layer: nn.Module, compute: Any) -> dict[str, set[str]]:
    """By each module of a layer, but linear ones, those linear layers that are called with its output."""
    made: dict[int, tuple[str, Tensor]] = {}  # the tensors stay alive, so that no other gets the number of one
    seen: dict[str, set[str]] = {}

    def note(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        made[id(tensor)] = name, tensor

    def find(name: str, x: Tensor) -> None:
        if id(x) in made:
            seen.setdefault(made[id(x)][0], set()).add(name)

    hooks = []
    for name, module in layer.named_modules():
        if isinstance(module, Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, name=name: find(name, inputs[0])))
        elif name:
            hooks.append(module.register_forward_hook(lambda _, inputs, output, name=name: note(name, output)))
    compute()
    for hook in hooks:
        hook.remove()
    return seen


def check_layout(folder: Path) -> None:
    engine = unpacked_engine(run_config(folder, allow_pickle=True), 3)
    model, prompt = engine.executor.model, list(range(2, 20))
    connect_norms(model)
    found = set()
    for layer in model.get_submodule(model.layout.layers).children():
        seen, modules = readers_seen(layer, lambda: all_logits(engine, prompt)), dict(layer.named_modules())
        for norm, readers in model.layout.norm_readers.items():
            if norm in modules and all(reader in modules for reader in readers):
                found.add(norm)
                assert seen[norm] == set(readers)
                own = modules[norm]
                if isinstance(own, RMSNorm | AddRMSNorm):
                    assert own.readers == [modules[reader] for reader in readers]
            elif isinstance(modules.get(norm), RMSNorm | AddRMSNorm):
                assert not modules[norm].readers
    mixtures = {"post_attention_layernorm"} if any("experts" in name for name, _ in model.named_modules()) else set()
    assert model.layout.norm_readers.keys() - found <= mixtures | {"self_attn.q_a_layernorm"}


# ChatGLM-6B, whose prompts cannot be any, names no norm: its residual stream is normed
@each("family", [family for family in GOLDEN_FAMILIES if family not in WHOLE_PROMPTS])
@torch.inference_mode()
def test_of_every_family(family: str, tmp_path: Path) -> None:
    check_layout(link(family, tmp_path))


@each("name", ["v2", "v3"])
@torch.inference_mode()
def test_of_deepseek(name: str, tmp_path: Path) -> None:
    version, config = CASES[name]
    build(version, **config).save_pretrained(tmp_path)
    check_layout(tmp_path)
