"""Read checkpoints of NVIDIA's ModelOpt: NVFP4 weights, and fp8 weights with a scale per tensor.

Source: modelopt/torch/export (unified Hugging Face checkpoint), convert_hf_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from conf.decoding import warn_once
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.codes import CodeKind
from quantization.layouts.base import WeightLayout
from quantization.layouts.fp4 import SCALE, FP4Weight, warn_of_float_activations
from quantization.layouts.fp8 import Fp8Weight
from quantization.scheme import LinearScheme
from quantization.weight_format import WeightFormat, of_blocks

METHOD = "modelopt"
GROUP_SIZE = 16
FP8, NVFP4, NVFP4_WEIGHTS, MIXED = "FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"
CACHE_SCALES = ".k_proj.k_scale", ".v_proj.v_scale"  # ends of the names of scales that are not read
# Keys that are read and ignored. The tensors show which layers are floats, and the formats of all layers.
NO_EFFECT = ("quant_method", "quant_library", "config_groups", "ignore", "exclude_modules", "producer")


@dataclass(frozen=True)
class ModelOpt:
    """The `quantization_config` of a ModelOpt checkpoint. A layer with a scale of scales is NVFP4, else fp8."""

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        if SCALE not in tensor_shapes:
            return None
        if "weight_scale_2" in tensor_shapes:
            return LinearScheme(of_blocks("NVFP4"))
        return LinearScheme(WeightFormat(8, CodeKind.FP8, per_tensor=True), _fp8_activations(tensor_shapes))

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        if "weight_scale_2" in tensor_shapes:
            return FP4Weight("NVFP4", layer.shape, tensor_shapes, is_modelopt=True)
        return Fp8Weight(layer.shape, None, "input_scale" in tensor_shapes, tensor_shapes)


def _fp8_activations(tensor_shapes: Mapping[str, tuple[int, ...]]) -> Activations:
    return Activations.static if "input_scale" in tensor_shapes else Activations.dynamic


def read_modelopt(config: ConfigReader) -> ModelOpt:
    """Read the `quantization_config`: of config.json, or `quantization` of hf_quant_config.json.

    Logs a warning for FP4 activations and for a quantised KV cache. Raises UserError for other algorithms.
    """
    algorithms = {config.expect("quant_algo", (FP8, NVFP4, NVFP4_WEIGHTS, MIXED), None)}
    if layers := config.section("quantized_layers"):
        sections = [layers.section(name) for name in layers.values]
        algorithms |= {
            section.expect("quant_algo", (FP8, NVFP4, NVFP4_WEIGHTS), None) for section in sections if section
        }
    config.expect("group_size", (None, GROUP_SIZE), None)
    for key in NO_EFFECT:
        config.raw(key)
    if NVFP4 in algorithms:
        warn_of_float_activations()
    if any([config.raw("kv_cache_quant_algo"), config.raw("kv_cache_scheme")]):
        warn_once(
            "the checkpoint's scales of the KV cache are not used: quant.kv_cache=fp8 chooses a scale per token and head"
        )
    return ModelOpt()
