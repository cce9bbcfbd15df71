"""From a RunConfig to an engine: the place where model, quantisation, tokenizer and device come together."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, KVCacheScales, QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Weights, typed
from kernels import build
from kernels.kv_format import FORMATS, KVFormat
from kernels.threads import set_threads
from models.batch import KVCache
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.formats import Checkpoint, WeightFile, open_checkpoint, open_tokenizer
from models.formats.base import CodedWeights
from models.formats.hub import find_checkpoint
from models.formats.manifest import verify_manifest
from models.layers.attention import Heads
from models.linear_layers import bring_together, pack_layers
from models.outline import open_model
from models.registry import find_architecture
from models.tokenizers import Tokenizer
from models.weights import DTYPES, initialise_randomly, load_weights, stored_dtype
from pipelines.engine import Engine
from pipelines.engine.kv_cache import BLOCK_SIZE, allocate_kv_cache, choose_num_blocks, free_memory
from pipelines.engine.request import ContextLimit
from pipelines.generation_config import decode_defaults, eos_token_ids
from pipelines.kept import load_kept
from pipelines.memory import check_memory, step_bytes, weight_bytes, widest_layer
from quantization.kv_scales import ZERO_POINTS, place_kv_scales, static_kv_formats
from quantization.layouts import read_quantization
from quantization.layouts.base import StoredQuantization
from quantization.layouts.gguf import read_gguf_quantization
from quantization.layouts.kv_cache import read_kv_cache_scheme
from quantization.plan import make_activations_auto, place_stored_layers, plan, quantize_while_loading

log = logging.getLogger(__name__)

AUTO_SEQUENCES = 16  # for which an automatic pool has room at least: rows may ask for beams or samples of their own
DEFAULT_THREADS = torch.get_num_threads()  # torch's choice, before anybody set another number


def assemble(
    run: RunConfig,
    max_num_requests: int,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    packed: bool = True,
) -> Engine:
    """Load model and tokenizer and make an engine for so many requests at once. `on_bytes(done, total)` follows the weights.

    A scheme that needs calibration is for a model that is quantised by it already.
    `packed`: weights are as the machine's kernels want them, and decode steps captured; not for a model whose layers will be replaced.
    Raises UserError for whatever is wrong with the checkpoint, the tokenizer or the device.
    """
    _check_batch_size(max_num_requests, run.device)
    device = prepared_device(run.device)
    checkpoint = find_and_open(run.model)
    reader = checkpoint.config
    architecture = find_architecture(reader)
    shape: ModelShape = architecture.read_config(reader)
    context = _context(run.model, shape, reader)
    tokenizer = _tokenizer(run.model, checkpoint, shape.vocab_size)
    eos = eos_token_ids(checkpoint.generation_config, reader, tokenizer)
    decode = decode_defaults(checkpoint.generation_config, context.num_tokens)
    bound = None if run.model.weights is Weights.random else checkpoint
    model, files = open_model(architecture, shape, bound)
    model.eval()
    widest = widest_layer(model)
    _quantize(model, run.quant, read_quantization(reader) or read_gguf_quantization(files), files)
    static_cache = _static_cache(model, run.quant, reader, files)
    if unread := reader.unread():
        log.warning("the config in %s has keys that are not used: %s", checkpoint.path, ", ".join(unread))
    wanted = run.model.dtype
    dtype = DTYPES[stored_dtype(reader, files) if wanted is DType.auto else wanted.name]
    if packed:
        pack_layers(model, dtype, device)
    sequences = max_num_requests * _sequences_of_a_request(run.decode.resolved(decode))
    reserved = _reserve_memory(run.device, model, widest, sequences, dtype, device)
    ignored = (*architecture.ignored_tensors, *(ZERO_POINTS if static_cache else ()))
    read = partial(load_weights, model, files, ignored, dtype, device, on_bytes)
    if not files:
        initialise_randomly(model, dtype, device)
    elif run.model.keep_packed:
        load_kept(model, run, dtype, device, read)
    else:
        read()
    if packed:
        bring_together(model, device)
    formats, room = _cache_formats(model, run.quant, static_cache), max(AUTO_SEQUENCES, sequences)
    cache = _kv_cache(run.device, model.attention_heads, room, context, formats, dtype, device, reserved)
    sizes = max_num_requests, run.device.max_batched_tokens, sequences if run.device.cuda_graphs and packed else 0
    return Engine(model, cache, tokenizer, context, eos, decode, *sizes, run.device.decode_threads)


def _check_batch_size(max_num_requests: int, device: DeviceConfig) -> None:
    if max_num_requests > device.max_batched_tokens:
        raise UserError(
            f"batch_size={max_num_requests} is more than device.max_batched_tokens={device.max_batched_tokens}: "
            "every row that runs needs a token of each step"
        )


def _sequences_of_a_request(decode: DecodeConfig) -> int:
    return max(decode.n, decode.num_beams or 1)


def _quantize(model: CausalLM, config: QuantConfig, stored: StoredQuantization | None, files: list[WeightFile]) -> None:
    """Give the model (on the meta device) the layers that the checkpoint or the `quant` option asks for."""
    if stored is not None:
        _place_stored(model, config, stored, files)
    elif config.scheme is not QuantScheme.none:
        assert not config.needs_calibration
        quantize_while_loading(model, config)
    if config.activations is Activations.auto:
        make_activations_auto(model)


def _place_stored(model: CausalLM, config: QuantConfig, stored: StoredQuantization, files: list[WeightFile]) -> None:
    if not files:
        raise UserError("model.weights=random makes float weights, but this checkpoint is quantised: leave it out")
    wanted = plan(model, config)
    schemes = place_stored_layers(model, stored, {name: shape for file in files for name, shape in file.shapes.items()})
    for file in files:
        if isinstance(file, CodedWeights):
            file.keep_codes(schemes)
    for name in wanted | schemes if wanted else ():
        given, held = (str(each.get(name, "a float")) for each in (wanted, schemes))
        if given != held:
            raise UserError(
                f"quant={config.scheme.name} contradicts the checkpoint, which is quantised already: {name} is {held} there, "
                f"not {given}: leave quant out, or give the float model"
            )


def _static_cache(
    model: CausalLM, config: QuantConfig, reader: ConfigReader, files: list[WeightFile]
) -> KVCacheFormat | None:
    """The format of a cache whose scales the checkpoint has, which get their places in the model (on the meta device); None of others."""
    stored = read_kv_cache_scheme(reader)
    if stored is None:
        if config.has_static_kv_cache:
            raise UserError(
                "quant.kv_cache_scales=static, but the checkpoint, which is quantised already, has no scales of the KV cache: "
                "give quant.kv_cache_scales=dynamic, or the float model"
            )
        return None
    given = config.kv_cache, config.kv_cache_scales
    if given not in ((KVCacheFormat.none, KVCacheScales.dynamic), (stored.format, KVCacheScales.static)):
        raise UserError(
            f"quant.kv_cache={given[0].name} with {given[1].name} scales contradicts the checkpoint, whose KV cache is "
            f"{stored.format.name} with static scales: leave quant.kv_cache out"
        )
    place_kv_scales(model, stored.per_head, {name: shape for file in files for name, shape in file.shapes.items()})
    return stored.format


def _cache_formats(
    model: CausalLM, config: QuantConfig, static: KVCacheFormat | None
) -> list[tuple[KVFormat, KVFormat]]:
    """Of each layer's keys and values."""
    if static:
        return static_kv_formats(model, static)
    return [FORMATS[config.kv_cache.name]] * len(model.attention_heads)


