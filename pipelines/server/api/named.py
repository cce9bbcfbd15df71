"""Adapter or soft prefix that the `model` of a request or batch line selects."""

from typing import NamedTuple

from conf.schema import ModelConfig


class Named(NamedTuple):
    """At most one of the two is set."""

    adapter: str | None = None
    prefix: str | None = None


def named(config: ModelConfig, model: str) -> Named:
    """Return the adapter or the soft prefix of this name; neither is set if there is none."""
    has_adapter, has_prefix = (model in (paths or {}) for paths in (config.adapters, config.prefixes))
    return Named(model if has_adapter else None, model if has_prefix else None)
