"""Read from config.json which layers of a hybrid model are attention, and the taps of its convolutions."""

from typing import Any

from conf.errors import UserError
from models.config import ConfigReader

FULL, LINEAR = "full_attention", "linear_attention"
HUB_NAMES = {"mamba": LINEAR, "attention": FULL}
"""transformers' layer types by the names in the files of IBM and NVIDIA."""


def check_layer_types(types: Any, recurrent: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent. `recurrent`: the type of a recurrent layer.

    Raises UserError for a wrong number of types and for an unknown type.
    """
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(f"config.json: layer_types={types!r} is not a list of num_hidden_layers={num_layers} types")
    if unknown := [kind for kind in types if kind not in (recurrent, FULL)]:
        supported = f"{recurrent!r}, {FULL!r}"
        raise UserError(f"config.json: layer_types has {unknown[0]!r}, which is not supported: only {supported}")
    return tuple(kind == recurrent for kind in types)


def renamed_types(types: Any) -> Any:
    """Return a list of layer types with transformers' names, and anything else unchanged."""
    if not isinstance(types, list):
        return types
    return [HUB_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]


def agreed_types(config: ConfigReader, key: str, types: Any, other_key: str, other_types: Any) -> Any:
    """Return the layer types that one or both keys state. Raises UserError if they contradict each other."""
    if types is not None and other_types is not None and types != other_types:
        value = config.raw(other_key)
        raise UserError(f"config.json: {other_key}={value!r} contradicts {key}: leave one of them out")
    return other_types if types is None else types


def types_of_indices(key: str, indices: Any, recurrent: str, num_layers: int) -> list[str]:
    """Return the layer types in which the layers of these numbers are attention. `key`: their key in config.json.

    Raises UserError for anything but a list of layers.
    """
    if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < num_layers for i in indices):
        raise UserError(f"config.json: {key}={indices!r} is not a list of layers from 0 to {num_layers - 1}")
    return [FULL if i in indices else recurrent for i in range(num_layers)]


def read_num_taps(config: ConfigReader, key: str, default: int = 4) -> int:
    """Return the tokens that a convolution reads, with the token itself. Raises UserError for a single one."""
    if (num_taps := config.count(key, default)) < 2:
        raise UserError(f"config.json: {key}={num_taps} keeps no earlier token: give at least 2")
    return num_taps
