"""What the `model` of a request or of a batch's line names beside the weights."""

from typing import NamedTuple

from conf.schema import ModelConfig


class Named(NamedTuple):
    """At most one of both."""

    adapter: str | None = None
    prefix: str | None = None


def named(config: ModelConfig, model: str) -> Named:
    """Return the adapter or the soft prefix that has this name, or neither."""
    has_adapter, has_prefix = (model in (paths or {}) for paths in (config.adapters, config.prefixes))
    return Named(model if has_adapter else None, model if has_prefix else None)
