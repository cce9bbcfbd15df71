"""Feed-forward layers, most of them gated: down(silu(gate(x)) * up(x)), where x and the result are [T, E] (arXiv 2002.05202).

T tokens, E hidden channels, F feed-forward channels.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import relu

from kernels.gelu import gelu, gelu_tanh
from kernels.quantize_rows import Activations
from models.batch import Batch
from models.layers.linear import Linear, MergedLinear, swiglu_for
from models.layers.named_parts import NamedParts


class MLP(NamedParts):
    names = ("gate_proj", "up_proj", "down_proj")
    activation: Callable[[Tensor, Tensor], Tensor] | None = None
    """Returns the input of the last layer from gate and up, [T, F] each. None: silu(gate) * up."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, down_bias: bool | None = None
    ) -> None:
        """`down_bias`: None means the value of `bias`."""
        gate = Linear(hidden_size, intermediate_size, bias)
        up = Linear(hidden_size, intermediate_size, bias)
        down = Linear(intermediate_size, hidden_size, bias if down_bias is None else down_bias)
        super().__init__(gate, up, down)
        self.gate_up = MergedLinear(self, dict(zip(self.names[:2], (gate, up), strict=True)))

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.gate_up.layers

    def fuse(self) -> None:
        self.gate_up.merge()

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        down = self.parts[-1]
        if self.activation is None:
            inner = self.gate_up.swiglu(x, batch, [down])
        else:
            inner = self.activation(*self.gate_up(x, batch))
        result: Tensor = down(inner, batch)
        return result


class GELUMLP(MLP):
    """`MLP` with GELU, approximated by tanh, instead of silu."""

    activation = staticmethod(gelu_tanh)


class FusedMLP(NamedParts):
    """A gated feed-forward layer whose checkpoints hold gate and up as one matrix, gate first."""

    names = ("gate_up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(
            Linear(hidden_size, 2 * intermediate_size, bias=False), Linear(intermediate_size, hidden_size, bias=False)
        )

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.parts[:1]

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        gate_up, down = self.parts
        gate, up = gate_up(x, batch).chunk(2, dim=-1)  # [T, F] each
        result: Tensor = down(swiglu_for([down], gate, up), batch)
        return result


def squared_relu(x: Tensor) -> Tensor:
    positive = relu(x)
    return positive * positive


class UngatedMLP(NamedParts):
    """down(activation(up(x)))."""

    names = ("up_proj", "down_proj")

    def __init__(
        self,
        channels: int,
        intermediate_size: int,
        bias: bool,
        activation: Callable[[Tensor], Tensor],
        is_transposed: bool = False,
    ) -> None:
        """`is_transposed`: as of `Linear`."""
        up = Linear(channels, intermediate_size, bias, is_transposed=is_transposed)
        super().__init__(up, Linear(intermediate_size, channels, bias, is_transposed=is_transposed))
        self.act_fn = activation

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.parts[:1]

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        up, down = self.parts
        result: Tensor = down(self.act_fn(up(x, batch)), batch)
        return result


class SquaredReluMLP(UngatedMLP):
    """down(relu(up(x))^2) (arXiv 2109.08668)."""

    def __init__(self, channels: int, intermediate_size: int, bias: bool) -> None:
        super().__init__(channels, intermediate_size, bias, squared_relu)


GELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""GELU and its approximation, by transformers' names."""
