"""One form of module under the many names that checkpoints give its parts."""

from typing import Any

from torch import nn

from models.layers.module import Module


class NamedParts(Module):
    """A module whose parts, in the order of their computation, are registered under `names`. A family with other names derives a class."""

    names: tuple[str, ...]

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for name, part in zip(self.names, parts, strict=True):
            self.add_module(name, part)

    @property
    def parts(self) -> tuple[Any, ...]:
        """In the order of `names`; a part that was replaced since is the new one."""
        return tuple(getattr(self, name) for name in self.names)


def register(model: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` the submodule of `model` at a dotted path. Parents that are missing become modules without a call."""
    parents, _, name = path.rpartition(".")
    for parent in filter(None, parents.split(".")):
        if not hasattr(model, parent):
            model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(name, module)
