"""A model's linear layers: which of them may be held in another form, and putting such in their places."""

import logging

import torch
from torch import Tensor, nn

from kernels import build
from kernels.linear.float_weight import INPUTS_OF_STEP
from models.causal_lm import CausalLM
from models.layers.dense import DenseLinear
from models.layers.linear import Conv1D, FloatLinear, Layer, Linear, SharesInput, TiedHead, join
from models.layers.moe import Experts

log = logging.getLogger(__name__)

PACKABLE = (Linear, Conv1D, TiedHead)  # layers of other classes the model wants to keep as they are


def linear_layers(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, Layer]:
    """By name the layers of exactly these classes; without any those whose weights may be held in another form."""
    parameters = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    layers = {}
    for name, module in model.named_modules():
        if type(module) in (kinds or PACKABLE):
            weight: Tensor = module.weight  # type: ignore[assignment]
            is_transposed = type(module) is Conv1D
            outputs, inputs = weight.shape[::-1] if is_transposed else weight.shape
            has_bias = getattr(module, "bias", None) is not None
            layers[name] = Layer(name, parameters[id(weight)], (outputs, inputs), is_transposed, has_bias)
    return layers


def replace_layer(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)


def pack_layers(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Put in the places of the (meta) model's linear layers such that pack their weights when they come, if the kernels are there."""
    if device.type != "cpu" or dtype not in INPUTS_OF_STEP or build.library() is None:
        return
    for layer in linear_layers(model, *PACKABLE, FloatLinear).values():
        replace_layer(model, layer.name, DenseLinear(layer))


def bring_together(model: CausalLM, device: torch.device) -> None:
    """Prepare what the kernels compute together, experts and layers that share an input, once all weights are in their places."""
    prepare_experts(model, device)
    join_layers(model)


def join_layers(model: CausalLM) -> None:
    """Put the weights of layers that share an input into one (`join`), where they are in the GPU kernels' form.

    Which these are, a module says (`SharesInput`); not within mixtures, whose experts lie in one weight already. No more than one
    module's weights are there twice.
    """
    mixtures = [module for module in model.modules() if isinstance(module, Experts) and module.is_together]
    in_mixtures = {module for mixture in mixtures for module in mixture.modules()}
    for module in model.modules():
        if isinstance(module, SharesInput) and module not in in_mixtures:
            join(module.input_layers)
            torch.cuda.empty_cache()  # else a smaller weight takes a part of what these have left, and the rest serves no larger one


def prepare_experts(model: CausalLM, device: torch.device) -> None:
    """Mixtures compute their experts together where they can. On a GPU it is told where not."""
    mixtures = [module for module in model.modules() if isinstance(module, Experts)]
    for mixture in mixtures:
        mixture.prepare()
    apart = sum(not mixture.is_together for mixture in mixtures)
    if apart and device.type == "cuda":
        log.warning(
            "the experts of %d layers are computed one by one, which no CUDA graph can hold: no kernel takes "
            "several forms of weights together, permuted channels, or gates and ups whose activations' scales differ",
            apart,
        )
