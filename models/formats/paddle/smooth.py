"""Fold the smoothing factors of PaddleNLP's PTQ into weights and scales.

With `smooth_all_linears`, PaddleSlim's ShiftSmoothHelpLayer gives o_proj and down_proj factors for their inputs. These
layers quantise (x + shift_bias) * smooth_weight instead of x. A factor of down_proj's input equals a factor of
up_proj's output, because silu(gate) multiplies that output. A factor of o_proj's input equals a factor of v_proj's
output, because attention computes weighted means of it. Both fold into the scales of up_proj's and v_proj's outputs, so
the codes are the same. An added shift cannot be folded.

O output channels of a layer.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from conf.errors import UserError
from models.formats.base import WeightFile
from models.formats.paddle.scales import NO_SHIFT, Scales

FACTOR_TARGETS = {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"}
"""By layer with factors, the layer whose outputs take the factors."""
FACTORS = ".smooth_weight"
INNER = ".layer."  # the wrapped layer, whose parameters have two names
ZEROS = (".shift_bias", ".bias")  # added before and after a layer without shift


class SmoothedFile:
    """A file without the factors. They are folded into float weights and biases, and into `scales`."""

    is_mapped = False

    def __init__(self, file: WeightFile, scales: Scales, expected: Collection[str], heads: int, groups: int) -> None:
        """`expected`: the model's tensor names. `heads`, `groups`: number of query heads, and of key/value heads.

        Raises UserError for factors that no other layer's outputs can take, and for shifted inputs.
        """
        self.path, self._file = file.path, file
        self._sources: dict[str, str] = {}
        self._factors: dict[str, Tensor] = {}
        for source in file.shapes:
            name = source.replace(INNER, ".")
            if name.endswith(FACTORS):
                self._move_factors(name.removesuffix(FACTORS), bool(scales.cache), heads, groups)
            elif name not in expected and name.endswith(ZEROS) and _module(name).endswith(tuple(FACTOR_TARGETS)):
                if self._read(source).any():
                    raise UserError(f"{self.path}: {source} is not zero, but {NO_SHIFT}")
            elif INNER not in source or name not in file.shapes:
                self._sources[name] = source
        coded = {name: self._multiplied(name, scale) for name, scale in scales.weights.items()}
        self.scales = replace(scales, weights=coded)
        self.shapes = {name: file.shapes[source] for name, source in self._sources.items()}
        self.dtypes = {name: file.dtypes[source] for name, source in self._sources.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor, module = self._read(self._sources[name]), _module(name)
            is_coded = name.endswith(".weight") and module in self.scales.weights
            yield name, tensor if is_coded else self._multiplied(module, tensor)

    def _read(self, source: str) -> Tensor:
        ((_, tensor),) = self._file.read([source])
        return tensor

    def _multiplied(self, module: str, rows: Tensor) -> Tensor:
        """Return rows [O, ...] of a module, multiplied by the factors of its outputs if there are any."""
        factors = self._factors.get(module)
        if factors is None:
            return rows
        return (rows.double() * factors.view(-1, *[1] * (rows.ndim - 1))).to(rows.dtype)

    def _move_factors(self, module: str, is_cached: bool, heads: int, groups: int) -> None:
        """Move the factors of a module's input to the layer that computes this input."""
        factors = self._read(module + FACTORS).double().flatten()
        if not (factors.isfinite() & (factors > 0)).all():
            raise UserError(
                f"{self.path}: {module}{FACTORS} has factors that are not finite and above 0: it is damaged"
            )
        is_attention = module.endswith("o_proj")
        target = next(
            (
                module.removesuffix(end) + target_end
                for end, target_end in FACTOR_TARGETS.items()
                if module.endswith(end)
            ),
            "",
        )
        outputs = self._file.shapes.get(f"{target}.weight", (0,))[0]
        if is_attention and outputs % groups or len(factors) != outputs * (heads // groups if is_attention else 1):
            raise UserError(
                f"{self.path}: {module}{FACTORS} has {len(factors)} factors, which do not fit the outputs of another layer"
            )
        if is_attention and is_cached and not factors.eq(1).all():
            raise UserError(
                f"{self.path}: {module}{FACTORS} follows the cache, which has scales per head and not per "
                "channel: quantise without c8, or without smooth_all_linears"
            )
        if is_attention:
            head_factors = factors.view(groups, heads // groups, -1)
            if not head_factors.eq(head_factors[:, :1]).all():
                raise UserError(
                    f"{self.path}: {module}{FACTORS} differs between query heads that read the same value: "
                    "quantise without smooth_all_linears"
                )
            factors = head_factors[:, 0].flatten()
        self._factors[target] = factors


def _module(name: str) -> str:
    return name.rpartition(".")[0]
