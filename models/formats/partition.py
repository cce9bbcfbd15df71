"""How other engines shard a checkpoint's tensors. Their slices are joined while they are read.

The axes are Megatron's (arXiv 1909.08053). Linear layers are sharded along their outputs, or along their inputs if they
write into the residual stream. Embeddings and heads are sharded along the vocabulary. Every rank holds all other
tensors whole. Quintet's own sharding differs (`models/sharding.py`).
"""

from models.causal_lm import CausalLM
from models.formats.base import ExpectedTensor
from models.layers.embedding import Embedding


def expected_tensors(model: CausalLM) -> dict[str, ExpectedTensor]:
    """Return the tensors that `model` expects of a checkpoint, whole or tensor parallel.

    Other engines shard embeddings along either axis. They shard a fused matrix as one matrix, or each section
    separately. The slices do not show which, so a fused matrix must be whole.
    """
    expected = {}
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        axis, sections = split_axis(model, name), model.layout.units.get(path.rpartition(".")[2], ())
        shards: tuple[int, ...] = () if axis is None or len(sections) > 1 else (axis,)
        if shards and isinstance(model.get_submodule(path), Embedding):
            shards = 0, 1
        expected[name] = ExpectedTensor(tuple(parameter.shape), shards)
    return expected


def split_axis(model: CausalLM, parameter: str) -> int | None:
    """Return the axis along which other engines shard a parameter; None: every rank holds it whole."""
    path, _, leaf = parameter.rpartition(".")
    module, layer, layout = model.get_submodule(path), path.rpartition(".")[2], model.layout
    output_axis: int | None = 0 if isinstance(module, Embedding) else getattr(module, "output_axis", None)
    if output_axis is None or layer in layout.replicated:
        return None
    if layer in layout.row_parallel:  # the bias is added once, to the sum of all ranks
        return 1 - output_axis if leaf == "weight" else None
    return output_axis if leaf == "weight" else 0
