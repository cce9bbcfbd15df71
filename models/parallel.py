"""A rank's part of a model. Every rank has the bits of one process.

Every linear layer is cut along its outputs. Those that write into the residual stream, whose inputs come in pieces, put these together
before their product and what they give after it, so that each output is one sum over all inputs, as in one process. Nothing is added
across ranks. Embedding and head are cut along the vocabulary; keys and values belong to the ranks of their heads, and where ranks outnumber
these, to several.
"""

import torch
from torch import nn

from conf.errors import UserError
from kernels.collectives import Group
from models.causal_lm import CausalLM
from models.cuts import Cut, Division, HeadShare, share_channels, share_heads, share_outputs, stages
from models.layers.absent import Absent
from models.layers.attention import Heads
from models.layers.embedding import Embedding
from models.layers.linear import Linear, tied_weight
from models.layers.named_parts import register
from models.layers.pieces import OwnedWords, Pieces, RowPieces
from models.layout import Unit
from models.weights import module_bytes


def divide(model: CausalLM, division: Division, group: Group, dtype: torch.dtype) -> dict[str, Cut]:
    """Keep a rank's part of a model on the meta device, whose layers are held as they will be loaded, in a model of `dtype`.

    `group` is that of the rank's stage. A layer that predicts ahead is whole on every rank. Returns how the checkpoint's tensors are cut,
    by the model's names; others are read whole.
    Raises UserError for more ranks than heads or channels, and for more stages than layers.
    """
    if division.pp > 1:
        _keep_stage(model, stage_layers(model, division.pp, dtype)[division.stage])
    if division.tp == 1:
        return {}
    cuts: dict[str, Cut] = {}
    for number in model.own_layers:
        divided = _DividedLayer(model, model.layers[number], division, group)
        cuts |= {f"{model.layout.layers}.{number}.{own}": cut for own, cut in divided.cuts.items()}
    return cuts | _divide_vocabulary(model, division, group)


def stage_layers(model: CausalLM, pp: int, dtype: torch.dtype) -> list[range]:
    """Return the layers of each of `pp` stages of a model on the meta device. The largest stage has the fewest bytes.

    The embedding is of the first stage, final norm and head are of the last, which has a tied embedding, too. Raises UserError for more
    stages than layers, and for a layer that predicts ahead, which would need the embedding in the last stage.
    """
    if model.config.predicts_ahead:
        raise UserError(f"pp={pp} has no layer that predicts ahead: leave decode.speculate=mtp out, or give pp=1")
    prefix, (before, after) = f"{model.layout.layers}.", _outside(model)
    sizes = module_bytes(model, dtype)
    layers = [0] * model.config.num_hidden_layers
    for name, size in sizes.items():
        if name.startswith(prefix):
            layers[int(name.removeprefix(prefix).partition(".")[0])] += size
    first, last = (sum(sizes.get(name, 0) for name in names) for names in (before, after))
    return stages(layers, first, last + (sizes[model.layout.embedding] if _is_tied(model) else 0), pp)


def _outside(model: CausalLM) -> tuple[list[str], list[str]]:
    """Return the names of the modules with parameters, or a tied one, before and after the list of layers."""
    prefix = model.layout.layers
    leaves = [name for name, module in model.named_modules() if name == prefix or not [*module.children()]]
    middle = leaves.index(prefix)
    return leaves[:middle], [name for name in leaves[middle:] if not f"{name}.".startswith(f"{prefix}.")]


def _is_tied(model: CausalLM) -> bool:
    return tied_weight(model.head) is not None or isinstance(model.head, Linear) and model.head.embedding is not None


def _keep_stage(model: CausalLM, own: range) -> None:
    """Put `Absent` in the place of what other stages have. Lists of layers keep their length, so that names stay."""
    before, after = _outside(model)
    absent = [
        f"{model.layout.layers}.{number}" for number in range(model.config.num_hidden_layers) if number not in own
    ]
    is_first, is_last = own.start == 0, own.stop == model.config.num_hidden_layers
    if not is_first:
        absent += [name for name in before if not (is_last and _is_tied(model) and name == model.layout.embedding)]
    if not is_last:
        absent += after
    for name in absent:
        register(model, name, Absent())
    model.own_layers = own


