"""The scheme of a layer: the format of its weight, and how its activations are quantised."""

from dataclasses import dataclass, replace

from conf.errors import check
from conf.quantization import BLOCKS, FP4, GROUP_SIZES, MIXTURES, Activations, QuantConfig, QuantScheme
from kernels.linear.block_weight import KINDS
from quantization.codes import CodeKind
from quantization.weight_format import WeightFormat, of_blocks

BLOCK_SIZE = 32  # of the types with the shortest blocks
SHORTER_BLOCKS = {
    CodeKind.Q3_K: WeightFormat(4, group_size=BLOCK_SIZE),  # as Q4_0, with scales by search
    CodeKind.Q4_K: of_blocks("Q5_0"),
    CodeKind.Q5_K: of_blocks("Q5_1"),
    CodeKind.Q6_K: of_blocks("Q8_0"),
    CodeKind.NVFP4: of_blocks("MXFP4"),
}
"""Formats for channels that a type's blocks do not divide; llama.cpp's choice for its K types."""


@dataclass(frozen=True)
class LinearScheme:
    weights: WeightFormat
    activations: Activations = Activations.none

    def __str__(self) -> str:
        w = self.weights
        if w.kind.is_blocks:
            return w.kind.name
        groups = (
            "per tensor" if w.per_tensor else "per channel" if w.group_size is None else f"groups of {w.group_size}"
        )
        kind = "fp8" if w.kind is CodeKind.FP8 else f"int{w.bits}{'' if w.symmetric else ' asymmetric'}"
        return f"{kind} {groups}" + (
            f", {self.activations.name} activations" if self.activations.name != "none" else ""
        )


def scheme_of(config: QuantConfig) -> LinearScheme:
    """Return the scheme that `config` gives to every layer without an override. Not for quant=none.

    If `quant.group_size` is null, the scheme has the largest groups; `fitted` then adapts them to a layer.
    """
    group_size = (
        max(GROUP_SIZES) if config.group_size is None else None if config.group_size == -1 else config.group_size
    )
    formats = {
        QuantScheme.int8: WeightFormat(8, group_size=group_size),
        QuantScheme.int4: WeightFormat(4, symmetric=config.symmetric, group_size=group_size),
        QuantScheme.a8w8: WeightFormat(8),
        QuantScheme.fp8: WeightFormat(8, CodeKind.FP8, per_tensor=config.per_tensor),
        **{scheme: of_blocks(scheme.name.upper()) for scheme in (*FP4, *BLOCKS)},
        **{scheme: of_blocks(most.name.upper()) for scheme, most in MIXTURES.items()},
    }
    return LinearScheme(formats[config.scheme], config.activations.in_files)


def fitted_blocks(scheme: LinearScheme, num_inputs: int) -> LinearScheme | None:
    """Return a block scheme, or the scheme of SHORTER_BLOCKS if its blocks do not divide the channels.

    None: shorter blocks do not divide them either. Schemes of other kinds are returned unchanged.
    """
    kind = scheme.weights.kind
    if not kind.is_blocks or num_inputs % KINDS[kind.name].block_size == 0:
        return scheme
    return LinearScheme(SHORTER_BLOCKS[kind]) if kind in SHORTER_BLOCKS and num_inputs % BLOCK_SIZE == 0 else None


def fitted(scheme: LinearScheme, num_inputs: int) -> LinearScheme:
    """Return the scheme with the largest groups that divide a layer's input channels; unchanged if none does."""
    sizes = [size for size in GROUP_SIZES if size > 0 and num_inputs % size == 0]
    return replace(scheme, weights=replace(scheme.weights, group_size=max(sizes))) if sizes else scheme


def parse_format(key: str, text: str) -> LinearScheme | None:
    """Parse the value of an override: `int8`, `int4`, `int4/32` (with groups), `q6_k`, or `none`, for which it returns None."""
    sizes = {"": None} | {f"/{size}": size for size in GROUP_SIZES if size > 0}
    schemes: dict[str, LinearScheme | None] = {"none": None}
    schemes |= {
        f"int{bits}{suffix}": LinearScheme(WeightFormat(bits, group_size=size))
        for bits in (8, 4)
        for suffix, size in sizes.items()
    }
    blocks = ("q8_0", *(scheme.name for scheme in (*FP4, *BLOCKS)))
    schemes |= {name: LinearScheme(of_blocks(name.upper())) for name in blocks}
    check(text in schemes, key, text, ", ".join(schemes))
    return schemes[text]
