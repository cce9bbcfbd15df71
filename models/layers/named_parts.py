"""Modules whose parts have different names in the checkpoints of different families."""

from typing import Any

from torch import nn

from models.layers.module import Module


class NamedParts(Module):
    """A module that registers its parts under `names`, in the order of computation. A subclass defines other names."""

    names: tuple[str, ...]

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for name, part in zip(self.names, parts, strict=True):
            self.add_module(name, part)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The current parts, in the order of `names`."""
        return tuple(getattr(self, name) for name in self.names)


def register(model: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` the submodule of `model` at a dotted path. Missing parents are created as empty modules."""
    parents, _, name = path.rpartition(".")
    for parent in filter(None, parents.split(".")):
        if not hasattr(model, parent):
            model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(name, module)
