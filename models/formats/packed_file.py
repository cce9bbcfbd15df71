"""A loaded model in one file, in the kernels' layout. The next start maps the file instead of packing the checkpoint.

It is a safetensors file of all parameters and buffers. Their values are checked when the file is made. Values that
kernels use as indices are checked again at every start.
"""

from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.formats.safetensors_writer import save_tensors
from models.layers.linear_method import take
from models.linear_layers import matrix_layers, other_parameters
from models.weights import assign, parameter_dtype

IDENTITY = "identity"
REMEDY = "remove it, and it is made again"


class NotUsable(Exception):
    """A packed file cannot be used. The message is the reason."""


def save_packed(model: CausalLM, path: Path, identity: str) -> None:
    """Write the packed file. `identity`: a text for everything on which the values depend."""
    save_tensors(path, model.state_dict(), {IDENTITY: identity})


def read_packed(path: Path, identity: str) -> dict[str, Tensor]:
    """Return the tensors as copy-on-write views of the file, whose pages are loaded on first access.

    Raises NotUsable if the file is missing, is damaged or has another identity.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(IDENTITY) != identity:
                raise NotUsable("was written for other files or settings, or by another version")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise NotUsable("does not exist yet") from error
    except (SafetensorError, OSError) as error:
        raise NotUsable(f"is damaged ({error})") from error


def is_packed(path: Path, identity: str) -> bool:
    try:
        return bool(read_packed(path, identity))
    except NotUsable:
        return False


def restore(model: CausalLM, path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Assign the tensors of `path` to a model on the meta device.

    Raises UserError if they do not fit its shapes and dtype.
    """
    module_tensors: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)  # by module
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        module_tensors[module][leaf] = tensor
    layers = matrix_layers(model)
    try:
        for name, parameter in other_parameters(model).items():
            module, _, leaf = name.rpartition(".")
            if module not in layers:
                assign(
                    model,
                    name,
                    take(module_tensors[module], leaf, tuple(parameter.shape), parameter_dtype(model, name, dtype)),
                )
        for name, layer in layers.items():
            layer.restore(module_tensors[name], dtype)
    except (KeyError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path} does not hold this model: {name}: {reason}; {REMEDY}") from error
    if unused := [f"{module}.{leaf}" for module, leaves in module_tensors.items() for leaf in leaves]:
        raise UserError(f"{path} does not hold this model: {unused[0]} belongs to no layer; {REMEDY}")
