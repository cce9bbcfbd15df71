"""Experts in the GPU's form: together compared with one by one, in whole models, and in steps that a graph can
capture."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import kernels.linear
import quantization.linear
from conf.quantization import Activations
from kernels.linear.gpu_weight import of_floats, pack_fp4
from kernels.moe import route
from models.layers.dense import DenseMethod
from models.layers.mlp import MLP
from models.layers.moe import Experts
from models.linear_layers import merge_experts
from quantization.layouts.base import StoredWeight
from quantization.linear import method_of
from quantization.scheme import LinearScheme
from quantization.weight_format import quantize
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, assert_near, covering, noise
from tests.helpers.triton_layers import FP4, SCHEMES, WEIGHTS, is_scheme

HIDDEN, CHANNELS = 256, 128
NAMES = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _weights_are_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.linear, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(quantization.linear, "pack_blocks", pack_fp4)


def make_experts(scheme: LinearScheme | None, count: int = 3, dtype: torch.dtype = torch.float32) -> Experts:
    """Return unquantised experts if `scheme` is None."""
    experts = Experts((MLP(HIDDEN, CHANNELS) for _ in range(count)), 2).to(DEVICE, dtype)
    for number, (expert, name) in enumerate((expert, name) for expert in experts for name in NAMES):
        weight = noise(*getattr(expert, name).weight.shape, seed=number) / 16
        if scheme is None:
            getattr(expert, name).weight.data.copy_(weight)
            continue
        method = method_of(scheme, None, tuple(weight.shape))  # type: ignore[arg-type]
        scale = torch.tensor(0.02 + 0.01 * (number // 3)) if scheme.activations is Activations.static else None
        method.hold(StoredWeight(quantize(weight, scheme.weights), scale), torch.device(DEVICE))
        getattr(expert, name).method = method
    return experts


def inputs(tokens: int, count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    weights, chosen = route(noise(tokens, count, seed=1), 2, True)
    return noise(tokens, HIDDEN).to(DEVICE), weights.to(DEVICE), chosen.to(DEVICE)


def own_forwards(experts: Experts) -> list[nn.Module]:
    """The experts that compute by themselves are added to it."""
    called: list[nn.Module] = []
    for expert in experts:
        expert.register_forward_pre_hook(lambda module, inputs: called.append(module))
    return called


CASES = covering((*SCHEMES, [1, 4]), 2, is_scheme) + list(itertools.product(FP4, [Activations.none], [1, 4]))


@pytest.mark.long
@each("weights, activations, tokens", CASES, quick=CASES[1:3])
@torch.inference_mode()
def test_together_they_are_what_each_is_alone(weights: str, activations: Activations, tokens: int) -> None:
    experts = make_experts(LinearScheme((WEIGHTS | FP4)[weights], activations))
    one_by_one = experts(*inputs(tokens))
    num_bytes = sum(parameter.nbytes for parameter in experts.parameters())
    experts.merge()
    called = own_forwards(experts)
    # a code between two values may be rounded to either: silu is not rounded before its product here
    tolerance = 1e-5 if activations is Activations.none else 1e-2
    assert_near(experts(*inputs(tokens)), one_by_one, tolerance)
    assert called == []
    assert sum(parameter.nbytes for parameter in experts.parameters()) == num_bytes
    # each layer has become a view of the stacked weight
    held = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    assert len(held) == 2 * len(list(experts[0].gate_proj.parameters()))


@torch.inference_mode()
def test_floats_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseMethod, "gpu_weight", property(lambda method: of_floats(method.weight.detach())))
    experts = make_experts(None)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    one_by_one = experts(*inputs(4))
    experts.merge()
    called = own_forwards(experts)
    assert_near(experts(*inputs(4)), one_by_one)
    assert called == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in experts.state_dict().items())


@torch.inference_mode()
def test_activations_auto_count_the_rows_of_all_experts() -> None:
    """From 8 rows per expert on they are quantised: 14 pairs for 2 experts are fewer, 16 are not."""
    auto, none, dynamic = (
        make_experts(LinearScheme(WEIGHTS["int8"], activations), 2)
        for activations in (Activations.auto, Activations.none, Activations.dynamic)
    )
    for experts in (auto, none, dynamic):
        experts.merge()
    assert torch.equal(auto(*inputs(7, 2)), none(*inputs(7, 2)))
    assert torch.equal(auto(*inputs(8, 2)), dynamic(*inputs(8, 2)))


@pytest.mark.long
@torch.inference_mode()
def test_experts_that_no_kernel_stacks_run_one_by_one_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    static = make_experts(LinearScheme(WEIGHTS["int8"], Activations.static))
    static[1].up_proj.method.input_scale += 0.01
    mixed, other = (make_experts(LinearScheme(WEIGHTS[weights])) for weights in ("int4", "int8"))
    mixed[2].up_proj.method = other[2].up_proj.method
    permuted = make_experts(LinearScheme(WEIGHTS["int4 groups"]))
    permuted[1].gate_proj.method.permutation = torch.arange(HIDDEN).flip(0)
    in_one_order = make_experts(LinearScheme(WEIGHTS["int4 groups"]))
    for expert, name in itertools.product(in_one_order, NAMES):
        method = getattr(expert, name).method
        method.permutation = torch.arange(HIDDEN if name != "down_proj" else CHANNELS).flip(0)
    model = nn.ModuleList([static, mixed, permuted, in_one_order])
    merge_experts(model, torch.device("cuda"))  # type: ignore[arg-type]
    assert "the experts of 4 layers are computed one by one, which no CUDA graph can hold" in caplog.text
    for experts in (static, mixed, permuted, in_one_order):
        assert not experts.is_merged
        called = own_forwards(experts)
        experts(*inputs(1))
        assert called
