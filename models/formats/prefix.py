"""Read soft prefixes: trained keys and values, or embeddings, of virtual tokens before a prompt.

L layers, G key/value heads, D channels per head, P virtual tokens, E channels of an embedding.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.huggingface import SafetensorsFile

PADDLE = "pre_caches.npy"
PEFT_CONFIG, PEFT_WEIGHTS, PEFT_TENSOR = "adapter_config.json", "adapter_model.safetensors", "prompt_embeddings"
KEYS_AND_VALUES, EMBEDDINGS = "PREFIX_TUNING", ("PROMPT_TUNING", "P_TUNING")  # PEFT's names
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Prefix:
    """Virtual tokens: either `layers` or `embeddings`."""

    path: Path
    num_tokens: int
    first_position: int
    """Position of the prompt's first token."""
    digest: str
    """sha256 of the values and of `first_position`."""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values [P, G, D] of each layer, without rotary embedding, as attention reads them.

    If the model is sharded, these are still all layers and heads.
    """
    embeddings: Tensor | None = None
    """Input embeddings [P, E] of the virtual tokens, at positions from 0."""


def read_prefix(path: Path, model: CausalLM, model_type: str) -> Prefix:
    """Read PaddleNLP's pre_caches.npy (the file or its folder) or a PEFT folder. `model` may be on the meta device.

    Raises UserError for a file that is missing, damaged or for another model, and for a model that supports no prefix.
    """
    model.config.capabilities.refuse_recurrent("a soft prefix")
    if path.is_file() or (path / PADDLE).is_file():
        prefix = _read_paddle(path if path.is_file() else path / PADDLE, model)
    elif (path / PEFT_CONFIG).is_file():
        prefix = _read_peft(path, model)
    else:
        raise UserError(f"{path} holds no prefix: give a {PADDLE}, or a folder with {PADDLE} or {PEFT_CONFIG}")
    if reason := _unfit(model, prefix):
        raise UserError(f"{prefix.path} is not possible with model_type={model_type}, {reason}: leave the prefix out")
    return prefix


def _unfit(model: CausalLM, prefix: Prefix) -> str | None:
    capabilities = model.config.capabilities
    if capabilities.needs_whole_prompt and prefix.first_position:
        return "whose prompts begin at position 0 after a prefix, which PEFT's folders do not support"
    is_scaled = capabilities.keys_depend_on_length and not (capabilities.prefix_stops_scaling and prefix.layers)
    if is_scaled or capabilities.long_rope_threshold is not None:
        return "whose keys depend on the length of the text"
    if any(not heads.value_head_dim for heads in model.attention_heads):
        return "which caches latents instead of keys and values"
    if capabilities.has_windows:
        return "whose sliding windows would lose the prefix"
    if any(content.heads is None for content in model.layer_caches):
        return "some of whose layers read the keys and values of earlier layers"
    return None


def _read_paddle(path: Path, model: CausalLM) -> Prefix:
    """Read PaddleNLP's float array [L, 2, G, P, D] of keys and values. The prompt's positions begin at 0."""
    try:
        array = npy.open_memmap(path, mode="r")  # rejects pickles, and uses no more memory than the file's size
    except Exception as error:  # a damaged header can raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged or not a numpy array ({type(error).__name__}: {reason})") from error
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise UserError(f"{path} holds {array.dtype}: give an array of float16, float32 or float64")
    shape, num_tokens = array.shape, max(1, array.shape[3]) if array.ndim == 5 else 1
    _check_shape(path, shape, model, lambda num_layers, g, d: (num_layers, 2, g, num_tokens, d), "[L, 2, G, P, D]")
    values = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    layers = [(layer[0].transpose(0, 1), layer[1].transpose(0, 1)) for layer in values]
    return Prefix(path, num_tokens, 0, _digest(path, "keys and values", 0, values), layers)


def _read_peft(folder: Path, model: CausalLM) -> Prefix:
    """Read PEFT's `prompt_embeddings`, which holds the encoder's output in all variants.

    The prompt's positions begin at P.
    """
    config, path = ConfigReader.from_folder(folder, PEFT_CONFIG), folder / PEFT_WEIGHTS
    kind = config.expect("peft_type", (KEYS_AND_VALUES, *EMBEDDINGS), None)
    config.expect("num_transformer_submodules", (1, None), None)
    if not path.is_file():
        raise UserError(f"{folder} has no {PEFT_WEIGHTS}: save the adapter as safetensors")
    file = SafetensorsFile(path)
    if file.shapes.keys() != {PEFT_TENSOR} or file.dtypes[PEFT_TENSOR] not in FLOATS:
        raise UserError(f"{path} holds {', '.join(file.shapes) or 'nothing'}: give one float tensor {PEFT_TENSOR}")
    ((_, values),) = file.read([PEFT_TENSOR])
    num_tokens = len(values) if values.ndim else 0
    if num_tokens != (num_in_config := config.count("num_virtual_tokens")):
        raise UserError(f"{path} has {num_tokens} virtual tokens, but {PEFT_CONFIG} num_virtual_tokens={num_in_config}")
    digest = _digest(path, "keys and values" if kind == KEYS_AND_VALUES else "embeddings", num_tokens, values)
    if kind in EMBEDDINGS:
        expected = num_tokens, model.embedding.embedding_dim
        if values.shape != expected:
            raise UserError(
                f"{path} is {list(values.shape)}, but the model's embeddings need [P, E] = {list(expected)}"
            )
        return Prefix(path, num_tokens, num_tokens, digest, [], values)
    shape = tuple(values.shape)
    _check_shape(
        path, shape, model, lambda num_layers, g, d: (num_tokens, 2 * num_layers * g * d), "[P, L * 2 * G * D]"
    )
    heads, num_layers = model.attention_heads[0], model.config.num_hidden_layers
    layers = values.view(num_tokens, num_layers, 2, heads.whole_keys, heads.head_dim).unbind(1)
    return Prefix(path, num_tokens, num_tokens, digest, [(layer[:, 0], layer[:, 1]) for layer in layers])


def _check_shape(
    path: Path, stored: tuple[int, ...], model: CausalLM, shape: Callable[[int, int, int], tuple[int, ...]], names: str
) -> None:
    """Raise UserError unless `stored` equals `shape(L, G, D)` of the model."""
    sizes = {(heads.whole_keys, heads.head_dim, heads.value_head_dim) for heads in model.attention_heads}
    (g, d, value_d), *other_sizes = sizes
    num_layers = model.config.num_hidden_layers
    expected = shape(num_layers, g, d)
    if stored != expected or other_sizes or (value_d and value_d != d):
        numbers = f"L={num_layers}, G={g}, D={d}"
        raise UserError(f"{path} is {list(stored)}, but the model needs {names} = {list(expected)} ({numbers})")


def _digest(path: Path, kind: str, first_position: int, values: Tensor) -> str:
    if not values.isfinite().all():
        raise UserError(f"{path} holds NaN or infinite numbers")
    head = f"{kind} {first_position} {list(values.shape)} {values.dtype} ".encode()
    return hashlib.sha256(head + values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
