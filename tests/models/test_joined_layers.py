"""Layers that share an input, fused into one weight, in whole models: a GPU's unquantised layers, on the CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kernels.linear.gpu_weight import GPUWeight, of_floats
from models.layers.dense import DenseMethod
from models.layers.linear import Linear, MergedLinear
from models.linear_layers import merge_layers
from pipelines.engine import Engine
from tests.helpers.builders import all_logits, run_config, unpacked_engine
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, QUICK, TOLERANCE, greedy, link
from tests.helpers.deepseek import CASES, build


def gpu_weight(method: DenseMethod) -> GPUWeight | None:
    return None if method.is_transposed else of_floats(method.weight.detach())


@pytest.fixture(autouse=True)
def _floats_are_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseMethod, "gpu_weight", property(gpu_weight))


def unpacked(folder: Path) -> Engine:
    return unpacked_engine(run_config(folder, allow_pickle=True), 3)


def merged_layers(model: nn.Module) -> list[MergedLinear]:
    return [part for module in model.modules() for part in vars(module).values() if isinstance(part, MergedLinear)]


def layers_by_input(engine: Engine, prompt: list[int]) -> list[list[Linear]]:
    """Return the layers that are called with the same tensor."""
    by_input: dict[int, list[Linear]] = {}
    inputs: list[Tensor] = []  # kept alive, so that no other tensor gets the same id

    def note(layer: nn.Module, args: tuple[Tensor, object]) -> None:
        inputs.append(args[0])
        by_input.setdefault(id(args[0]), []).append(layer)  # type: ignore[arg-type]

    layers = [
        module for module in engine.executor.model.modules() if isinstance(module, Linear) and module.is_quantizable
    ]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    all_logits(engine, prompt)
    for hook in hooks:
        hook.remove()
    return [layers for layers in by_input.values() if len(layers) > 1]


@pytest.mark.long
@each("family", GOLDEN_FAMILIES, quick=QUICK)
def test_every_family_joins_what_it_can(family: str, tmp_path: Path) -> None:
    """No two layers are called with the same input any more, and logits and tokens are the original code's."""
    golden = load_file(GOLDENS / family / "golden.safetensors")
    prompt, tokens = golden["input_ids"][0].tolist(), golden["greedy_ids"][0].tolist()
    engine = unpacked(link(family, tmp_path))
    model, shared = engine.executor.model, layers_by_input(engine, prompt)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_bytes = engine.executor.weight_bytes, engine.executor.step_weight_bytes(3)
    merge_layers(model)
    assert layers_by_input(engine, prompt) == []
    merged = [set(layers.layers) for layers in merged_layers(model) if layers.is_merged]
    assert all(set(layers) in merged for layers in shared)
    torch.testing.assert_close(all_logits(engine, prompt), golden["logits"][0], atol=TOLERANCE, rtol=0)
    assert greedy(engine, [prompt], len(tokens)) == [tokens]
    assert (engine.executor.weight_bytes, engine.executor.step_weight_bytes(3)) == num_bytes
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@each("name", ["v2", "v3"])
def test_queries_and_latents_of_deepseek(name: str, tmp_path: Path) -> None:
    version, config = CASES[name]
    build(version, **config).save_pretrained(tmp_path)
    engine, prompt = unpacked(tmp_path), list(range(2, 20))
    expected = all_logits(engine, prompt)  # transformers', as in tests/models/families/test_deepseek.py
    assert layers_by_input(engine, prompt)
    merge_layers(engine.executor.model)
    assert layers_by_input(engine, prompt) == []
    # float32 sums in another order; the logits are of order 1 to 10
    torch.testing.assert_close(all_logits(engine, prompt), expected, atol=1e-4, rtol=0)


def test_no_weight_is_there_twice(tmp_path: Path) -> None:
    model = unpacked(link("llama3", tmp_path)).executor.model
    merge_layers(model)
    merged = merged_layers(model)
    assert len(merged) == 2 * model.config.num_hidden_layers
    assert all(module.is_merged for module in merged)
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in model.parameters()}
    assert sum(storages.values()) == sum(part.nbytes for part in model.parameters())
