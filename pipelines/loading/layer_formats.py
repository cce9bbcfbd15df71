"""The formats of a planned model's layers and KV cache: the checkpoint's formats, or the formats that `quant` names."""

from dataclasses import replace

from torch import Tensor

from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import (
    Activations,
    KVCacheFormat,
    KVCacheScales,
    QuantConfig,
    QuantScheme,
)
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.base import CodedWeights, WeightFile
from models.layers.linear import tied_embedding
from pipelines.loading.model_source import ModelSource
from quantization.kv_scales import place_kv_scales
from quantization.layouts.base import StoredQuantization
from quantization.layouts.kv_cache import read_kv_cache_scheme
from quantization.plan import (
    make_activations_auto,
    place_stored_embedding,
    place_stored_layers,
    plan,
    quantize_while_loading,
    set_block_activations,
)


def choose_layer_formats(
    model: CausalLM,
    config: QuantConfig,
    stored: StoredQuantization | None,
    files: list[WeightFile],
    checkpoint_config: ConfigReader,
) -> None:
    if stored is not None:
        _place_stored(model, config, stored, files)
    elif config.scheme is not QuantScheme.none:
        assert not config.needs_calibration
        importance = dict[str, Tensor]()
        if config.imatrix is not None:
            from quantization.importance import read_importance  # imported here: other methods do not need gguf

            importance = read_importance(config.imatrix, model, checkpoint_config.require("model_type", str))
        quantize_while_loading(model, config, importance)
    set_block_activations(model, config.block_activations)
    if config.activations is Activations.auto:
        make_activations_auto(model)


def _place_stored(model: CausalLM, config: QuantConfig, stored: StoredQuantization, files: list[WeightFile]) -> None:
    if not files:
        raise UserError("model.weights=random makes float weights, but this checkpoint is quantised: leave it out")
    if config.imatrix is not None:
        raise UserError(f"quant.imatrix={config.imatrix} is not used by a quantised checkpoint: give the float model")
    if config.embedding is not None:
        raise UserError(f"quant.embedding={config.embedding} is not used by a quantised checkpoint: leave it out")
    planned, shapes = plan(model, config), _shapes(files)
    schemes = place_stored_layers(model, stored, shapes)
    coded = [*schemes]
    if (scheme := place_stored_embedding(model, stored, shapes)) is not None:
        coded.append(model.layout.embedding)
        if tied_embedding(model.head) is model.embedding:
            schemes[model.layout.head] = scheme
    for file in files:
        if isinstance(file, CodedWeights):
            file.keep_codes(coded)
    if config.activations is Activations.dynamic and any(s.activations is Activations.static for s in schemes.values()):
        warn_once("the checkpoint's scales of activations are static, and are used: quant.activations=dynamic is not")
        planned = {name: replace(scheme, activations=Activations.static) for name, scheme in planned.items()}
    for name in planned | schemes if planned else ():
        requested, in_file = (str(formats.get(name, "a float")) for formats in (planned, schemes))
        if requested != in_file:
            raise UserError(
                f"quant={config.scheme.name} contradicts the checkpoint, which is quantised already: {name} is {in_file} there, "
                f"not {requested}: leave quant out, or give the float model"
            )


def place_cache_scales(
    model: CausalLM, config: QuantConfig, source: ModelSource, files: list[WeightFile]
) -> KVCacheFormat | None:
    """Give attention modules the static KV cache scales of the checkpoint.

    Return their format, or None if the checkpoint has none.
    """
    stored = read_kv_cache_scheme(source.checkpoint.config)
    if stored is None:
        if config.has_static_kv_cache:
            raise UserError(
                "quant.kv_cache_scales=static, but the checkpoint, which is quantised already, has no scales of the KV cache: "
                "give quant.kv_cache_scales=dynamic, or the float model"
            )
        return None
    requested = config.kv_cache, config.kv_cache_scales
    if requested not in ((KVCacheFormat.none, KVCacheScales.dynamic), (stored.format, KVCacheScales.static)):
        raise UserError(
            f"quant.kv_cache={requested[0].name} with {requested[1].name} scales contradicts the checkpoint, whose KV cache is "
            f"{stored.format.name} with static scales: leave quant.kv_cache out"
        )
    place_kv_scales(model, stored.per_head, _shapes(files))
    return stored.format


def _shapes(files: list[WeightFile]) -> dict[str, tuple[int, ...]]:
    return {name: shape for file in files for name, shape in file.shapes.items()}
