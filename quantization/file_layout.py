"""Choose the schemes, the layout and the `quantization_config` of a quantised model's files, by `quantize.format`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from conf.errors import UserError
from conf.quantization import FP4, Activations, QuantConfig, QuantizedFormat, QuantMethod, QuantScheme, SparsityConfig
from models.causal_lm import CausalLM
from models.layers.linear import Linear, tied_embedding
from models.linear_layers import LinearSpec, linear_specs
from models.meta_model import TIED_CODES
from quantization.codes import CodeKind
from quantization.layouts import awq, compressed_tensors, gptq
from quantization.layouts.base import WritableLayout
from quantization.plan import plan, plan_pruning
from quantization.scheme import LinearScheme
from quantization.stored_parts import LayoutOf

VLLM_CPU_BLOCK = 32  # input channels per block of vLLM's int4 CPU kernel


@dataclass(frozen=True)
class FileLayout:
    schemes: dict[str, LinearScheme]
    """By layer name, with scales of the dtype that the files hold."""
    pruned: list[str]
    """The layers that are pruned before they are quantised."""
    config: dict[str, Any]
    """The `quantization_config`."""
    layout_of: LayoutOf
    ties_codes: bool = False
    """Whether the embedding of a tied model has the values of the head's codes. The files hold them in floats too."""

    @property
    def tied_mark(self) -> dict[str, bool]:
        """The additional entry of config.json with `ties_codes`; else empty."""
        return {TIED_CODES: True} if self.ties_codes else {}


def file_layout(model: CausalLM, quant: QuantConfig, format: QuantizedFormat) -> FileLayout:
    """Return the layout for a float model.

    Raises UserError as `plan` does, and for schemes that the format cannot hold.
    """
    _refuse_unwritable(quant)
    schemes, pruned = plan(model, quant), plan_pruning(model, quant)
    float_layers = _layers_except(model, schemes)
    is_permuted = quant.method is QuantMethod.gptq and quant.gptq.act_order and not quant.gptq.static_groups
    kv_cache = quant.kv_cache if quant.has_static_kv_cache else None
    if format is QuantizedFormat.compressed_tensors:
        config = compressed_tensors.write_config(schemes, float_layers, is_permuted, kv_cache)
        return FileLayout(schemes, pruned, config, _compressed, _ties_codes(model, quant, schemes))
    if kv_cache is not None:
        raise UserError(
            f"quantize.format={format.name} has no scales of the KV cache: give compressed_tensors, or quant.kv_cache_scales=dynamic"
        )
    if pruned:
        raise UserError(
            f"quantize.format={format.name} does not say that weights are pruned: give compressed_tensors, or leave quant.sparsity out"
        )
    if format is QuantizedFormat.vllm_cpu:
        schemes = {
            name: on_vllm_cpu(layer, schemes[name]) for name, layer in linear_specs(model).items() if name in schemes
        }
        if is_permuted:
            raise UserError("vLLM on a CPU has input channels in their own order: give quant.gptq.static_groups=true")
        return FileLayout(schemes, [], compressed_tensors.write_config(schemes, float_layers, is_permuted), _compressed)
    # These files have float16 scales, so codes are chosen for scales that are rounded to float16.
    schemes = {
        name: replace(scheme, weights=replace(scheme.weights, scale_dtype=torch.float16))
        for name, scheme in schemes.items()
    }
    if format is QuantizedFormat.awq:
        return FileLayout(schemes, [], awq.write_config(schemes, float_layers), _awq)
    config = gptq.write_config(schemes, float_layers, is_permuted)
    is_v1 = config["checkpoint_format"] == gptq.V1

    def layout(layer: LinearSpec, scheme: LinearScheme, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WritableLayout:
        return gptq.GptqWeight(layer.shape, scheme.weights, is_v1)

    return FileLayout(schemes, [], config, layout)


def _refuse_unwritable(quant: QuantConfig) -> None:
    if quant.scheme.is_blocks and quant.scheme not in FP4:
        raise UserError(
            f"quant={quant.scheme.name} is llama.cpp's, which no quantize.format holds: "
            "give task=convert convert.format=gguf with its convert.dtype"
        )
    if quant.scheme is QuantScheme.auto:
        raise UserError(
            "quant=auto chooses block types too, which no quantize.format holds: run other tasks with it, or give another quant"
        )
    if quant.embedding is not None:
        raise UserError(
            f"quant.embedding={quant.embedding} is for rounding while loading, and no file holds it: leave it out"
        )


def _ties_codes(model: CausalLM, quant: QuantConfig, schemes: Mapping[str, LinearScheme]) -> bool:
    # Folded scales change the head's matrix, and a static scale is of its inputs alone.
    scheme = schemes.get(model.layout.head)
    if scheme is None or tied_embedding(model.head) is None or scheme.activations is Activations.static:
        return False
    return not (quant.method.folds_scales or quant.shift)


def sparsity_config(model: CausalLM, sparsity: SparsityConfig, pruned: Collection[str], share: float) -> dict[str, Any]:
    """Return the additional entry of a pruned model's `quantization_config`; empty without `pruned` layers.

    share: the zeros of the pruned layers / all weights of the model.
    """
    if not pruned:
        return {}
    return {
        "sparsity_config": compressed_tensors.write_sparsity_config(
            sparsity.pattern, _layers_except(model, pruned), share
        )
    }


def _layers_except(model: CausalLM, chosen: Collection[str]) -> list[str]:
    """Return the linear layers that are not in `chosen`. Leaves out Conv1D layers, which no target matches."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))
    return [name for name, layer in linears if not layer.is_transposed and name not in chosen]


def on_vllm_cpu(layer: LinearSpec, scheme: LinearScheme) -> LinearScheme:
    """Return the scheme that vLLM, as of 0.32, computes on a CPU for the same weight. Raises UserError if it has none.

    It multiplies int4 weights with float activations, and int8 and fp8 weights only with quantised activations. It
    cannot make static fp8 activation codes on a CPU without AMX.
    """
    weights, activations = scheme.weights, scheme.activations
    if weights.kind.is_blocks:
        raise UserError(
            f"{layer.name} is {scheme}, which vLLM does not support on a CPU: give quantize.format=compressed_tensors"
        )
    if weights.kind is CodeKind.FP8 and (weights.per_tensor or activations is not Activations.dynamic):
        raise UserError(
            f"{layer.name} is {scheme}, but vLLM on a CPU supports fp8 only per channel and with dynamic activations: "
            "give quant.per_tensor=false quant.activations=dynamic"
        )
    if weights.kind is CodeKind.FP8 or activations is not Activations.none:
        return scheme
    if weights.bits == 8 and weights.group_size is not None:
        raise UserError(
            f"{layer.name} is {scheme}, but vLLM on a CPU supports int8 only per channel: leave quant.group_size out"
        )
    if weights.bits == 8:
        return replace(scheme, activations=Activations.dynamic)
    if layer.shape[1] % VLLM_CPU_BLOCK:
        raise UserError(
            f"{layer.name} has {layer.shape[1]} input channels, but vLLM on a CPU supports int4 only for multiples of {VLLM_CPU_BLOCK}: "
            f"give quant.skip=[{layer.name}]"
        )
    return scheme


def _compressed(
    layer: LinearSpec, scheme: LinearScheme, tensor_shapes: Mapping[str, tuple[int, ...]]
) -> WritableLayout:
    return compressed_tensors.writable_layout(layer.shape, scheme, tensor_shapes)


def _awq(layer: LinearSpec, scheme: LinearScheme, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WritableLayout:
    return awq.AwqWeight(layer.shape, scheme.weights)
