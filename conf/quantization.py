"""The quant group, and the settings of calibration. It is a part of schema.py and imports only the standard library."""

from dataclasses import dataclass, field, replace
from enum import Enum

from conf.constraints import check_fields, is_set, one_of, option, unused
from conf.errors import ErrorCode, UserError


class QuantScheme(Enum):
    none = "none"
    int8 = "int8"  # only weights
    int4 = "int4"
    a8w8 = "a8w8"  # int8 weights and activations
    fp8 = "fp8"  # e4m3 weights and activations
    mxfp4 = "mxfp4"  # only weights: e2m1 in groups of 32, scales are powers of two
    nvfp4 = "nvfp4"  # only weights: e2m1 in groups of 16, e4m3 scales, and a scale for the whole weight
    q4_1 = "q4_1"  # only weights, in a block type of llama.cpp
    q5_0 = "q5_0"
    q5_1 = "q5_1"
    q3_k = "q3_k"
    q4_k = "q4_k"
    q5_k = "q5_k"
    q6_k = "q6_k"
    q3_k_m = "q3_k_m"  # the block types of llama.cpp's file type of this name, chosen by tensor
    q4_k_m = "q4_k_m"
    q5_k_m = "q5_k_m"
    auto = "auto"  # a format for each layer, by its loss

    @property
    def is_blocks(self) -> bool:
        return self in BLOCKS or self in MIXTURES or self in FP4


class QuantMethod(Enum):
    rtn = "rtn"  # round to nearest
    gptq = "gptq"  # arXiv 2210.17323
    awq = "awq"  # arXiv 2306.00978
    smoothquant = "smoothquant"  # arXiv 2211.10438
    imatrix = "imatrix"  # llama.cpp's importance matrix

    @property
    def folds_scales(self) -> bool:
        """Return whether the method folds scales of activations into the weights of other modules."""
        return self in (QuantMethod.awq, QuantMethod.smoothquant)


class Activations(Enum):
    none = "none"
    dynamic = "dynamic"  # a scale per token, from its own values
    static = "static"  # a scale per layer, from calibration
    auto = "auto"  # dynamic for products of many rows, else none; for int8 and int4 weights; set per run

    @property
    def in_files(self) -> "Activations":
        """Return the value in a model's files, which never store auto."""
        return Activations.none if self is Activations.auto else self


class BlockActivations(Enum):
    int8 = "int8"  # a scale per 32 inputs, as llama.cpp's Q8_0
    none = "none"  # floats


class KVCacheFormat(Enum):
    none = "none"  # as model.dtype
    int8 = "int8"
    fp8 = "fp8"  # e4m3
    int4 = "int4"


class KVCacheScales(Enum):
    dynamic = "dynamic"  # a scale per token and head, from its own values
    static = "static"  # a scale per head, from calibration


class SparsityMethod(Enum):
    none = "none"
    magnitude = "magnitude"  # the smallest weights of a layer become 0
    wanda = "wanda"  # arXiv 2306.11695


SparsityPattern = Enum("SparsityPattern", {"unstructured": "unstructured", "2:4": "2:4"})
"""Position of the zeros: anywhere in a layer, or two in each group of four consecutive input channels."""


BLOCKS = tuple(QuantScheme[name] for name in ("q4_1", "q5_0", "q5_1", "q3_k", "q4_k", "q5_k", "q6_k"))
FP4 = QuantScheme.mxfp4, QuantScheme.nvfp4
MIXTURES = {QuantScheme[f"{name}_m"]: QuantScheme[name] for name in ("q3_k", "q4_k", "q5_k")}
"""The block type of most tensors in each mixture."""
WEIGHT_ONLY = (QuantScheme.int8, QuantScheme.int4)
GROUP_SIZES = (32, 64, 128, -1)  # supported by the kernels and by other tools
METHODS = {
    QuantScheme.none: (QuantMethod.rtn,),
    QuantScheme.int8: (QuantMethod.rtn, QuantMethod.gptq, QuantMethod.awq),
    QuantScheme.int4: (QuantMethod.rtn, QuantMethod.gptq, QuantMethod.awq),
    QuantScheme.a8w8: (QuantMethod.rtn, QuantMethod.smoothquant, QuantMethod.gptq),
    QuantScheme.fp8: (QuantMethod.rtn, QuantMethod.smoothquant, QuantMethod.gptq),
    **dict.fromkeys(FP4, (QuantMethod.rtn,)),
    **dict.fromkeys((*BLOCKS, *MIXTURES, QuantScheme.auto), (QuantMethod.rtn, QuantMethod.imatrix)),
}


_FLOAT_PRODUCTS = (Activations.none, Activations.auto)
_CODE_PRODUCTS = (Activations.dynamic, Activations.static)
ACTIVATIONS = {
    QuantScheme.none: _FLOAT_PRODUCTS,  # the checkpoint may have quantised weights
    QuantScheme.int8: _FLOAT_PRODUCTS,
    QuantScheme.int4: _FLOAT_PRODUCTS,
    QuantScheme.a8w8: _CODE_PRODUCTS,
    QuantScheme.fp8: _CODE_PRODUCTS,
    **dict.fromkeys((*FP4, *BLOCKS, *MIXTURES, QuantScheme.auto), (Activations.none,)),
}


