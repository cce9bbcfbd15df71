"""Models traced by torch.export: a step is a graph of our operators that computes the same bits and stores the same
keys and values."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DType
from kernels import build
from kernels.kv_format import PagedVectors
from models.batch import Batch, BatchShape, KVCache
from models.causal_lm import CausalLM
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each

SCHEMES = {
    "floats": QuantConfig(),
    "int4, and a cache of int8": QuantConfig(QuantScheme.int4, group_size=32, kv_cache=KVCacheFormat.int8),
    "a8w8": QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic),
}
ATTENTION = ("matmul_together", "rope_and_store", "paged_attention", "matmul_together")
SHAPE = BatchShape(num_tokens=5, num_sequences=2, table_width=1, num_prompt_features=0, num_outputs=2)
MLP = ("matmul_swiglu", "matmul_together")
FLOATS = ["rope_angles", "rms_norm", *(*ATTENTION, "add_rms_norm", *MLP, "add_rms_norm") * 2, "matmul_together"]
*BEFORE_HEAD, HEAD_NORM, HEAD = FLOATS
CODES = [f"{name}_quantize" if "norm" in name else name for name in BEFORE_HEAD]
NODES = {"floats": FLOATS, "int4, and a cache of int8": FLOATS, "a8w8": [*CODES, HEAD_NORM, HEAD]}


class Step(nn.Module):
    """Returns the logits of a batch. The cache's tensors are inputs; its formats are the engine's."""

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, numbers: Tensor, stored: list[Tensor]) -> Tensor:
        tensors = iter(stored)
        layers = [(take(keys, tensors), take(values, tensors)) for keys, values in self.cache.layers]
        return self.model.logits(self.model(Batch(numbers, SHAPE), replace(self.cache, layers=layers)))


def take(vectors: PagedVectors, tensors: Iterator[Tensor]) -> PagedVectors:
    return replace(vectors, tensors=tuple(itertools.islice(tensors, len(vectors.tensors))))


def batch_of(*token_ids: int) -> Tensor:
    """Return the prompts of two sequences, with three tokens and two."""
    places, slots, tables, lengths = [0, 1, 2, 0, 1], [0, 1, 2, 16, 17], [[0], [1]], [3, 3, 3, 2, 2]
    batch = Batch.of([*token_ids], places, slots, tables, [0, 3, 5], [3, 2], lengths, [(), ()], [2, 4], [0, 1, 2])
    assert batch.shape == SHAPE
    return batch.numbers


DTYPES = (DType.float32, DType.bfloat16, DType.float32)
EXPORTED = [(scheme, dtype, strict) for strict in (False, True) for scheme, dtype in zip(SCHEMES, DTYPES, strict=True)]


@pytest.mark.skipif(build.library() is None, reason="the nodes are those of weights that the C++ kernels packed")
@torch.no_grad()
@each("scheme, dtype, strict", EXPORTED, quick=EXPORTED[:1])
def test_an_exported_step(tmp_path: Path, scheme: str, dtype: DType, strict: bool) -> None:
    write_llama(tmp_path, intermediate_size=96, attention_bias=True)
    run = run_config(tmp_path)
    executor = load_engine(replace(run, model=replace(run.model, dtype=dtype), quant=SCHEMES[scheme]), 2).executor
    step = Step(executor.model, executor.cache).eval()
    empty, stored, expected = ([torch.zeros_like(part) for part in executor.cache.tensors] for _ in range(3))
    program = torch.export.export(step, (batch_of(3, 4, 5, 6, 7), empty), strict=strict)
    batch = batch_of(90, 20, 33, 41, 8)
    assert program.module()(batch, stored).equal(step(batch, expected))
    assert all(mine.equal(part) for mine, part in zip(stored, expected, strict=True))
    assert all(part.any() for part in stored)

    nodes = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("quintet")]
    names = [name.removeprefix("quintet.").removesuffix(".default").removeprefix("quant_") for name in nodes]
    assert [name for name in names if name != "quantize_rows"] == NODES[scheme]
    # norms quantise the inputs of q, k and v and of gate and up; the inputs of o, down and the head are quantised
    # separately
    assert names.count("quantize_rows") == (2 + 2 + 1 if scheme == "a8w8" else 0)
    weights = {value.data_ptr() for value in step.parameters()}
    held = [*program.state_dict.values(), *program.constants.values()]
    assert len({value.data_ptr() for value in held} - weights) == 1  # and the rotary embedding's frequencies
