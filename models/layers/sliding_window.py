"""Read from config.json which layers use a sliding window, and its length."""

from conf.errors import UserError
from models.config import ConfigReader


def read_window(config: ConfigReader, default: int | None = None) -> int | None:
    """Return `sliding_window` for models in which it applies to every layer. None: full attention.

    `default` is used if the key is absent; null means full attention.
    """
    return None if config.raw("sliding_window", default) is None else config.count("sliding_window", default)


def read_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer. None: full attention.

    `layer_types` selects the layers with a window. In older files, all layers from `max_window_layers` on have it.
    `sliding_window` applies only with `use_sliding_window`, because many files contain an unused value.
    """
    used = config.get("use_sliding_window", bool, False)
    config.raw("sliding_window")  # marks the key as read, even if it is not used
    first = config.get("max_window_layers", int, 28)  # the default of transformers
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
    """Read the windows of an architecture in which only `layer_types` selects the layers with a window.

    Raises UserError if `use_sliding_window` is true and `layer_types` is missing.
    """
    if config.get("use_sliding_window", bool, False) and config.raw("layer_types") is None:
        raise UserError(
            "config.json: layer_types is missing, but use_sliding_window is true: say which layers have one"
        )
    return read_windows(config, num_layers)
