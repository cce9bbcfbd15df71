"""Shard a model for one rank. The results have the same bits as one process, except with `adds`.

Every linear layer is sharded along its outputs. Row-parallel layers, which write into the residual stream, receive
sharded inputs: the ranks gather the inputs before the product and the outputs after it. Each output is then one sum
over all inputs, as in one process. If the parallel layout `adds`, such a layer is sharded along its inputs if its
weight allows it, and the ranks' products are added. The bits then depend on the number of ranks.

Experts of a mixture are sharded like other feed-forward layers, or each expert is whole on one rank. Embedding and head
are sharded along the vocabulary. Keys and values are stored on the ranks of their heads. If there are more ranks than
key heads, a key head is replicated on several ranks.
"""

import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from conf.errors import UserError
from kernels.collectives import NO_NEIGHBOURS, Group, Link, Neighbours
from models.causal_lm import CausalLM
from models.heads import NoHead
from models.layers.attention import Heads
from models.layers.embedding import Embedding
from models.layers.linear import Linear, tied_embedding
from models.layers.missing import MissingLayer
from models.layers.moe import Experts
from models.layers.named_parts import register
from models.layers.tensor_parallel import (
    ExpertParallel,
    RowParallelGather,
    RowParallelReduce,
    ShardedChannels,
    VocabParallel,
)
from models.layout import Unit
from models.sharding import (
    HeadShard,
    ParallelLayout,
    Shard,
    shard,
    shard_channels,
    shard_heads,
    shard_inputs,
    shard_outputs,
    stages,
)
from models.weights import module_bytes

log = logging.getLogger(__name__)


def shard_model(
    model: CausalLM,
    parallel_layout: ParallelLayout,
    group: Group,
    dtype: torch.dtype,
    neighbours: Neighbours = NO_NEIGHBOURS,
) -> dict[str, Shard]:
    """Shard a model on the meta device for one rank. The linear layers already have the methods that will load them.

    `group` is the group of the rank's stage. `neighbours` connect the stage to the previous and the next one. `dtype`
    is the model's dtype. A multi-token prediction layer is replicated on every rank. Returns the shards of the
    checkpoint's tensors by the model's names; tensors without an entry are read whole.

    Raises UserError for more ranks than heads, channels or experts, for whole experts in a model without experts, and
    for more stages than layers. Logs a warning if the layout `adds`, but some layers cannot.
    """
    if parallel_layout.whole_experts:
        check_experts(model, parallel_layout.tp)
    if parallel_layout.pp > 1:
        width = model.stream_width
        _keep_stage(model, stage_layers(model, parallel_layout.pp, dtype)[parallel_layout.stage])
        model.before, model.after = (None if pair is None else Link(pair, width) for pair in neighbours)
    if parallel_layout.tp == 1:
        return {}
    shards: dict[str, Shard] = {}
    for number in model.local_layers:
        sharded_layer = _ShardedLayer(model, model.layers[number], parallel_layout, group)
        shards |= {
            f"{model.layout.layers}.{number}.{name_in_layer}": shard
            for name_in_layer, shard in sharded_layer.shards.items()
        }
    if parallel_layout.adds:
        _warn_of_gathering(model)
    return shards | _shard_vocabulary(model, parallel_layout, group)


def stage_layers(model: CausalLM, pp: int, dtype: torch.dtype) -> list[range]:
    """Return the layers of each of `pp` pipeline stages. The bytes of the largest stage are minimal.

    The first stage has the embedding, the last stage has final norm, head and a tied embedding. Raises UserError for
    more stages than layers, and for a multi-token prediction layer, which would need the embedding in the last stage.
    """
    if model.config.capabilities.predicts_ahead:
        raise UserError(f"decode.speculate=mtp is not supported with pp={pp}: leave it out, or give pp=1")
    prefix, (before, after) = f"{model.layout.layers}.", _modules_around_layers(model)
    sizes = module_bytes(model, dtype)
    layers = [0] * model.config.num_hidden_layers
    for name, size in sizes.items():
        if name.startswith(prefix):
            layers[int(name.removeprefix(prefix).partition(".")[0])] += size
    first, last = (sum(sizes.get(name, 0) for name in names) for names in (before, after))
    last += sizes[model.layout.embedding] if tied_embedding(model.head) else 0
    return stages(layers, first, last, pp, model.config.shared_caches)


def check_layout(model: CausalLM, parallel_layout: ParallelLayout, dtype: torch.dtype) -> None:
    """Raise UserError for more ranks than heads or whole experts, and more stages than layers."""
    if parallel_layout.whole_experts:
        check_experts(model, parallel_layout.tp)
    if parallel_layout.pp > 1:
        stage_layers(model, parallel_layout.pp, dtype)
    for heads in model.attention_heads:
        shard_heads(heads.num_attention_heads, heads.num_key_value_heads, parallel_layout.tp, parallel_layout.tp_rank)
    for recurrent in filter(None, map(model.recurrent_module, model.layers)):
        recurrent.check_ranks(parallel_layout.tp)  # type: ignore[operator]


