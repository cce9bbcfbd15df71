"""Read Meta's layout of Llama checkpoints: params.json, and slices of matrices in consolidated.00.pth, .01.pth, ...

Each file has one slice of every matrix. The result is in Hugging Face's terms: config.json keys, and whole weights with
its names, shapes and row order.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.base import Checkpoint, WeightFile
from models.formats.huggingface import GENERATION_CONFIG, PickleFile
from models.formats.rotary_rows import deinterleave_rows
from models.tokenizers import load_tokenizer

PARAMS = "params.json"
FIRST = "consolidated.00.pth"
ROWS, COLUMNS = 0, 1  # the sharded axis of a matrix
MODULES = {  # by Meta's name: our name, and the sharded axis
    "norm": ("model.norm", None),
    "output": ("lm_head", ROWS),
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", ROWS),
    "attention.wk": ("self_attn.k_proj", ROWS),
    "attention.wv": ("self_attn.v_proj", ROWS),
    "attention.wo": ("self_attn.o_proj", COLUMNS),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", ROWS),
    "feed_forward.w2": ("mlp.down_proj", COLUMNS),
    "feed_forward.w3": ("mlp.up_proj", ROWS),
}
# The number of tensors that are read before the shard files are closed, about one layer. Mapped pages stay resident
# until then. Opening a file of 720 tensors takes 60 ms, and a model with 70 billion parameters has 8 of them.
AT_ONCE = 9
EMBEDDING = "tok_embeddings.weight"
LLAMA3_VOCAB = 128256
LLAMA3_EOS = [128001, 128008, 128009]  # end of text, end of message and end of turn, at which Meta's code stops
COMPUTED = "rope.freqs"  # angles that Llama 1 and 2 store too


def is_meta_layout(folder: Path) -> bool:
    return (folder / PARAMS).is_file() and not (folder / "config.json").is_file()


def open_meta(folder: Path, allow_pickle: bool) -> Checkpoint:
    return Checkpoint(
        folder,
        read_meta_config(folder, allow_pickle),
        read_json(folder / GENERATION_CONFIG),
        lambda expected: open_meta_shards(folder, allow_pickle),
        partial(load_tokenizer, folder),
    )


def read_meta_config(folder: Path, allow_pickle: bool) -> ConfigReader:
    """Return params.json as config.json keys. The tensors give the vocabulary size, and whether there is a head.

    Raises UserError for a wrong type or size, and for features that Llama 1 to 3.2 do not have.
    """
    params = ConfigReader.from_folder(folder, PARAMS)
    dim, heads, groups = _sizes(params)
    for key in ("quantization_args", "lora_args", "moe_args", "vision_model"):
        params.expect(key, (None,), None)
    for key in ("vision_chunk_size", "vision_num_cross_attention_layers"):
        params.expect(key, (None, -1), None)
    multiple = params.count("multiple_of", 256)
    multiplier = params.positive("ffn_dim_multiplier", 1.0)
    shapes = open_meta_shards(folder, allow_pickle)[0].shapes
    vocab_size = params.get("vocab_size", int, -1)
    embedding_rows = shapes.get("model.embed_tokens.weight", (1,))[0]
    eps, theta = params.positive("norm_eps", 1e-5), params.positive("rope_theta", 10000.0)
    scaled = params.get("use_scaled_rope", bool, False)
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": -(-int(multiplier * int(8 * dim / 3)) // multiple) * multiple,
        "num_hidden_layers": params.count("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "rms_norm_eps": eps,
        "vocab_size": embedding_rows if vocab_size == -1 else vocab_size,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(dim) if scaled else None,
        "eos_token_id": LLAMA3_EOS if embedding_rows == LLAMA3_VOCAB else None,
        "max_position_embeddings": params.count("max_seq_len", _context_length(theta, scaled, eps)),
    }
    params.raw("max_batch_size")
    values |= {key: params.raw(key) for key in params.unread()}
    return ConfigReader({key: value for key, value in values.items() if value is not None}, str(folder / PARAMS))


def _sizes(params: ConfigReader) -> tuple[int, int, int]:
    dim, heads = params.count("dim"), params.count("n_heads")
    groups = params.count("n_kv_heads", heads)
    if dim % (2 * heads):
        raise UserError(f"{PARAMS}: dim={dim} cannot be divided into n_heads={heads} heads of an even size")
    if heads % groups:
        raise UserError(f"{PARAMS}: n_heads={heads} is not a multiple of n_kv_heads={groups}")
    return dim, heads, groups


def _rope_scaling(dim: int) -> dict[str, Any]:
    """Return the constants of Meta's code.

    Models with fewer than 4096 channels are Llama 3.2, whose config.json on the hub has another factor.
    """
    return {
        "rope_type": "llama3",
        "factor": 8.0 if dim >= 4096 else 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _context_length(theta: float, scaled: bool, eps: float) -> int:
    """Return the default context length, for a params.json without it.

    Llama 3.1, 3, Code Llama, 2 and 1 are distinguished by their other parameters.
    """
    if scaled:
        return 131072
    if theta > 10000:
        return 8192 if theta == 500000 else 16384
    return 4096 if eps == 1e-5 else 2048


def open_meta_shards(folder: Path, allow_pickle: bool) -> list[WeightFile]:
    """Open all shards as one file. Raises UserError if a shard is missing or damaged, or if pickles are not allowed."""
    names = sorted(file.name for file in folder.glob("consolidated.*.pth"))
    expected = [f"consolidated.{i:02}.pth" for i in range(len(names))]
    if missing := next((name for name in expected or [FIRST] if name not in names), None):
        raise UserError(f"{folder} has {PARAMS}, but {missing} is missing (found: {', '.join(names) or 'none'})")
    if not allow_pickle:
        raise UserError(
            f"{folder} has only pickled weights ({FIRST}), which can hold code: convert them to safetensors, "
            "or give model.allow_pickle=true to read them with weights_only=True"
        )
    _, heads, groups = _sizes(params := ConfigReader.from_folder(folder, PARAMS))
    return [MetaShards([PickleFile(folder / name) for name in names], params.count("dim"), heads, groups)]


class MetaShards:
    """The merged tensors of all shards.

    Memory holds one tensor at a time, and the mapped pages of up to AT_ONCE tensors.
    """

    is_mapped = False

    def __init__(self, shards: list[PickleFile], dim: int, heads: int, groups: int) -> None:
        self.path = shards[0].path
        self._shards = shards
        self._heads = {"q_proj": heads, "k_proj": groups}
        for shard in shards[1:]:
            if (shard.shapes, shard.dtypes) != (shards[0].shapes, shards[0].dtypes):
                differences = (
                    shard.shapes.items() ^ shards[0].shapes.items() | shard.dtypes.items() ^ shards[0].dtypes.items()
                )
                differing = min(name for name, _ in differences)
                raise UserError(
                    f"{shard.path} and {self.path.name} are not of the same model: they differ in {differing}"
                )
        self._sources: dict[str, tuple[str, int | None]] = {}  # our name: Meta's name, and the sharded axis
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for source, shape in shards[0].shapes.items():
            if source.endswith(COMPUTED):
                continue
            # Llama 1 and 2 shard the embedding's channels, Llama 3 its vocabulary.
            name, shard_axis = _our_name(source, ROWS if shape[-1:] == (dim,) else COLUMNS)
            self._sources[name] = source, shard_axis
            if shard_axis is not None and len(shape) != 2:
                raise UserError(f"{self.path}: {source} has {len(shape)} dimensions, expected 2")
            self.shapes[name] = tuple(n * len(shards) if i == shard_axis else n for i, n in enumerate(shape))
            self.dtypes[name] = shards[0].dtypes[source]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        requested = list(names)
        for start in range(0, len(requested), AT_ONCE):
            group = requested[start : start + AT_ONCE]
            streams = [shard.read(self._sources[name][0] for name in group) for shard in self._shards]
            for name, pieces in zip(group, zip(*streams, strict=True), strict=True):
                shard_axis = self._sources[name][1]
                tensors = [tensor for _, tensor in pieces]
                joined = tensors[0].clone() if shard_axis is None else torch.cat(tensors, dim=shard_axis)
                yield name, self._reorder(name, joined)

    def _reorder(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of queries and keys.

        Meta's rotary embedding pairs rows (2i, 2i + 1) of a head, ours pairs (i, i + D / 2).
        """
        heads = self._heads.get(name.split(".")[-2]) if name.endswith("_proj.weight") else None
        if heads is None:
            return tensor
        if tensor.shape[0] % (2 * heads):
            raise UserError(
                f"{self.path}: {name} has {tensor.shape[0]} rows, which cannot be divided into {heads} heads of an even size"
            )
        return deinterleave_rows(tensor, heads)


def _our_name(source: str, embedding_axis: int) -> tuple[str, int | None]:
    """Return Hugging Face's name and the sharded axis. Keeps an unknown name, which is rejected later."""
    if source == EMBEDDING:
        return "model.embed_tokens.weight", embedding_axis
    parts = source.split(".")
    is_layer = parts[0] == "layers"
    module = ".".join(parts[2 if is_layer else 0 : -1])
    if module not in MODULES or parts[-1] != "weight" or is_layer == (module in ("norm", "output")):
        return source, None
    hf_module, shard_axis = MODULES[module]
    return (f"model.layers.{parts[1]}.{hf_module}.weight" if is_layer else f"{hf_module}.weight"), shard_axis