@dataclass
class SmoothConfig:
    """How SmoothQuant distributes large values between activations and weights."""

    alpha: float = option(0.5, minimum=0, maximum=1, not_with={"piecewise": is_set(reason="which searches it")})
    """Share of the scale that moves to the weights; 0: none."""
    piecewise: bool = False
    """Search an alpha per group of channels on the calibration data instead."""

    def __post_init__(self) -> None:
        check_fields(self, "quant.smooth")


@dataclass
class GptqConfig:
    damping: float = option(0.01, above=0)
    """Share of the Hessian's mean diagonal that is added to the diagonal; raised until the Hessian can be inverted."""
    act_order: bool = True
    """Quantise the input channels with the largest activations first."""
    static_groups: bool = True
    """Choose the scales of all groups before rounding, so that groups are consecutive channels also with act_order."""

    def __post_init__(self) -> None:
        check_fields(self, "quant.gptq")


_PRUNED = {"method": one_of(SparsityMethod.wanda, SparsityMethod.magnitude)}


@dataclass
class SparsityConfig:
    """Pruning by task=quantize before it quantises: of all linear layers except the head, routers and `quant.skip`."""

    method: SparsityMethod = SparsityMethod.none
    ratio: float = option(
        0.5, above=0, below=1, only_with=_PRUNED, not_with={"pattern": one_of(SparsityPattern["2:4"])}
    )
    """Share of weights that become 0: of the whole layer for magnitude, of each output channel for wanda."""
    pattern: SparsityPattern = option(SparsityPattern.unstructured, only_with=_PRUNED)

    def __post_init__(self) -> None:
        check_fields(self, "quant.sparsity")

    @property
    def prunes(self) -> bool:
        return self.method is not SparsityMethod.none

    def __str__(self) -> str:
        return f"{self.method.name}, {100 * self.ratio:g}% {self.pattern.name}"


AUTO_BITS = 5.0
_AUTO = {"scheme": one_of(QuantScheme.auto)}
_SMOOTHED = {"method": one_of(QuantMethod.smoothquant)}
_QUANTIZED = tuple(scheme for scheme in QuantScheme if scheme is not QuantScheme.none)


@dataclass
class QuantConfig:
    """How weights, activations and the KV cache are stored. Layers have the checkpoint's names."""

    scheme: QuantScheme = option(QuantScheme.none, typed_as="quant")
    method: QuantMethod = option(QuantMethod.rtn, choices_by=("scheme", METHODS))
    group_size: int | None = option(-1, choices=GROUP_SIZES, only_with={"scheme": one_of(*WEIGHT_ONLY)})
    """Input channels that share a scale; -1: all; null: the largest of 128, 64 and 32 that divides a layer's number."""
    symmetric: bool = option(True, only_with={"scheme": one_of(QuantScheme.int4)})
    """4-bit codes centred at 0; false: codes from 0 to 15 with a zero point per group."""
    per_tensor: bool = option(False, only_with={"scheme": one_of(QuantScheme.fp8)})
    """One scale per weight instead of one per output channel (fp8)."""
    activations: Activations = option(Activations.none, choices_by=("scheme", ACTIVATIONS))
    block_activations: BlockActivations = BlockActivations.int8
    """Format of the activations that multiply weights in blocks: llama.cpp's types and FP4. `activations` is for others."""
    smooth: SmoothConfig = option(factory=SmoothConfig, only_with=_SMOOTHED)
    shift: bool = option(False, only_with=_SMOOTHED)
    """Centre the range of each activation channel at 0 first (Outlier Suppression+, arXiv 2304.09145)."""
    auto_clip: bool = option(
        False, only_with={"scheme": one_of(*WEIGHT_ONLY), "method": one_of(QuantMethod.rtn, QuantMethod.awq)}
    )
    """Search, on the calibration data, the range of each group with the smallest output error."""
    imatrix: str | None = option(None, only_with={"method": one_of(QuantMethod.imatrix)})
    """File with the importance matrix of the model; null: calibration collects it and keeps the file."""
    gptq: GptqConfig = option(factory=GptqConfig, only_with={"method": one_of(QuantMethod.gptq)})
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    bits: float | None = option(None, above=0, only_with=_AUTO)
    """Most bits per weight of the quantised layers, with scales; null: AUTO_BITS, without max_bytes and plan."""
    max_bytes: int | None = option(None, minimum=1, only_with=_AUTO)
    """Most bytes of all weights in memory."""
    plan: str | None = option(None, only_with=_AUTO)
    """YAML file with the formats that an earlier run chose."""
    embedding: str | None = option(None, only_with={"scheme": one_of(*_QUANTIZED)})
    """Format of a token embedding that is not tied to the head, as in `overrides`; null: floats."""
    skip: list[str] = field(default_factory=list)
    """Layers that stay floats: names or globs. `lm_head` is the head of every model."""
    overrides: dict[str, str] = option(factory=dict, only_with={"scheme": one_of(*_QUANTIZED)})
    """Schemes of individual layers, by name or glob: `int8`, `int4`, `int4/32` (groups of 32), FP4, a block type or `none`."""
    kv_cache: KVCacheFormat = KVCacheFormat.none
    """Storage format of keys and values, for every scheme."""
    kv_cache_scales: KVCacheScales = option(
        KVCacheScales.dynamic, only_with={"kv_cache": one_of(KVCacheFormat.int8, KVCacheFormat.fp8)}
    )
    """static: scales from calibration, saved with the model; for kv_cache=int8|fp8."""
    probe: bool = True
    """Measure the divergence from floats when a model first runs with these settings. Only on a CPU, without ranks."""
    probe_kl: float = option(0.1, minimum=0, only_with={"probe": one_of(True)})
    """A larger divergence gives a warning; in nats per token. Healthy combinations of SmolLM2 135M stay below 0.07."""

    def __post_init__(self) -> None:
        check_fields(self, "quant")
        if self.skip and self.scheme is QuantScheme.none and not self.sparsity.prunes:
            raise unused("quant.skip", self.skip, [], "quant=none", "another quant, or a quant.sparsity.method")
        budgets = {"bits": self.bits, "max_bytes": self.max_bytes, "plan": self.plan}
        chosen_budgets = [f"quant.{name}={value}" for name, value in budgets.items() if value is not None]
        if len(chosen_budgets) > 1:
            raise UserError(
                f"quant.bits: quant=auto has {' and '.join(chosen_budgets)}: give one of quant.bits, quant.max_bytes and quant.plan",
                ErrorCode.excludes,
                "quant.bits",
            )

    @property
    def has_static_kv_cache(self) -> bool:
        return self.kv_cache_scales is KVCacheScales.static

    @property
    def needs_calibration(self) -> bool:
        is_static = self.activations is Activations.static or self.has_static_kv_cache
        is_measured = self.scheme is QuantScheme.auto and self.plan is None
        has_file = self.method is QuantMethod.imatrix and self.imatrix is not None
        is_calibrated = self.method is not QuantMethod.rtn and not has_file
        return is_calibrated or is_static or self.auto_clip or is_measured

    @property
    def finds_smoothing_alone(self) -> bool:
        """Whether calibration needs only the magnitude of each channel, for which few tokens are enough.

        `smooth.piecewise` compares output errors, `shift` needs the minimum and maximum of each channel, and pruning
        needs the norm of each channel.
        """
        is_dynamic = self.activations is Activations.dynamic and not self.has_static_kv_cache
        only_magnitudes = not self.smooth.piecewise and not self.shift and not self.sparsity.prunes
        return self.method is QuantMethod.smoothquant and is_dynamic and only_magnitudes


