"""Layers that share an input, in the GPU's form: as pieces of one weight against each alone."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import kernels.linear
from conf.quantization import Activations
from kernels.linear.gpu_weight import of_floats
from kernels.swiglu import swiglu
from models.layers.dense import DenseMethod
from models.layers.linear import Linear, MergedLinear
from quantization.layouts.base import StoredWeight
from quantization.scheme import LinearScheme
from quantization.weight_format import quantize
from tests.helpers.triton_cases import DEVICE, assert_near, noise
from tests.kernels.triton.test_quantised_layers import CASES, WEIGHTS, make_layer

OUTPUTS = (128, 256, 70)  # blocks of 128 outputs end with a weight's, but for the last
FLOATS, BLOCKS = "floats", "fp8 blocks"


@pytest.fixture(autouse=True)
def _weights_are_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.linear, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(DenseMethod, "gpu_weight", property(lambda method: of_floats(method.weight.detach())))


def make_layers(
    kind: str,
    activations: Activations = Activations.none,
    outputs: Sequence[int] = OUTPUTS,
    inputs: int = 256,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
) -> list[Linear]:
    """`kind`: one of WEIGHTS, FLOATS, or BLOCKS of 128 outputs and inputs that share a scale."""
    layers: list[Linear] = []
    for seed, size in enumerate(outputs):
        weight, bias = noise(size, inputs, seed=seed) / 16, noise(size, seed=seed) if has_bias else None
        if kind == FLOATS:
            layer = Linear(inputs, size, has_bias)
            layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
            layers.append(layer.to(DEVICE, dtype).requires_grad_(False))
            continue
        scheme = LinearScheme(WEIGHTS["fp8 groups" if kind == BLOCKS else kind], activations)
        quantized = quantize(weight, scheme.weights)
        if kind == BLOCKS:
            scales = quantized.scales[::128].repeat_interleave(128, 0)[:size]
            quantized = replace(quantized, scales=scales)
        scale = torch.tensor(0.03) if activations is Activations.static else None
        layers.append(make_layer(StoredWeight(quantized, scale), scheme, bias, dtype, DEVICE))
    return layers


def each_alone(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    return [layer(x, None) for layer in layers]


def merged(layers: Sequence[Linear]) -> MergedLinear:
    together = MergedLinear(*layers)
    together.merge()
    return together


def check_joined(layers: list[Linear], x: Tensor) -> None:
    """Against what they gave before, whose own kernels are proved elsewhere; what differs is the order of sums."""
    alone = each_alone(x, layers)
    names = [{name: (part.shape, part.nbytes) for name, part in layer.named_parameters()} for layer in layers]
    together = merged(layers)
    assert together.is_merged
    assert names == [{name: (part.shape, part.nbytes) for name, part in layer.named_parameters()} for layer in layers]
    # each layer has become a piece of what all are read from
    held = {part.untyped_storage().data_ptr() for layer in layers for part in layer.parameters()}
    assert len(held) == len(list(layers[0].parameters()))
    for result, expected in zip(each_alone(x, layers), alone, strict=True):
        assert_near(result, expected)
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: pytest.fail("called alone"))
    method = type(layers[0].method)
    with patch.object(method, "apply", autospec=True, side_effect=method.apply) as apply:
        results = together(x, None)
    assert apply.call_count == 1
    for result, expected in zip(results, alone, strict=True):
        assert_near(result, expected)


@torch.inference_mode()
def test_gates_and_ups() -> None:
    layers, x = make_layers("int8", outputs=(64, 64)), noise(3, 256).to(DEVICE)
    expected = swiglu(*each_alone(x, layers))
    assert_near(merged(layers).swiglu(x, None), expected)


@pytest.mark.parametrize(("kind", "activations"), [(FLOATS, Activations.none), (BLOCKS, Activations.dynamic), *CASES])
@torch.inference_mode()
def test_joined_they_are_what_each_is_alone(kind: str, activations: Activations) -> None:
    for rows in (1, 7):
        check_joined(make_layers(kind, activations), noise(rows, 256).to(DEVICE))


@pytest.mark.parametrize("kind", [FLOATS, "int4 zero points"])
@torch.inference_mode()
def test_without_biases(kind: str) -> None:
    check_joined(make_layers(kind, has_bias=False), noise(3, 256).to(DEVICE))


@torch.inference_mode()
def test_activations_auto_count_the_rows_of_all() -> None:
    for rows in (7, 8):  # from 8 on they are quantised
        check_joined(make_layers("int8", Activations.auto), noise(rows, 256).to(DEVICE))


@torch.inference_mode()
def test_in_one_order_of_channels() -> None:
    layers = make_layers("int4 groups")
    for layer in layers:
        layer.method.permutation = torch.arange(256, device=DEVICE).flip(0)
    check_joined(layers, noise(3, 256).to(DEVICE))


def apart() -> dict[str, list[Linear]]:
    """Layers of which no kernel makes one product."""
    int4, int8 = make_layers("int4 groups"), make_layers("int8")
    permuted = make_layers("int8")
    permuted[1].method.permutation = torch.arange(256, device=DEVICE).flip(0)  # type: ignore[attr-defined]
    static = make_layers("int8", Activations.static)
    static[1].method.input_scale = torch.tensor(0.04, device=DEVICE)
    return {
        "none": [],
        "one": [int8[2]],
        "two formats": [int4[0], int8[1]],
        "two schemes": [int8[0], make_layers("int8", Activations.dynamic)[1]],
        "floats beside codes": [make_layers(FLOATS)[0], int8[1]],
        "a bias beside none": [int8[0], make_layers("int8", has_bias=False)[1]],
        "permuted channels": permuted,
        "two scales of the input": static,
        "blocks that end within a weight": make_layers(BLOCKS, outputs=(70, 128)),
        "two widths of floats": [make_layers(FLOATS)[0], make_layers(FLOATS, dtype=torch.bfloat16)[1]],
    }


@torch.inference_mode()
def test_layers_of_several_kinds_stay_apart() -> None:
    for name, layers in apart().items():
        held = [part.data_ptr() for layer in layers for part in layer.parameters()]
        assert not merged(layers).is_merged, name
        assert [part.data_ptr() for layer in layers for part in layer.parameters()] == held, name
    x, layers = noise(3, 256).to(DEVICE), apart()["two formats"]
    for result, expected in zip(merged(layers)(x, None), each_alone(x, layers), strict=True):
        assert torch.equal(result, expected)


def test_on_a_cpu_nothing_lies_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for layers in (make_layers(FLOATS), make_layers("int8"), make_layers("fp8")):
        held = [part.data_ptr() for layer in layers for part in layer.parameters()]
        merged(layers)
        assert ([part.data_ptr() for layer in layers for part in layer.parameters()] == held) == (DEVICE == "cpu")
