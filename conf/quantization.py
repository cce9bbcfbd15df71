"""The quant group, and the settings of calibration. It is a part of schema.py and imports only the standard library."""

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from conf.errors import UserError, check


class QuantScheme(Enum):
    none = "none"
    int8 = "int8"  # only weights
    int4 = "int4"
    a8w8 = "a8w8"  # int8 weights and activations
    fp8 = "fp8"  # e4m3 weights and activations


class QuantMethod(Enum):
    rtn = "rtn"  # round to nearest
    gptq = "gptq"  # arXiv 2210.17323
    awq = "awq"  # arXiv 2306.00978
    smoothquant = "smoothquant"  # arXiv 2211.10438

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
    def of_model(self) -> "Activations":
        """Return the value in a model's files, which never store auto."""
        return Activations.none if self is Activations.auto else self


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


WEIGHT_ONLY = (QuantScheme.int8, QuantScheme.int4)
GROUP_SIZES = (32, 64, 128, -1)  # supported by the kernels and by other tools
METHODS = {
    QuantScheme.none: (QuantMethod.rtn,),
    QuantScheme.int8: (QuantMethod.rtn, QuantMethod.gptq, QuantMethod.awq),
    QuantScheme.int4: (QuantMethod.rtn, QuantMethod.gptq, QuantMethod.awq),
    QuantScheme.a8w8: (QuantMethod.rtn, QuantMethod.smoothquant, QuantMethod.gptq),
    QuantScheme.fp8: (QuantMethod.rtn, QuantMethod.smoothquant, QuantMethod.gptq),
}


@dataclass
class SmoothConfig:
    """How SmoothQuant distributes large values between activations and weights."""

    alpha: float = 0.5
    """Share of the scale that moves to the weights; 0: none."""
    piecewise: bool = False
    """Search an alpha per group of channels on the calibration data instead."""

    def __post_init__(self) -> None:
        check(0 <= self.alpha <= 1, "quant.smooth.alpha", self.alpha, "a number from 0 to 1")
        check(
            not self.piecewise or self.alpha == 0.5,
            "quant.smooth.alpha",
            self.alpha,
            "0.5 with piecewise, which searches it",
        )


@dataclass
class GptqConfig:
    damping: float = 0.01
    """Share of the Hessian's mean diagonal that is added to the diagonal; raised until the Hessian can be inverted."""
    act_order: bool = True
    """Quantise the input channels with the largest activations first."""
    static_groups: bool = True
    """Choose the scales of all groups before rounding, so that groups are consecutive channels also with act_order."""

    def __post_init__(self) -> None:
        check(self.damping > 0, "quant.gptq.damping", self.damping, "a number above 0")


@dataclass
class SparsityConfig:
    """Pruning by task=quantize before it quantises: of all linear layers except the head, routers and `quant.skip`."""

    method: SparsityMethod = SparsityMethod.none
    ratio: float = 0.5
    """Share of weights that become 0: of the whole layer for magnitude, of each output channel for wanda."""
    pattern: SparsityPattern = SparsityPattern.unstructured

    def __post_init__(self) -> None:
        check(0 < self.ratio < 1, "quant.sparsity.ratio", self.ratio, "a number between 0 and 1")
        free = self.pattern is SparsityPattern.unstructured
        check(free or self.ratio == 0.5, "quant.sparsity.ratio", self.ratio, "0.5 with quant.sparsity.pattern=2:4")
        if not self.prunes and (self.ratio, free) != (0.5, True):
            raise UserError(
                f"quant.sparsity ratio={self.ratio} pattern={self.pattern.name} goes with a method: "
                "give quant.sparsity.method=wanda or magnitude, or leave them out"
            )

    @property
    def prunes(self) -> bool:
        return self.method is not SparsityMethod.none

    def __str__(self) -> str:
        return f"{self.method.name}, {100 * self.ratio:g}% {self.pattern.name}"


