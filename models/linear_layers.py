"""A model's linear layers: which of them may be held in another form, and putting such in their places."""

import torch

from kernels import build
from models.causal_lm import CausalLM
from models.layers.dense import DTYPES, DenseLinear
from models.layers.linear import Conv1D, Layer, Linear, PackedLinear, TiedHead


def linear_layers(model: CausalLM) -> dict[str, Layer]:
    """By name all linear layers but those that the model keeps (`FloatLinear` and other classes of their own)."""
    parameters = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    layers = {}
    for name, module in model.named_modules():
        if type(module) in (Linear, Conv1D, TiedHead):
            outputs, inputs = module.weight.shape[::-1] if type(module) is Conv1D else module.weight.shape
            source = parameters[id(module.weight)]
            has_bias = getattr(module, "bias", None) is not None
            layers[name] = Layer(name, source, (outputs, inputs), type(module) is Conv1D, has_bias)
    return layers


def replace_layer(model: CausalLM, layer: Layer, new: PackedLinear) -> None:
    parent, _, own = layer.name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)


def pack_layers(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Put in the places of the (meta) model's linear layers such that pack their weights when they come, if the kernels are there."""
    if device.type != "cpu" or dtype not in DTYPES or build.library() is None:
        return
    for layer in linear_layers(model).values():
        replace_layer(model, layer, DenseLinear(layer))
