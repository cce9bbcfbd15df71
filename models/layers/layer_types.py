"""Read from config.json which layers of a hybrid model are attention, and which are recurrent."""

from typing import Any

from conf.errors import UserError

FULL = "full_attention"


def check_layer_types(types: Any, recurrent: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent. `recurrent`: the type of a recurrent layer.

    Raises UserError for a wrong number of types, an unknown type, and a model without attention.
    """
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(f"config.json: layer_types={types!r} is not a list of num_hidden_layers={num_layers} types")
    if unknown := [kind for kind in types if kind not in (recurrent, FULL)]:
        supported = f"{recurrent!r}, {FULL!r}"
        raise UserError(f"config.json: layer_types has {unknown[0]!r}, which is not supported: only {supported}")
    if FULL not in types:
        raise UserError(f"config.json: all layers are {recurrent!r}: at least one layer must be {FULL!r}")
    return tuple(kind == recurrent for kind in types)
