"""What stands in the place of the parts of a model that another stage has."""

from collections.abc import Mapping

from torch import nn

from models.layers.module import Module


class MissingLayer(Module):
    """A module of another stage. It has no parameters, and nobody calls it."""


def is_missing(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the module of this name is, or would be in, one that another stage has. `modules` are all, by name."""
    parts = name.split(".")
    return any(isinstance(modules.get(".".join(parts[:end])), MissingLayer) for end in range(1, len(parts) + 1))