@dataclass
class QuantConfig:
    """How weights, activations and the KV cache are stored. Layers have the checkpoint's names."""

    scheme: QuantScheme = QuantScheme.none
    method: QuantMethod = QuantMethod.rtn
    group_size: int | None = -1
    """Input channels that share a scale; -1: all; null: the largest of 128, 64 and 32 that divides a layer's number."""
    symmetric: bool = True
    """4-bit codes centred at 0; false: codes from 0 to 15 with a zero point per group."""
    per_tensor: bool = False
    """One scale per weight instead of one per output channel (fp8)."""
    activations: Activations = Activations.none
    smooth: SmoothConfig = field(default_factory=SmoothConfig)
    shift: bool = False
    """Centre the range of each activation channel at 0 first (Outlier Suppression+, arXiv 2304.09145)."""
    auto_clip: bool = False
    """Search, on the calibration data, the range of each group with the smallest output error."""
    gptq: GptqConfig = field(default_factory=GptqConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    skip: list[str] = field(default_factory=list)
    """Layers that stay floats: names or globs. `lm_head` is the head of every model."""
    overrides: dict[str, str] = field(default_factory=dict)
    """Schemes of individual layers, by name or glob: `int8`, `int4`, `int4/32` (groups of 32) or `none`."""
    kv_cache: KVCacheFormat = KVCacheFormat.none
    """Storage format of keys and values, for every scheme."""
    kv_cache_scales: KVCacheScales = KVCacheScales.dynamic
    """static: scales from calibration, saved with the model; for kv_cache=int8|fp8."""

    def __post_init__(self) -> None:
        scheme, weight_only = self.scheme.name, self.scheme in WEIGHT_ONLY
        allowed = ", ".join(method.name for method in METHODS[self.scheme])
        check(self.method in METHODS[self.scheme], "quant.method", self.method.name, f"{allowed} with quant={scheme}")
        allowed = "32, 64, 128, -1 or null"
        check(self.group_size is None or self.group_size in GROUP_SIZES, "quant.group_size", self.group_size, allowed)
        self._only(self.scheme in WEIGHT_ONLY, "group_size")
        self._only(self.scheme is QuantScheme.int4, "symmetric")
        self._only(self.scheme is QuantScheme.fp8, "per_tensor")
        self._only(self.method is QuantMethod.smoothquant, "smooth", "method=smoothquant")
        self._only(self.method is QuantMethod.gptq, "gptq", "method=gptq")
        self._only(self.method is QuantMethod.smoothquant, "shift", "method=smoothquant")
        self._only(weight_only and self.method is not QuantMethod.gptq, "auto_clip", "quant=int8|int4, method=rtn|awq")
        has_scheme = self.scheme is not QuantScheme.none
        self._only(has_scheme or self.sparsity.prunes, "skip")
        self._only(has_scheme, "overrides")
        floats = weight_only or scheme == "none"  # with none, the checkpoint may have quantised weights
        wanted = (Activations.none, Activations.auto) if floats else (Activations.dynamic, Activations.static)
        names = " or ".join(kind.name for kind in wanted)
        check(self.activations in wanted, "quant.activations", self.activations.name, f"{names} with quant={scheme}")
        check(
            not self.has_static_kv_cache or self.kv_cache in (KVCacheFormat.int8, KVCacheFormat.fp8),
            "quant.kv_cache_scales",
            "static",
            f"dynamic with quant.kv_cache={self.kv_cache.name}, or quant.kv_cache=int8 or fp8",
        )

    @property
    def has_static_kv_cache(self) -> bool:
        return self.kv_cache_scales is KVCacheScales.static

    @property
    def needs_calibration(self) -> bool:
        is_static = self.activations is Activations.static or self.has_static_kv_cache
        return self.method is not QuantMethod.rtn or is_static or self.auto_clip

    @property
    def finds_smoothing_alone(self) -> bool:
        """Whether calibration needs only the largest magnitude of each channel, for which few tokens are enough.

        `smooth.piecewise` compares output errors, `shift` needs the minimum and maximum of each channel, and pruning
        needs the norm of each channel.
        """
        is_dynamic = self.activations is Activations.dynamic and not self.has_static_kv_cache
        only_magnitudes = not self.smooth.piecewise and not self.shift and not self.sparsity.prunes
        return self.method is QuantMethod.smoothquant and is_dynamic and only_magnitudes

    def _only(self, used: bool, name: str, with_what: str = "") -> None:
        default: Any = next(f for f in fields(self) if f.name == name)
        unchanged = default.default_factory() if callable(default.default_factory) else default.default
        if not used and getattr(self, name) != unchanged:
            reason = f"goes with quant.{with_what}" if with_what else f"is not used by quant={self.scheme.name}"
            raise UserError(f"quant.{name}={getattr(self, name)} {reason}: leave it at {unchanged}")


@dataclass
class CalibrateConfig:
    """The texts for calibration."""

    data: str | None = None
    """A file (`.txt`, `.jsonl`, `.csv`, `.json`, or `.gz` of these); null: built-in texts."""
    num_samples: int | None = None
    """Number of samples; null: 4 if calibration only smooths, else 128.

    It only smooths with dynamic activations and without piecewise, shift and sparsity.
    """
    sequence_length: int | None = None
    """Most tokens of a sample; null: 64 if calibration only smooths, else 512."""
    seed: int = 0
    """Seed for the choice of samples."""

    def __post_init__(self) -> None:
        for name, least, allowed in (("num_samples", 1, "above 0"), ("sequence_length", 2, "above 1")):
            value = getattr(self, name)
            check(value is None or value >= least, f"calibrate.{name}", value, f"a number {allowed}, or null")
        check(self.seed >= 0, "calibrate.seed", self.seed, "a number from 0")

    def resolved(self, quant: QuantConfig) -> "CalibrateConfig":
        """Return a copy in which null numbers are replaced by the defaults for `quant`."""
        samples, length = (4, 64) if quant.finds_smoothing_alone else (128, 512)
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
