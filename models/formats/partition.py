"""How other engines divide a checkpoint's tensors among ranks, whose slices are joined while they are read.

The axes are Megatron's (arXiv 1909.08053): linear layers are cut along their outputs, those that write into the residual stream along
their inputs, embeddings and heads along the vocabulary; all else is whole on every rank. Our own division is another one
(`models/sharding.py`).
"""

from torch import nn

from models.causal_lm import CausalLM
from models.formats.base import ExpectedTensor


def expected_tensors(model: CausalLM) -> dict[str, ExpectedTensor]:
    """Return what `model` expects of a checkpoint, whole or cut by tensor parallelism.

    Other engines cut embeddings along either axis, and a fused matrix straight through or section by section. Its slices do not tell
    which, so that it must be whole.
    """
    expected = {}
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        axis, sections = split_axis(model, name), model.layout.units.get(path.rpartition(".")[2], ())
        shards: tuple[int, ...] = () if axis is None or len(sections) > 1 else (axis,)
        if shards and isinstance(model.get_submodule(path), nn.Embedding):
            shards = 0, 1
        expected[name] = ExpectedTensor(tuple(parameter.shape), shards)
    return expected


def split_axis(model: CausalLM, parameter: str) -> int | None:
    """Return the axis along which others' tensor parallelism divides a parameter; None: every rank has it whole."""
    path, _, leaf = parameter.rpartition(".")
    module, layer, layout = model.get_submodule(path), path.rpartition(".")[2], model.layout
    output_axis: int | None = 0 if isinstance(module, nn.Embedding) else getattr(module, "output_axis", None)
    if output_axis is None or layer in layout.replicated:
        return None
    if layer in layout.row_parallel:  # whose bias is added once, to the sum
        return 1 - output_axis if leaf == "weight" else None
    return output_axis if leaf == "weight" else 0
