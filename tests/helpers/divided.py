"""Engines of sharded models whose ranks are threads."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from kernels.collectives import NO_NEIGHBOURS, Alone, Group, Neighbours
from models.causal_lm import CausalLM
from models.sharding import ParallelLayout
from pipelines.engine import Engine
from pipelines.engine.batch import build_batch
from pipelines.loading.assembly import assemble
from pipelines.loading.device import prepare_device
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.request_settings import read_request_settings
from pipelines.loading.shard_plan import shard_plan
from pipelines.ranks.rank_context import layout_of
from pipelines.ranks.threads import ThreadRankContext
from tests.helpers.rank_threads import run_ranks, run_stages

LAYER_KINDS = {  # layers with their own way of sharding, and a model of tests/helpers/catalog.py that has them
    "fused queries, keys and values; fused gates": "phi3",
    "fewer keys than ranks": "falcon_one_key",
    "tied head": "llama_tied_bias",
    "ALiBi; a head's query, key and value beside each other": "bloom",
    "shared experts": "qwen2_moe",
    "latents": "v3",
    "attention biases": "qwen2",
    "parallel blocks": "gpt_neox",
}


def plan_of(run: RunConfig) -> ModelPlan:
    return plan_model(run.model, run.quant, resolve_model(run.model), prepare_device(run.device), packed=True)


def rank_plan(
    run: RunConfig, parallel_layout: ParallelLayout, group: Group, neighbours: Neighbours = NO_NEIGHBOURS
) -> ModelPlan:
    return shard_plan(plan_of(run), parallel_layout, group, neighbours)


def rank_engine(
    run: RunConfig, parallel_layout: ParallelLayout, group: Group, neighbours: Neighbours = NO_NEIGHBOURS
) -> Engine:
    plan = rank_plan(run, parallel_layout, group, neighbours)
    return assemble(plan, run.device, run.decode, read_request_settings(run.model, plan.source), 3)


@dataclass(frozen=True)
class Step:
    """A rank's results for a prompt: its logits, and per layer all tensors of its keys and values, by token, [T, G,
    *]."""

    hidden: Tensor
    logits: Tensor
    cached: list[list[Tensor]]
    model: CausalLM


def step_of(engine: Engine, prompt: list[int]) -> Step:
    """Compute a step in which every token is an output row, with the run's first adapter, if it has one."""
    decode, adapter = (
        DecodeConfig(max_new_tokens=1, prefix_cache=False),
        next((id.name for id in engine.adapters.ids), None),
    )
    group = engine.add(engine.request(0, prompt, decode, adapter=adapter))
    plan = engine.scheduler.plan()
    every = plan._replace(scheduled=[plan.scheduled[0]._replace(num_outputs=len(prompt))])
    batch = build_batch(every, engine.block_size)
    model = engine.executor.model
    hidden = model(batch, engine.executor.cache)
    logits = model.logits(hidden, batch)
    cached = [
        [tensor.flatten(0, 1)[batch.slots].clone() for part in layer for tensor in part.tensors]
        for layer in engine.executor.cache.attention_layers
    ]
    engine.scheduler.cancel(group)
    return Step(hidden, logits, cached, model)


@torch.inference_mode()
def whole_steps(run: RunConfig, prompts: list[list[int]]) -> list[Step]:
    engine = rank_engine(run, ParallelLayout(), Alone())
    return [step_of(engine, prompt) for prompt in prompts]


def divided_steps(run: RunConfig, tp: int, prompts: list[list[int]]) -> list[list[Step]]:
    """Return the steps by rank."""

    def work(group: Any) -> list[Step]:
        engine = rank_engine(run, layout_of(group.rank, tp, 1, run.parallel), group)
        return [step_of(engine, prompt) for prompt in prompts]

    return run_ranks(tp, work)


def stage_steps(run: RunConfig, tp: int, pp: int, prompts: list[list[int]]) -> list[list[Step]]:
    """Return the steps by rank of the last stage, with the layers of all stages in order."""

    def work(context: ThreadRankContext) -> list[Step]:
        parallel_layout = layout_of(context.parallel_layout.rank, tp, pp, run.parallel)
        engine = rank_engine(run, parallel_layout, context.group, context.neighbours)
        return [step_of(engine, prompt) for prompt in prompts]

    steps_of_ranks = run_stages(tp, pp, work)
    stages = [steps_of_ranks[tp * stage : tp * (stage + 1)] for stage in range(pp)]
    return [
        [
            replace(steps[-1], cached=[layer for step in steps for layer in step.cached])
            for steps in zip(*of_rank, strict=True)
        ]
        for of_rank in zip(*stages, strict=True)
    ]


def assert_same_bits(expected: list[Step], ranks: list[list[Step]]) -> None:
    """Compare the first rank's logits, and each rank's keys and values, with the values of one process, bit for bit."""
    for step, of_ranks in zip(expected, zip(*ranks, strict=True), strict=True):
        assert of_ranks[0].logits.equal(step.logits)
        for layer, cached in enumerate(step.cached):
            num_keys = step.model.attention_heads[layer].num_key_value_heads
            for rank, rank_step in enumerate(of_ranks):
                keys = share_of(step.model, layer, len(ranks), rank)
                for tensor, part in zip(cached, rank_step.cached[layer], strict=True):
                    assert tensor.shape[1] == num_keys
                    assert part.equal(tensor[:, keys.start : keys.stop])


def share_of(model: CausalLM, layer: int, tp: int, rank: int) -> range:
    """Return a rank's key heads by definition: its part if there are at least as many heads as ranks, else the head
    that its ranks share."""
    num_keys = model.attention_heads[layer].num_key_value_heads
    first = rank * num_keys // tp
    return range(first, (rank + 1) * num_keys // tp if tp <= num_keys else first + 1)


def assert_same_tokens(expected: list[Step], ranks: list[list[Step]], tolerance: float = 1e-4) -> None:
    """Check that each position's most likely token equals one process's, and that all ranks have equal hidden states.

    The tolerance, a share of the largest logit, covers sums of some hundred float32 numbers in another order, through a
    few layers.
    """
    for step, of_ranks in zip(expected, zip(*ranks, strict=True), strict=True):
        logits = of_ranks[0].logits
        assert logits.argmax(-1).equal(step.logits.argmax(-1))
        assert (logits - step.logits).abs().max() <= tolerance * step.logits.abs().max()
        assert all(step.hidden.equal(of_ranks[0].hidden) for step in of_ranks)