def find_and_open(config: ModelConfig) -> Checkpoint:
    """The checkpoint of `model.path`, its files verified where that is asked for. Raises UserError."""
    path = find_checkpoint(config.path, config.weights is Weights.checkpoint, config.allow_pickle)
    if config.verify:
        verify_manifest(path)
    return open_checkpoint(path, config.allow_pickle)


def is_quantized(config: ModelConfig) -> bool:
    """Whether the checkpoint of `model.path` is. Raises UserError where there is none."""
    path = find_checkpoint(config.path, config.weights is Weights.checkpoint, config.allow_pickle)
    checkpoint = open_checkpoint(path, config.allow_pickle)
    if checkpoint.path.suffix == ".gguf":  # only its tensors say it
        return read_gguf_quantization(checkpoint.open_weights({})) is not None
    return checkpoint.config.section("quantization_config") is not None


def _reserve_memory(
    config: DeviceConfig, model: CausalLM, widest: int, num_sequences: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes of a GPU that a step may take. Raises UserError where these and the weights (on the meta device) are more than is free."""
    if device.type != "cuda":
        return 0
    step = step_bytes(widest, model.config.vocab_size, dtype, config.max_batched_tokens, num_sequences)
    check_memory(weight_bytes(model, dtype), step, free_memory(device, config.memory_fraction), config.memory_fraction)
    return step


def _kv_cache(
    config: DeviceConfig,
    heads: list[Heads],
    max_num_sequences: int,
    context: ContextLimit,
    formats: list[tuple[KVFormat, KVFormat]],
    dtype: torch.dtype,
    device: torch.device,
    reserved: int,
) -> KVCache:
    block_size = config.block_size or BLOCK_SIZE[device.type]
    wanted_blocks = max_num_sequences * -(-context.num_tokens // block_size)
    free = max(0, free_memory(device, config.memory_fraction) - reserved)
    num_blocks = choose_num_blocks(heads, wanted_blocks, block_size, config.kv_cache_memory, free, formats, dtype)
    return allocate_kv_cache(heads, num_blocks, block_size, formats, dtype, device)


def prepared_device(config: DeviceConfig) -> torch.device:
    """The device, with the threads that its operators are to have."""
    device = _device(config)
    _refuse_options_of_others(config, device)
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    if device.type == "cpu":
        set_threads(config.threads)
    else:
        torch.cuda.set_per_process_memory_fraction(float(config.memory_fraction))
        torch.cuda.reset_peak_memory_stats(device)
    return device


def _refuse_options_of_others(config: DeviceConfig, device: torch.device) -> None:
    own = {"cpu": ("decode_threads",), "cuda": ("cuda_graphs", "memory_fraction")}
    (other,) = own.keys() - {device.type}
    for name in own[other]:
        value, default = getattr(config, name), getattr(DeviceConfig(), name)
        if value != default:
            here, remedy = (
                device.type.upper().replace("CUDA", "GPU"),
                f"leave it at {typed(default)}, or give device={other}",
            )
            raise UserError(f"device.{name}={typed(value)} is not used on a {here}: {remedy}")
    if config.decode_threads is not None and build.library() is None:
        raise UserError(
            f"device.decode_threads={config.decode_threads} needs the C++ kernels, which are off: leave it out"
        )


def _device(config: DeviceConfig) -> torch.device:
    if config.type is DeviceType.cuda and not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but torch sees no CUDA device: give device=cpu or device=auto, or check the driver with nvidia-smi"
        )
    if config.type is DeviceType.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.type.name)


def _context(config: ModelConfig, shape: ModelShape, reader: ConfigReader) -> ContextLimit:
    own = reader.raw("max_position_embeddings")
    stretched = own is not None and own != shape.context_length
    limit = ContextLimit(shape.context_length, f"{'stretched ' if stretched else ''}max_position_embeddings")
    if config.max_length is None:
        return limit
    if config.max_length > limit.num_tokens:
        raise UserError(
            f"model.max_length={config.max_length} is more than the model's {limit}: give at most {limit.num_tokens}"
        )
    return ContextLimit(config.max_length, "model.max_length")


def _tokenizer(config: ModelConfig, checkpoint: Checkpoint, vocab_size: int) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    own = config.tokenizer and Path(config.tokenizer).expanduser()
    tokenizer = open_tokenizer(own) if own else checkpoint.load_tokenizer()
    if own and tokenizer is None:
        raise UserError(
            f"model.tokenizer={config.tokenizer} is not a folder with tokenizer files: give such a folder, a GGUF file, or null for none"
        )
    if tokenizer and tokenizer.size > vocab_size:
        raise UserError(
            f"the tokenizer in {tokenizer.source} has ids up to {tokenizer.size - 1}, but the model's vocabulary is {vocab_size}: "
            "give model.tokenizer=PATH of the model's own, or null for none"
        )
    return tokenizer
