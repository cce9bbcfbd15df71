"""Placeholders for the modules of other pipeline stages."""

from collections.abc import Mapping

from torch import nn

from models.layers.module import Module


class MissingLayer(Module):
    """A module that another pipeline stage has. It has no parameters, and is never called."""


def is_missing(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the module `name` belongs to another pipeline stage. `modules`: all modules by name."""
    parts = name.split(".")
    return any(isinstance(modules.get(".".join(parts[:end])), MissingLayer) for end in range(1, len(parts) + 1))
