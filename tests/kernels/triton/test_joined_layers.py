"""Layers that share an input, in the GPU's form: as parts of one fused weight compared with each layer alone."""

import pytest
import torch

import kernels.linear
import quantization.linear
from conf.quantization import Activations
from kernels.linear.gpu_weight import of_floats, pack_fp4
from kernels.swiglu import swiglu
from models.layers.dense import DenseMethod
from models.layers.linear import Linear
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, assert_near, noise, tiers
from tests.helpers.triton_layers import (
    BLOCKS,
    FLOATS,
    FP4,
    SCHEMES,
    check_joined,
    each_alone,
    is_scheme,
    make_layers,
    merged,
)


@pytest.fixture(autouse=True)
def _weights_are_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.linear, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(quantization.linear, "pack_blocks", pack_fp4)
    monkeypatch.setattr(DenseMethod, "gpu_weight", property(lambda method: of_floats(method.weight.detach())))


@torch.inference_mode()
def test_gates_and_ups() -> None:
    layers, x = make_layers("int8", outputs=(64, 64)), noise(3, 256).to(DEVICE)
    expected = swiglu(*each_alone(x, layers))
    assert_near(merged(layers).swiglu(x, None), expected)


@pytest.mark.long
@tiers("kind, activations, rows", *SCHEMES, [1, 7], is_case=is_scheme)
@torch.inference_mode()
def test_joined_they_are_what_each_is_alone(kind: str, activations: Activations, rows: int) -> None:
    check_joined(make_layers(kind, activations), noise(rows, 256).to(DEVICE))


@each("rows", [1, 7])
@torch.inference_mode()
def test_so_are_floats_and_blocks(rows: int) -> None:
    check_joined(make_layers(FLOATS), noise(rows, 256).to(DEVICE))
    outputs = (128, 256, 70)  # blocks of 128 outputs do not cross weights, except the last
    check_joined(make_layers(BLOCKS, Activations.dynamic, outputs), noise(rows, 256).to(DEVICE))


@each("kind", [FLOATS, "int4 zero points", *FP4])
@torch.inference_mode()
def test_without_biases(kind: str) -> None:
    check_joined(make_layers(kind, has_bias=False), noise(3, 256).to(DEVICE))


@each("rows", [7, 8])  # from 8 rows on they are quantised
@torch.inference_mode()
def test_activations_auto_count_the_rows_of_all(rows: int) -> None:
    check_joined(make_layers("int8", Activations.auto), noise(rows, 256).to(DEVICE))


@torch.inference_mode()
def test_in_one_order_of_channels() -> None:
    layers = make_layers("int4 groups")
    for layer in layers:
        layer.method.permutation = torch.arange(256, device=DEVICE).flip(0)
    check_joined(layers, noise(3, 256).to(DEVICE))


def apart() -> dict[str, list[Linear]]:
    """Return layers that cannot be fused into one product."""
    int4, int8, permuted = make_layers("int4 groups"), make_layers("int8"), make_layers("int8")
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
