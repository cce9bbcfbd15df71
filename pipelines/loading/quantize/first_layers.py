"""A small model that is measured in place of the whole model: its first layers, with each kind of layer, and random weights."""

from dataclasses import dataclass, replace

from torch import nn

from conf.decoding import DecodeConfig
from conf.schema import DeviceConfig, DType
from pipelines.engine import Engine
from pipelines.loading.assembly import assemble
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.planning import plan_model
from pipelines.loading.request_settings import RequestSettings
from quantization.file_layout import FileLayout
from quantization.quantizer import QuantizedLayer, parts_of
from quantization.scheme import LinearScheme

HEAD_OUTPUTS = 8192  # outputs of the measured head: the time of a larger head is proportional


@dataclass(frozen=True)
class FirstLayers:
    """The first layers of a model."""

    engine: Engine
    layout: FileLayout
    """The model's layout, with the schemes of these layers and of the head."""
    kinds: list[int]
    """For each layer of the whole model the index of the first layer of its kind."""
    has_head: bool
    """Whether the head is quantised."""


def first_layers(device: DeviceConfig, plan: ModelPlan, settings: RequestSettings, layout: FileLayout) -> FirstLayers:
    """Return the first layers of the planned float model, which are to be quantised as `layout` says."""
    parts = parts_of(plan.model, layout.schemes)
    kinds = _kinds(plan, parts)
    engine = _engine(device, plan, settings, max(kinds) + 1)
    return FirstLayers(engine, replace(layout, schemes=_schemes(parts, kinds)), kinds, len(parts) > len(kinds))


def _kinds(plan: ModelPlan, parts: list[QuantizedLayer]) -> list[int]:
    """Return for each decoder layer the index of the first layer whose parameters have the same names and shapes."""
    shapes = [(name, parameter.shape) for name, parameter in plan.model.named_parameters()]
    layer_shapes = [
        [(name.removeprefix(part.prefix), shape) for name, shape in shapes if name.startswith(part.prefix)]
        for part in parts[: plan.model.config.num_hidden_layers]
    ]
    return list(map(layer_shapes.index, layer_shapes))


def _schemes(parts: list[QuantizedLayer], kinds: list[int]) -> dict[str, LinearScheme]:
    """Return the schemes of the measured layers, each as in the last layer of its kind, and the head's schemes."""
    last = {kind: parts[index] for index, kind in enumerate(kinds)}
    schemes = {name: scheme for head in parts[len(kinds) :] for name, scheme in head.schemes.items()}
    for part, kind in zip(parts[: max(kinds) + 1], kinds, strict=False):
        like = last[kind]
        schemes |= {part.prefix + name.removeprefix(like.prefix): scheme for name, scheme in like.schemes.items()}
    return schemes


def _engine(device: DeviceConfig, plan: ModelPlan, settings: RequestSettings, num_layers: int) -> Engine:
    """Return an engine of the model's first layers and of a part of its vocabulary, with random weights."""
    shape = plan.model.config
    # A model that sees the whole prompt searches it for special ids, so it needs the whole vocabulary.
    vocab_size = shape.vocab_size if shape.capabilities.needs_whole_prompt else min(shape.vocab_size, HEAD_OUTPUTS)
    source = replace(plan.source, shape=replace(shape, vocab_size=vocab_size), has_weights=False)
    options = replace(plan.options, dtype=DType[str(plan.dtype).removeprefix("torch.")])
    small = plan_model(options, plan.quant, source, plan.device, packed=False)
    parent, _, name = small.model.layout.layers.rpartition(".")
    setattr(small.model.get_submodule(parent), name, nn.ModuleList(small.model.layers[:num_layers]))
    small.model.config = replace(small.model.config, num_hidden_layers=num_layers)
    small.model.local_layers = range(num_layers)
    return assemble(small, device, DecodeConfig(), settings, 1)