class _DividedLayer:
    """A decoder layer that becomes a rank's."""

    def __init__(self, model: CausalLM, layer: nn.Module, division: Division, group: Group) -> None:
        self._layout, self._division, self._group = model.layout, division, group
        self.cuts: dict[str, Cut] = {}
        """By the tensors' names in the layer."""
        attention = layer.get_submodule(self._layout.attention)
        heads: Heads = attention.heads  # type: ignore[assignment]
        self._num_heads = heads.num_attention_heads, heads.num_key_value_heads
        self._shares = [share_heads(*self._num_heads, division.tp, rank) for rank in range(division.tp)]
        of_attention = {module for module in attention.modules() if isinstance(module, Linear)}
        for name, module in list(layer.named_modules()):
            if isinstance(module, Linear) and name.rpartition(".")[2] not in self._layout.replicated:
                self._divide(name, module, module in of_attention)
        own = self._shares[division.tp_rank]
        self._divide_scales(attention, own)
        attention.heads = Heads(  # type: ignore[assignment]
            len(own.queries), len(own.keys), heads.head_dim, heads.value_head_dim, own.queries.start
        )

    def _divide(self, name: str, layer: Linear, of_attention: bool) -> None:
        last, (outputs, inputs) = name.rpartition(".")[2], layer.shape
        tp, units = self._division.tp, self._layout.units.get(last, (Unit.CHANNEL,))
        if last in self._layout.row_parallel:
            widths = tuple(len(share_channels(outputs, tp, rank)) for rank in range(tp))
            given = Pieces(self._group, self._input_widths(inputs, of_attention))
            layer.pieces = RowPieces(given, Pieces(self._group, widths))
        own = share_outputs(units, outputs, self._num_heads, tp, self._division.tp_rank)
        self.cuts |= {f"{name}.{tensor}": cut for tensor, cut in layer.share(own).items()}

    def _input_widths(self, inputs: int, of_attention: bool) -> tuple[int, ...]:
        """Return how many of the inputs of a layer that reads heads, or channels of a feed-forward layer, each rank makes."""
        if of_attention:
            return tuple(len(share.queries) * (inputs // self._num_heads[0]) for share in self._shares)
        return tuple(len(share_channels(inputs, self._division.tp, rank)) for rank in range(self._division.tp))

    def _divide_scales(self, attention: nn.Module, own: HeadShare) -> None:
        """Cut the parameters of the attention module itself, which have a number for each key head, or one for all."""
        for name, parameter in attention.named_parameters(recurse=False):
            if parameter.ndim and len(parameter) == self._num_heads[1]:
                cut = Cut(0, (own.keys,))
                shape = cut.shape(tuple(parameter.shape))
                setattr(attention, name, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
                self.cuts[f"{self._layout.attention}.{name}"] = cut


def _divide_vocabulary(model: CausalLM, division: Division, group: Group) -> dict[str, Cut]:
    """Cut the embedding and the head of the vocabulary, where the stage has them; another head is whole."""
    vocab_size, layout = model.config.vocab_size, model.layout
    words = tuple(share_channels(vocab_size, division.tp, rank) for rank in range(division.tp))
    embedding, head, own = model.embedding, model.head, (words[division.tp_rank],)
    cuts: dict[str, Cut] = {}
    if isinstance(embedding, Embedding):
        embedding.words = OwnedWords(group, words)
        cuts[f"{layout.embedding}.weight"] = _share_rows(embedding, own)
    if isinstance(head, Linear):
        if head.shape[0] != vocab_size:  # labels
            return cuts
        cuts |= {f"{layout.head}.{tensor}": cut for tensor, cut in head.share(own).items()}
    elif [*head.parameters()]:
        cuts[f"{layout.head}.weight"] = _share_rows(head, own)
    else:
        return cuts
    model.vocabulary = Pieces(group, tuple(map(len, words)))
    return cuts


def _share_rows(module: nn.Module, own: tuple[range, ...]) -> Cut:
    cut, weight = Cut(0, own), module.get_parameter("weight")
    module.weight = nn.Parameter(torch.empty(cut.shape(tuple(weight.shape)), device=weight.device))
    return cut
