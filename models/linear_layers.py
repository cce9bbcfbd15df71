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
from models.layers.dense import DenseMethod, PackedDenseMethod, StoredFloats, TiedMethod
from models.layers.linear import Linear, MergedLinear
from models.layers.moe import Experts
from models.layers.norm import AddRMSNorm, LayerNorm, RMSNorm
from models.layers.per_head import PerHead

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


def checkpoint_parts(model: CausalLM) -> dict[str, tuple[Linear, str]]:
    """Map the names of checkpoint tensors that linear layers load to the layer and the tensor's name within it."""
    return {
        f"{model.layout.embedding if layer.is_tied else name}.{own}": (layer, own)
        for name, layer in model.named_modules()
        if isinstance(layer, Linear)
        for own in layer.method.tensors()
    }


def other_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not held by a linear layer's method."""
    held = {f"{name}.{own}" for name, layer in model.named_modules() if isinstance(layer, Linear) for own in layer.held}
    return {name: parameter for name, parameter in model.named_parameters() if name not in held}


def packed_method(layer: Linear, dtype: torch.dtype, device: torch.device) -> PackedDenseMethod | None:
    """Return the method with which the CPU kernels multiply a float layer fastest. None: no such method exists."""
    method = layer.method
    if device.type != "cpu" or dtype not in INPUTS_OF_STEP or build.library() is None or not layer.is_packable:
        return None
    if isinstance(method, TiedMethod):
        return PackedDenseMethod(StoredFloats(layer.shape))
    return PackedDenseMethod(method.stored) if isinstance(method, DenseMethod) else None


def pack_layers(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Make the float layers of a model on the meta device pack their weights for the CPU kernels when they are loaded.

    Does nothing if the kernels are not available.
    """
    for layer in _modules(model, Linear):
        if (method := packed_method(layer, dtype, device)) is not None:
            layer.method = method


def fuse_layers(model: CausalLM, device: torch.device) -> None:
    """Prepare the fused computations of experts, of layers with a common input, and of norms with their readers.

    Call it after all weights are loaded.
    """
    merge_experts(model, device)
    merge_layers(model)
    connect_norms(model)


def merge_layers(model: nn.Module) -> None:
    """Merge all layers that share their input, except merged experts, and prepare the per-head products.

    At most one layer's weights are duplicated at a time.
    """
    in_mixtures = {module for experts in _modules(model, Experts) if experts.is_merged for module in experts.modules()}
    for layers in _modules(model, MergedLinear):
        if layers not in in_mixtures:
            layers.merge()
            torch.cuda.empty_cache()  # else small weights fragment the freed memory
    for product in _modules(model, PerHead):
        product.merge()


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


def connect_norms(model: CausalLM) -> None:
    """Set the readers of each norm from the model's layout.

    A norm keeps no readers if one of the named layers is missing.
    """
    for layer in model.get_submodule(model.layout.layers).children():
        modules = dict(layer.named_modules())
        for name, readers in model.layout.norm_readers.items():
            norm, found = modules.get(name), [modules.get(reader) for reader in readers]
            if isinstance(norm, RMSNorm | AddRMSNorm | LayerNorm) and None not in found:
                norm.readers = [reader for reader in found if isinstance(reader, Linear)]


def _modules(model: nn.Module, kind: type[T]) -> Iterator[T]:
    return (module for module in model.modules() if isinstance(module, kind))