def check_experts(model: CausalLM, tp: int) -> None:
    """Raise UserError if a mixture has fewer experts than there are ranks, or if the model has no mixture."""
    numbers = [len(module) for module in model.modules() if isinstance(module, Experts)]
    if not numbers:
        raise UserError(
            "parallel.experts=whole needs a mixture of experts, which this model does not have: leave it out"
        )
    if tp > min(numbers):
        raise UserError(
            f"tp={tp} is more than the {min(numbers)} experts of a layer of this model: give parallel.experts=split, or at most "
            f"tp={min(numbers)}"
        )


def _warn_of_gathering(model: CausalLM) -> None:
    forms = [module.row_parallel for module in model.modules() if isinstance(module, Linear)]
    num_gathering = sum(isinstance(form, RowParallelGather) for form in forms)
    if num_gathering:
        log.warning(
            "parallel.sum=reduce: %d of %d layers gather their inputs, because the groups, blocks or order of the inputs, "
            "or the scales of their activations, cannot be sharded",
            num_gathering,
            sum(form is not None for form in forms),
        )


def _modules_around_layers(model: CausalLM) -> tuple[list[str], list[str]]:
    """Return the names of the leaf modules before and after the list of layers."""
    prefix = model.layout.layers
    leaves = [name for name, module in model.named_modules() if name == prefix or not [*module.children()]]
    middle = leaves.index(prefix)
    return leaves[:middle], [name for name in leaves[middle:] if not f"{name}.".startswith(f"{prefix}.")]


def _keep_stage(model: CausalLM, layers: range) -> None:
    """Replace the modules of other stages by `MissingLayer`. Lists keep their length, so that names do not change."""
    before, after = _modules_around_layers(model)
    absent = [
        f"{model.layout.layers}.{number}" for number in range(model.config.num_hidden_layers) if number not in layers
    ]
    is_first, is_last = layers.start == 0, layers.stop == model.config.num_hidden_layers
    if not is_first:
        absent += [
            name for name in before if not (is_last and tied_embedding(model.head) and name == model.layout.embedding)
        ]
    if not is_last:
        absent += [
            name for name in after if not isinstance(model.get_submodule(name), NoHead)
        ]  # NoHead defines the width of the outputs
    model.other_caches = {number: content for number, content in enumerate(model.layer_caches) if number not in layers}
    for name in absent:
        register(model, name, MissingLayer())
    model.local_layers = layers


class _Mixer(NamedTuple):
    """The attention or the recurrent module that a module of a layer is part of."""

    module: Any = None
    num_heads: tuple[int, int] | None = None
    """The numbers of query heads and of key heads, or of their counterparts."""
    shards_itself: bool = False
    """Whether it shards its linear layers, except row-parallel ones."""


NO_MIXER = _Mixer()