@dataclass
class CalibrateConfig:
    """The texts for calibration."""

    data: str | None = None
    """A file (`.txt`, `.jsonl`, `.csv`, `.json`, or `.gz` of these); null: built-in texts."""
    num_samples: int | None = option(None, minimum=1)
    """Number of samples; null: 4 if calibration only smooths or with quant=auto, 32 for imatrix, else 128.

    It only smooths with dynamic activations and without piecewise, shift and sparsity.
    """
    sequence_length: int | None = option(None, minimum=2)
    """Most tokens of a sample; null: 64 if calibration only smooths, 128 with quant=auto, else 512."""
    seed: int = option(0, minimum=0)
    """Seed for the choice of samples."""

    def __post_init__(self) -> None:
        check_fields(self, "calibrate")

    def resolved(self, quant: QuantConfig) -> "CalibrateConfig":
        """Return a copy in which null numbers are replaced by the defaults for `quant`."""
        samples, length = (4, 64) if quant.finds_smoothing_alone else (128, 512)
        if quant.scheme is QuantScheme.auto:
            samples, length = 4, 128
        elif quant.method is QuantMethod.imatrix:
            samples = 32
        return replace(self, num_samples=self.num_samples or samples, sequence_length=self.sequence_length or length)

    @property
    def num_tokens(self) -> int:
        """Return the maximum number of tokens of all samples. Only for `resolved` settings."""
        assert self.num_samples is not None
        assert self.sequence_length is not None
        return self.num_samples * self.sequence_length


class QuantizedFormat(Enum):
    compressed_tensors = "compressed_tensors"  # all schemes; vLLM and transformers load it
    awq = "awq"  # AutoAWQ's GEMM layout, int4 in groups
    gptq = "gptq"  # GPTQ's first version, int4 in groups
    vllm_cpu = "vllm_cpu"  # compressed_tensors limited to vLLM's CPU kernels; int8 weights get dynamic activations


@dataclass
class QuantizeConfig:
    """Make a quantised model from `model.path` and `quant`."""

    output: str | None = None
    """Folder to create; it appears when it is complete. null: a folder in outputs/quantized."""
    format: QuantizedFormat = QuantizedFormat.compressed_tensors
    """File layout, also of a model that another task calibrates."""
    overwrite: bool = False
    """Replace the model in `output`."""
    dry_run: bool = False
    """Only report what would be quantised, with estimates of memory and time."""
