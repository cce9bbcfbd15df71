"""Write export.json: describe a traced model, or a rank's part, as `description.py` reads it.

N blocks of B slots, G key/value heads.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kernels.kv_format import PARTS, PagedVectors
from models.adapters import adaptable_layers
from models.batch import AnyCache, KVCache, attention_cache, layer_states
from models.causal_lm import CausalLM, unread_embeddings
from models.exported.description import EXPORT, Mixture, instruction_set, part_folder, sha256_of
from models.exported.functions import schemas
from models.exported.shard import describe_part
from models.layers.missing import MissingLayer
from models.layers.moe import Experts
from models.sharding import ParallelLayout


def describe_layout(folder: Path, tp: int, pp: int) -> dict[str, Any]:
    """Return the content of export.json for a folder with the parts of all ranks."""
    files = [part_folder(Path(), ParallelLayout(tp, pp, rank % tp, rank // tp)) / EXPORT for rank in range(tp * pp)]
    return {"tp": tp, "pp": pp, "sha256": {str(file): sha256_of(folder / file) for file in files}}


def describe(
    model: CausalLM,
    cache: KVCache,
    weights: Sequence[Mapping[str, Tensor]],  # of the graph without adapters, and of the graph with adapters
    quant: dict[str, Any],
    eos: frozenset[int],
    hidden_size: int,
    sha256: dict[str, str],  # of the graph files, by file name
    parallel_layout: ParallelLayout,
) -> dict[str, Any]:
    """Return the content of export.json for a traced model, or for a rank's part."""
    shape, (base_weights, adapted_weights) = model.config, weights
    capabilities = shape.capabilities
    model_addresses = {tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}
    mixtures = [module for module in model.modules() if isinstance(module, Experts)]
    mixture_entries = [
        asdict(Mixture(_num_bytes(experts), len(experts), experts.num_experts_per_tok)) for experts in mixtures
    ]
    has_embedding = not isinstance(model.embedding, MissingLayer)
    unread = sum(map(_num_bytes, unread_embeddings(model)))
    return {
        "hidden_size": hidden_size,
        "embedding_dim": model.embedding.embedding_dim if has_embedding else hidden_size,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "context_length": shape.context_length,
        "needs_whole_prompt": capabilities.needs_whole_prompt,
        "keys_depend_on_length": capabilities.keys_depend_on_length,
        "key_border": capabilities.long_rope_threshold,
        "has_windows": capabilities.has_windows,
        "prefix_stops_scaling": capabilities.prefix_stops_scaling,
        "dtype": str(cache.dtype).removeprefix("torch."),
        "eos_token_ids": sorted(eos),
        "instruction_set": instruction_set(),
        "operators": schemas(),
        **_describe_cache(model, cache, base_weights),
        "step_bytes": _num_bytes(model) - unread - sum(map(_num_bytes, mixtures)),
        "mixtures": mixture_entries,
        "quant": quant,
        "weights": list(base_weights),
        "constants": [name for name, weight in base_weights.items() if weight.data_ptr() not in model_addresses],
        "adapted_weights": list(adapted_weights),
        "linears": {name: layer.whole_shape for name, layer in adaptable_layers(model).items()},
        "head": model.layout.head,
        "sha256": sha256,
        "prompt_marks": [[*ids] for ids in model.prompt_marks],
    } | ({"part": describe_part(model, parallel_layout)} if parallel_layout.tp * parallel_layout.pp > 1 else {})


def _describe_cache(model: CausalLM, cache: KVCache, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries of export.json for the cache.

    `cache` has two entries for each layer, which are null if the layer has no keys and values. A model without recurrent
    layers has no entry `states`. `windows` has an entry for each layer of the whole model. A model without windows lacks
    it.
    """
    scales = {weight.data_ptr(): name for name, weight in weights.items()}
    sides = [attention_cache(layer) or (None, None) for layer in cache.layers]
    formats = [_cache_format(vectors, scales) for vectors in itertools.chain(*sides)]
    entries: dict[str, Any] = {"cache": formats}
    if model.config.capabilities.is_recurrent:
        entries["states"] = [_states(layer) for layer in cache.layers]
    if model.longest_window is not None:
        contents = {**model.other_caches, **dict(zip(model.local_layers, model.layer_caches, strict=True))}
        entries["windows"] = [contents[number].window for number in sorted(contents)]
    return entries


def _states(layer: AnyCache) -> list[dict[str, Any]]:
    """Describe a layer's recurrent states for export.json."""
    return [
        {"shape": [*tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}
        for tensor in layer_states(layer)
    ]


def _cache_format(vectors: PagedVectors | None, scales: dict[int, str]) -> dict[str, Any] | None:
    """Describe a layer's keys or values for export.json. `scales`: weight names by data pointer."""
    if vectors is None:
        return None
    _, format, static, channels, _ = PARTS.flatten(vectors)
    name = None if static is None else scales[static.data_ptr()]
    return {"num_heads": vectors.tensors[0].shape[2], "channels": channels, "format": format, "scales": name}


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
