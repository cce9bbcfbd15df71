"""Which layers see a window only, and how long it is, from config.json."""

from conf.errors import UserError
from models.config import ConfigReader


def read_window(config: ConfigReader, default: int | None = None) -> int | None:
    """`sliding_window` where it holds for every layer; null is full attention. `default` is for a config without the key."""
    return None if config.raw("sliding_window", default) is None else config.count("sliding_window", default)


def read_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, None for full attention. `layer_types` says which slide; in older files the first `max_window_layers` do not.

    `sliding_window` counts only with `use_sliding_window`: many files carry one that is not used.
    """
    used = config.get("use_sliding_window", bool, False)
    config.raw("sliding_window")  # is read, also where it is not used
    first = config.get("max_window_layers", int, 28)  # as in transformers
    types = config.raw("layer_types")
    if types is None:
        types = ["sliding_attention" if used and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(f"config.json: layer_types={types!r} is not a list of num_hidden_layers={num_layers} types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"config.json: layer_types has {kind!r}, which is not supported: only 'full_attention', 'sliding_attention'"
            )
    if "sliding_attention" not in types:
        return (None,) * num_layers
    if not used:
        raise UserError("config.json: layer_types has 'sliding_attention', but use_sliding_window is not true")
    length = config.count("sliding_window")
    return tuple(length if kind == "sliding_attention" else None for kind in types)


def read_named_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Read the windows of an architecture in which only `layer_types` says which layers slide. Raises UserError for windows without it."""
    if config.get("use_sliding_window", bool, False) and config.raw("layer_types") is None:
        raise UserError(
            "config.json: layer_types is missing, but use_sliding_window is true: say which layers have one"
        )
    return read_windows(config, num_layers)
