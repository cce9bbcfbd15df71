"""The linear layers of a model: their weights in the checkpoint, their linear methods, and the fused computations."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from kernels import build
from kernels.linear.float_weight import INPUTS_OF_STEP
from models.causal_lm import CausalLM
from models.layers.dense import DenseMethod, PackedDenseMethod
from models.layers.linear import Linear, tied_embedding
from models.layers.matrix_layer import MatrixLayer
from models.layers.module import Module
from models.layers.moe import Experts

log = logging.getLogger(__name__)

T = TypeVar("T", bound=nn.Module)


@dataclass(frozen=True)
class LinearSpec:
    """The properties of a linear layer that checkpoint readers and writers need."""

    name: str
    shape: tuple[int, int]
    """[O, I]"""
    is_transposed: bool
    """Whether a float checkpoint holds the weight as [I, O]."""
    has_bias: bool


def linear_specs(model: nn.Module, quantizable: bool = True) -> dict[str, LinearSpec]:
    """Return, by name, the linear layers that may be quantised. `quantizable` false: the layers that stay floats."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))
    return {
        name: LinearSpec(name, layer.shape, layer.is_transposed, layer.bias is not None)
        for name, layer in layers
        if layer.is_quantizable is quantizable
    }


def linear_layer(model: nn.Module, name: str) -> Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    return layer


def matrix_layers(model: nn.Module) -> dict[str, MatrixLayer]:
    """Return, by name, the layers that hold a matrix. A tied head holds none."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, MatrixLayer))
    return {name: layer for name, layer in layers if tied_embedding(layer) is None}


def checkpoint_parts(model: nn.Module) -> dict[str, tuple[MatrixLayer, str]]:
    """Map the names of checkpoint tensors that matrix layers load to the layer and the tensor's name within it."""
    return {
        f"{name}.{part}": (layer, part)
        for name, layer in matrix_layers(model).items()
        for part in layer.method.tensors()
    }


def other_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not held by a matrix layer's method."""
    method_parameters = {f"{name}.{part}" for name, layer in matrix_layers(model).items() for part in layer.held}
    return {name: parameter for name, parameter in model.named_parameters() if name not in method_parameters}


def packed_method(layer: Linear, dtype: torch.dtype, device: torch.device) -> PackedDenseMethod | None:
    """Return the method with which the CPU kernels multiply a float layer fastest. None: no such method exists."""
    method = layer.method
    if device.type != "cpu" or dtype not in INPUTS_OF_STEP or build.library() is None or not layer.is_packable:
        return None
    return PackedDenseMethod(method.stored) if isinstance(method, DenseMethod) else None


def pack_layers(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Make the float layers of a model on the meta device pack their weights for the CPU kernels when they are loaded.

    Does nothing if the kernels are not available.
    """
    for layer in _modules(model, Linear):
        if (method := packed_method(layer, dtype, device)) is not None:
            layer.method = method


def fuse_layers(model: CausalLM, device: torch.device) -> None:
    """Prepare the fused computations of experts and of layers with a common input, after all weights are loaded."""
    merge_experts(model, device)
    merge_layers(model)


def merge_layers(model: nn.Module) -> None:
    """Merge all layers that share their input, except merged experts, and prepare the per-head products.

    At most one layer's weights are duplicated at a time.
    """
    in_mixtures = {module for experts in _modules(model, Experts) if experts.is_merged for module in experts.modules()}
    for module in _modules(model, Module):
        if module not in in_mixtures:
            module.fuse()


def merge_experts(model: nn.Module, device: torch.device) -> None:
    """Merge the experts of all mixtures. Logs a warning if experts cannot be merged on a GPU."""
    mixtures = list(_modules(model, Experts))
    for mixture in mixtures:
        mixture.merge()
    apart = sum(not mixture.is_merged for mixture in mixtures)
    if apart and device.type == "cuda":
        log.warning(
            "the experts of %d layers are computed one by one, which no CUDA graph can hold: no kernel takes "
            "several forms of weights together, permuted channels, or gates and ups whose activations' scales differ",
            apart,
        )


def _modules(model: nn.Module, kind: type[T]) -> Iterator[T]:
    return (module for module in model.modules() if isinstance(module, kind))
