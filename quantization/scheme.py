"""What a layer's scheme is: the format of its weight and what its activations become."""

from dataclasses import dataclass

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantScheme
from quantization.codes import CodeKind
from quantization.weight_format import WeightFormat


@dataclass(frozen=True)
class LinearScheme:
    weights: WeightFormat
    activations: Activations = Activations.none

    def __str__(self) -> str:
        w = self.weights
        groups = (
            "per tensor" if w.per_tensor else "per channel" if w.group_size is None else f"groups of {w.group_size}"
        )
        kind = "fp8" if w.kind is CodeKind.FP8 else f"int{w.bits}{'' if w.symmetric else ' asymmetric'}"
        return f"{kind} {groups}" + (
            f", {self.activations.name} activations" if self.activations.name != "none" else ""
        )


def scheme_of(config: QuantConfig) -> LinearScheme:
    """The scheme that a quant option gives to every layer that no override names. Not for quant=none."""
    group_size = None if config.group_size == -1 else config.group_size
    formats = {
        QuantScheme.int8: WeightFormat(8, group_size=group_size),
        QuantScheme.int4: WeightFormat(4, symmetric=config.symmetric, group_size=group_size),
        QuantScheme.a8w8: WeightFormat(8),
        QuantScheme.fp8: WeightFormat(8, CodeKind.FP8, per_tensor=config.per_tensor),
    }
    return LinearScheme(formats[config.scheme], config.activations)


def override_of(pattern: str, text: str) -> LinearScheme | None:
    """`int8`, `int4`, with groups `int4/32`, or `none`, which is no scheme."""
    name, _, size = text.partition("/")
    is_group = size.isdecimal() and int(size[:9]) > 1 if size else "/" not in text
    if name not in ("none", "int8", "int4") or not is_group or name == "none" and size:
        raise UserError(
            f"quant.overrides.{pattern}={text} is not possible: give int8, int4, either with groups such as int4/32, or none"
        )
    return None if name == "none" else LinearScheme(WeightFormat(int(name[3:]), group_size=int(size) if size else None))
