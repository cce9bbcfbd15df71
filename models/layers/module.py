"""The base class of all modules."""

from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _HasForward(Protocol[P, R]):
    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class Module(nn.Module):
    """A torch module whose call has the types of its `forward`. torch types every call as Any."""

    if TYPE_CHECKING:

        def __call__(self: _HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    def fuse(self) -> None:
        """Prepare the module's own fused computations, after all weights are loaded. By default there are none."""
