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
from models.cuts import Cut, Division, HeadShare, share_channels, share_heads, share_outputs
from models.layers.attention import Heads
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.pieces import OwnedWords, Pieces, RowPieces
from models.layout import Unit


def divide(model: CausalLM, division: Division, group: Group) -> dict[str, Cut]:
    """Keep a rank's part of a model on the meta device, whose layers are held as they will be loaded.

    `group` is that of the rank's stage. Returns how the checkpoint's tensors are cut, by the model's names; others are read whole.
    Raises UserError for more ranks than heads or channels.
    """
    if division.pp > 1:
        raise UserError(f"pp={division.pp} is not supported yet: give pp=1")
    if division.tp == 1:
        return {}
    cuts: dict[str, Cut] = {}
    for number, layer in enumerate(model.layers):
        name = f"{model.layout.layers}.{number}"
        cuts |= {f"{name}.{own}": cut for own, cut in _DividedLayer(model, layer, division, group).cuts.items()}
    return cuts | _divide_vocabulary(model, division, group)


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
    """Cut the embedding and the head of the vocabulary, if the model has one; another head is whole."""
    words = tuple(share_channels(model.config.vocab_size, division.tp, rank) for rank in range(division.tp))
    embedding, head, own = model.embedding, model.head, (words[division.tp_rank],)
    assert isinstance(embedding, Embedding)
    embedding.words = OwnedWords(group, words)
    cuts = {f"{model.layout.embedding}.weight": _share_rows(embedding, own)}
    has_vocabulary = getattr(head, "shape", None) == (model.config.vocab_size, embedding.weight.shape[1])
    if isinstance(head, Linear) and has_vocabulary:
        cuts |= {f"{model.layout.head}.{tensor}": cut for tensor, cut in head.share(own).items()}
    elif isinstance(getattr(head, "weight", None), nn.Parameter):
        cuts[f"{model.layout.head}.weight"] = _share_rows(head, own)
    else:
        return cuts
    model.vocabulary = Pieces(group, tuple(map(len, words)))
    return cuts


def _share_rows(module: nn.Module, own: tuple[range, ...]) -> Cut:
    cut, weight = Cut(0, own), module.get_parameter("weight")
    module.weight = nn.Parameter(torch.empty(cut.shape(tuple(weight.shape)), device=weight.device))
    return cut