class _ShardedLayer:
    """Shards one decoder layer in place."""

    def __init__(self, model: CausalLM, layer: nn.Module, parallel_layout: ParallelLayout, group: Group) -> None:
        self._layout, self._parallel_layout, self._group = model.layout, parallel_layout, group
        self.shards: dict[str, Shard] = {}
        """Keyed by the tensor's name within the layer."""
        attention, recurrent = model.attention_module(layer), model.recurrent_module(layer)
        mixers: dict[nn.Module, _Mixer] = {}  # by each module in them
        if attention is not None:
            heads: Heads = attention.heads  # type: ignore[assignment]
            numbers = heads.num_attention_heads, heads.num_key_value_heads
            mixers |= dict.fromkeys(attention.modules(), _Mixer(attention, numbers))
        if recurrent is not None:
            mixer = _Mixer(recurrent, recurrent.num_heads, shards_itself=True)  # type: ignore[arg-type]
            mixers |= dict.fromkeys(recurrent.modules(), mixer)
            shards: dict[str, Shard] = recurrent.shard(parallel_layout.tp, parallel_layout.tp_rank)  # type: ignore[operator]
            self.shards |= {f"{self._layout.recurrent}.{tensor}": shard for tensor, shard in shards.items()}
        if parallel_layout.whole_experts:
            self._shard_experts(layer)
        in_experts = _modules_of_experts(layer) if parallel_layout.whole_experts else set()
        for name, module in list(layer.named_modules()):
            last = name.rpartition(".")[2]
            is_whole = module in in_experts or last in self._layout.replicated
            mixer = mixers.get(module, NO_MIXER)
            is_sharded = mixer.shards_itself and last not in self._layout.row_parallel
            if isinstance(module, Linear) and not is_whole and not is_sharded:
                self._shard_linear(name, module, layer.get_submodule(name.rpartition(".")[0]), mixer)
        if attention is not None:
            self._shard_heads(attention, heads)

    def _shard_heads(self, attention: nn.Module, heads: Heads) -> None:
        numbers = heads.num_attention_heads, heads.num_key_value_heads
        head_shard = shard_heads(*numbers, self._parallel_layout.tp, self._parallel_layout.tp_rank)
        self._shard_head_parameters(attention, heads, head_shard)
        attention.heads = replace(  # type: ignore[assignment]
            heads,
            num_attention_heads=len(head_shard.queries),
            num_key_value_heads=len(head_shard.keys),
            first=head_shard.queries.start,
            first_key=head_shard.keys.start,
            num_whole_keys=heads.num_key_value_heads,
        )

    def _shard_linear(self, name: str, layer: Linear, parent: Any, mixer: _Mixer) -> None:
        last, (outputs, inputs) = name.rpartition(".")[2], layer.shape
        tp, units = self._parallel_layout.tp, self._layout.units.get(last, (Unit.CHANNEL,))
        if last in self._layout.row_parallel:
            input_ranges = shard_inputs(inputs, mixer.num_heads, tp)
            gathered: ShardedChannels | None = ShardedChannels(self._group, tuple(map(len, input_ranges)))
            if hasattr(parent, "rank_inputs"):
                parent.rank_inputs, gathered = gathered, None
            elif (
                self._parallel_layout.adds
                and (shards := layer.shard_inputs(input_ranges, self._parallel_layout.tp_rank)) is not None
            ):
                layer.row_parallel = RowParallelReduce(self._group)
                self.shards |= {f"{name}.{tensor}": shard for tensor, shard in shards.items()}
                return
            widths = tuple(len(shard_channels(outputs, tp, rank)) for rank in range(tp))
            layer.row_parallel = RowParallelGather(gathered, ShardedChannels(self._group, widths))
        output_ranges = shard_outputs(units, outputs, mixer.num_heads, tp, self._parallel_layout.tp_rank)
        self.shards |= {f"{name}.{tensor}": shard for tensor, shard in layer.shard(output_ranges).items()}

    def _shard_experts(self, layer: nn.Module) -> None:
        tp = self._parallel_layout.tp
        for experts in [module for module in layer.modules() if isinstance(module, Experts)]:
            experts.keep(ExpertParallel(self._group, tuple(shard(len(experts), tp, rank) for rank in range(tp))))

    def _shard_head_parameters(self, attention: nn.Module, heads: Heads, head_shard: HeadShard) -> None:
        """Shard the attention module's own parameters that have one value per key head. Scalars stay whole."""
        for name, parameter in attention.named_parameters(recurse=False):
            if parameter.ndim and len(parameter) == heads.num_key_value_heads:
                shard = Shard(0, (head_shard.keys,))
                shape = shard.shape(tuple(parameter.shape))
                setattr(attention, name, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
                self.shards[f"{self._layout.attention}.{name}"] = shard


def _modules_of_experts(layer: nn.Module) -> set[nn.Module]:
    return {module for experts in layer.modules() if isinstance(experts, Experts) for module in experts.modules()}


def _shard_vocabulary(model: CausalLM, parallel_layout: ParallelLayout, group: Group) -> dict[str, Shard]:
    """Shard the embedding and the vocabulary head, if the stage has them. A classification head stays whole."""
    vocab_size, layout = model.config.vocab_size, model.layout
    vocabulary_ranges = tuple(
        shard_channels(vocab_size, parallel_layout.tp, rank) for rank in range(parallel_layout.tp)
    )
    embedding, head, rank_vocabulary = model.embedding, model.head, (vocabulary_ranges[parallel_layout.tp_rank],)
    shards: dict[str, Shard] = {}
    if isinstance(embedding, Embedding):
        embedding.words = VocabParallel(group, vocabulary_ranges)
        shards |= {f"{layout.embedding}.{tensor}": shard for tensor, shard in embedding.shard(rank_vocabulary).items()}
    if isinstance(head, Linear):
        if head.shape[0] != vocab_size:  # classification labels
            return shards
        shards |= {f"{layout.head}.{tensor}": shard for tensor, shard in head.shard(rank_vocabulary).items()}
    elif [*head.parameters()]:
        shards[f"{layout.head}.weight"] = _shard_rows(head, rank_vocabulary)
    else:
        return shards
    model.vocabulary = ShardedChannels(group, tuple(map(len, vocabulary_ranges)))
    return shards


def _shard_rows(module: nn.Module, ranges: tuple[range, ...]) -> Shard:
    shard, weight = Shard(0, ranges), module.get_parameter("weight")
    module.weight = nn.Parameter(torch.empty(shard.shape(tuple(weight.shape)), device=weight.device))
    return shard
