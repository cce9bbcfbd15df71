"""The importance matrix of a model: llama.cpp's entries by linear layer, for block types."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.formats.gguf.imatrix import read_imatrix
from models.formats.gguf.layouts import LAYOUTS, layout_of
from models.layers.linear import tied_embedding
from models.linear_layers import linear_specs


@dataclass(frozen=True)
class EntryRow:
    """A row of an entry of an importance matrix: a linear layer has one."""

    name: str
    """llama.cpp's name of the weight."""
    index: int
    """The expert's number; 0 for a layer outside of experts."""


def find_entry_rows(model: CausalLM, model_type: str) -> dict[str, EntryRow]:
    """Return the rows of the linear layers that may be quantised, by name.

    The head of a model with tied embeddings has the name of the embedding. Raises UserError for an architecture
    whose names in llama.cpp are not known.
    """
    if model_type not in LAYOUTS:
        raise UserError(
            f"quant.method=imatrix needs llama.cpp's names of tensors, which are not known for model_type={model_type!r}: "
            "give quant.method=rtn"
        )
    tied = {model.layout.head: model.layout.embedding} if tied_embedding(model.head) is not None else {}
    rows, num_rows = dict[str, EntryRow](), Counter[str]()
    for layer in linear_specs(model):
        name = layout_of(model_type, model.config).llama_cpp_name(f"{tied.get(layer, layer)}.weight")
        rows[layer] = EntryRow(name, num_rows[name])
        num_rows[name] += 1
    return rows


def read_importance(file: str, model: CausalLM, model_type: str) -> dict[str, Tensor]:
    """Return the importance of the model's linear layers that have an entry in the file, float32 [I] by name.

    Raises UserError as `find_entry_rows`, `read_imatrix` and `ImportanceMatrix.match` do.
    """
    rows, specs = find_entry_rows(model, model_type), linear_specs(model)
    num_rows = Counter(row.name for row in rows.values())
    shapes = {row.name: (num_rows[row.name], specs[layer].shape[1]) for layer, row in rows.items()}
    others = _names_of_floats(model, model_type) | _names_of_parts(model, model_type)
    entries = read_imatrix(Path(file).expanduser()).match(shapes, others)
    return {layer: torch.from_numpy(entries[row.name][row.index]) for layer, row in rows.items() if row.name in entries}


def _names_of_parts(model: CausalLM, model_type: str) -> frozenset[str]:
    """Return the names of all tensors that hold rows of a layer. They have the same inputs, so one entry suffices."""
    layout = layout_of(model_type, model.config)
    return frozenset(name for layer in linear_specs(model) for name in layout.llama_cpp_names(f"{layer}.weight"))


def _names_of_floats(model: CausalLM, model_type: str) -> frozenset[str]:
    names = set[str]()
    for layer in linear_specs(model, quantizable=False):
        with suppress(StopIteration):  # GGUF files have no MTP layer
            names.add(layout_of(model_type, model.config).llama_cpp_name(f"{layer}.weight"))
    return frozenset(names)
