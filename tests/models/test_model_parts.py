"""A model computed in parts equals the model; a layer sharded by its layout equals the layer."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conf.schema import DType
from models.batch import Batch
from models.causal_lm import CacheContent, CausalLM
from models.families.gemma3n_config import MOST_STREAMS
from models.formats.partition import split_axis
from models.layers.attention import Heads
from models.layers.linear import Linear
from models.layers.norm import AddRMSNorm, ResidualStream
from models.layout import Unit
from pipelines.engine import Engine
from pipelines.engine.batch import prompt_batch
from pipelines.engine.kv_cache import allocate_kv_cache
from tests.helpers.builders import run_config, unpacked_engine
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, OTHERS, QUICK, write_family

RANKS = 2


def float_engine(family: str, folder: Path) -> Engine:
    """Return a float32 engine with layers as the architecture made them."""
    write_family(folder, family)
    return unpacked_engine(run_config(folder, allow_pickle=True), 3)


def batch_of(engine: Engine, family: str, num_outputs: tuple[int, int]) -> Batch:
    """Return a batch of two prompts. The last tokens of each, this number, are output rows."""
    golden = GOLDENS / family / "golden.safetensors"
    prompt = load_file(golden)["input_ids"][0].tolist() if golden.is_file() else list(range(3, 12))
    prompts = [prompt, prompt[:1] + prompt[2:]] if len(prompt) > 8 else [prompt, prompt]
    blocks = engine.scheduler.block_manager
    tables = [blocks.allocate(blocks.num_blocks_for(len(ids))) for ids in prompts]
    features = [engine.executor.model.prompt_features(ids) for ids in prompts]
    return prompt_batch(prompts, [*num_outputs], tables, features, blocks.block_size)


@each("family", [*GOLDEN_FAMILIES, "v3"], quick=QUICK)
@torch.inference_mode()
def test_parts_in_turn_are_the_model(family: str, tmp_path: Path) -> None:
    """Bit for bit, also if only the sum of a stream is passed on. A part without the last layer drops no rows."""
    engine = float_engine(family, tmp_path)
    model, cache, batch = engine.executor.model, engine.executor.cache, batch_of(engine, family, (1, 2))
    expected, num_layers = model(batch, cache), model.config.num_hidden_layers
    assert len(expected) == 3
    for first in range(1, num_layers):
        before, after = range(first), range(first, num_layers)
        stream = model.run_layers(model.embed(batch), batch, replace(cache, layers=cache.layers[: before.stop]), before)
        if isinstance(stream, ResidualStream):
            stream = ResidualStream(stream.total())
        assert len(stream.x if isinstance(stream, ResidualStream) else stream) == batch.shape.num_tokens
        stream = model.run_layers(stream, batch, replace(cache, layers=cache.layers[after.start :]), after)
        assert model.finish(stream).equal(expected)


@pytest.mark.long
@each("family", [*GOLDEN_FAMILIES, "v3", *OTHERS])
def test_a_layout_names_what_there_is(family: str, tmp_path: Path) -> None:
    model = float_engine(family, tmp_path).executor.model
    layout, names = model.layout, {name for name, _ in model.named_modules()}
    last_parts = {name.rpartition(".")[2] for name in names}
    outside = {layout.embedding, layout.layers, layout.head}
    inside = {f"{layout.layers}.1.{module_name}" for module_name in (layout.attention, *layout.norms)}
    assert outside | inside <= names
    absent = set()
    if family in ("minicpm3", "mistral4", "opt", "v3"):
        absent = {"project_in", "project_out", "q_proj", "eh_proj"}
    elif family == "gemma4_unified":  # without experts and inputs of each layer
        absent = {"per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "proj"}
    elif family == "gemma3n":  # of at most this many streams, the model has four
        absent = set(map(str, range(3, MOST_STREAMS)))
    assert last_parts >= {*layout.row_parallel, *layout.replicated, *layout.units} - absent
    assert last_parts >= {*layout.scale_fold_targets, *layout.scale_fold_targets.values()}
    num_caches = len(model.attention_heads)
    assert len(model.layers) == num_caches + len(model.config.shared_caches) == model.config.num_hidden_layers
    norms = {name for name, module in model.layers[1].named_modules() if "Norm" in type(module).__name__}
    assert set(layout.norms) <= norms


def shard(tensor: Tensor, axis: int, rank: int, sections: list[tuple[int, int]]) -> Tensor:
    """Return a rank's units of every section, which is given by the number of units and their size."""
    rows: list[int] = []
    start = 0
    for count, size in sections:
        rows += range(start + count * rank // RANKS * size, start + count * (rank + 1) // RANKS * size)
        start += count * size
    assert start == tensor.shape[axis]
    return tensor.index_select(axis, torch.tensor(rows))


def cut_layer(model: CausalLM, rank: int) -> nn.Module:
    """Return a rank's first layer, sharded only by the layout."""
    layout, layer = model.layout, copy.deepcopy(model.layers[0])
    attention: Any = layer.get_submodule(layout.attention)
    h = attention.heads
    counts = {
        Unit.QUERY_HEAD: h.num_attention_heads,
        Unit.KEY_VALUE_HEAD: h.num_key_value_heads,
        Unit.QKV_HEAD: h.num_attention_heads,
    }
    for name, parameter in list(layer.named_parameters()):
        axis = split_axis(model, f"{layout.layers}.0.{name}")
        if axis is None:
            continue
        path, _, leaf = name.rpartition(".")
        units, size = layout.units.get(path.rpartition(".")[2], (Unit.CHANNEL,)), parameter.shape[axis]
        numbers = [counts.get(unit, size // len(units)) for unit in units]
        sections = [(number, size // sum(numbers)) for number in numbers]
        module, rank_part = layer.get_submodule(path), shard(parameter.data, axis, rank, sections)
        if isinstance(module, Linear) and leaf == "weight":
            module.method = module.method.with_weight(rank_part.T if module.is_transposed else rank_part)
        else:
            setattr(module, leaf, nn.Parameter(rank_part, False))
    groups = max(1, h.num_key_value_heads // RANKS)
    attention.heads = Heads(h.num_attention_heads // RANKS, groups, h.head_dim, h.value_head_dim)
    return layer


def row_parallel_layers(model: CausalLM, layer: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in layer.named_modules() if n.rpartition(".")[2] in model.layout.row_parallel}


CUT = """
baichuan-7b bloom chatglm chatglm2 gemma2 gpt2 llama3 mixtral opt qwen qwen2_moe qwen3 v3
ernie4_5 ernie4_5_moe gemma3 glm glm4 glm4_moe internlm2 ministral3 phi3 telechat
""".split()


@each("family", CUT)
@torch.inference_mode()
def test_a_layer_cut_for_ranks_adds_up(family: str, tmp_path: Path) -> None:
    """Each rank's inputs of row-parallel layers are its share of the whole layer's inputs, and the outputs add up to
    the whole layer's."""
    engine = float_engine(family, tmp_path)
    model, batch = engine.executor.model, batch_of(engine, family, (1, 1))
    stream, inputs = model.embed(batch), model.layer_inputs(batch, torch.float32)
    ranks = [cut_layer(model, rank) for rank in range(RANKS)]
    layer_tensors: dict[str, tuple[Tensor, Tensor]] = {}  # input and output by row-parallel layer
    for name, module in row_parallel_layers(model, model.layers[0]).items():
        module.register_forward_hook(lambda _, x, y, name=name: layer_tensors.update({name: (x[0].clone(), y.clone())}))
    expected = model.layers[0](stream, *inputs, batch, engine.executor.cache.layers[0])
    sums: dict[str, Tensor] = {}
    for rank, layer in enumerate(ranks):
        for name, module in row_parallel_layers(model, layer).items():

            def reduce(
                module: nn.Module, x: tuple[Tensor, ...], y: Tensor, name: str = name, rank: int = rank
            ) -> Tensor:
                layer_input, result = layer_tensors[name]
                torch.testing.assert_close(x[0], layer_input.chunk(RANKS, -1)[rank], atol=1e-4, rtol=1e-4)
                bias = getattr(module, "bias", None)
                sums[name] = sums[name] + y - (0 if bias is None else bias) if rank else y  # the bias is added once
                return result  # as after an all-reduce

            module.register_forward_hook(reduce)
        heads = layer.get_submodule(model.layout.attention).heads
        blocks = engine.scheduler.block_manager
        formats = [(paged.format, paged.format) for paged in engine.executor.cache.layers[0][:1]]
        cache = allocate_kv_cache(
            [CacheContent(heads)], blocks.num_blocks, blocks.block_size, formats, torch.float32, engine.device
        )
        arguments = tuple(x.chunk(RANKS)[rank] for x in inputs) if family == "bloom" else inputs  # slopes of its heads
        layer_output = layer(stream, *arguments, batch, cache.layers[0])
        torch.testing.assert_close(layer_output, expected, atol=1e-4, rtol=1e-4)
    assert sums.keys() == layer_tensors.keys()
    for name, total in sums.items():
        torch.testing.assert_close(total, layer_tensors[name][1], atol=1e-4, rtol=1e-4)


@each("dtype", [DType.bfloat16, DType.float16])
@torch.inference_mode()
def test_the_sum_of_a_stream_is_rounded_as_norms_round_it(dtype: DType) -> None:
    """Therefore a stage may send the sum instead of both tensors."""
    x, update = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype.name))
    norm = AddRMSNorm(64, 1e-5)
    norm.weight = nn.Parameter(torch.rand(64).to(x.dtype), False)
    both, total = norm(x, update)
    alone, same = norm(ResidualStream(x, update).total(), None)
    assert total.equal(same)
    assert both.equal(alone)
