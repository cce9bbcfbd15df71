"""Engines of divided models, whose ranks are threads."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from kernels.collectives import Alone, Group
from models.causal_lm import CausalLM
from models.cuts import Division
from models.layers.absent import Absent
from pipelines.assembly import assemble
from pipelines.device import prepare_device
from pipelines.engine import Engine
from pipelines.engine.batch import build_batch
from pipelines.opening import open_source
from pipelines.planning import ModelPlan, divide_plan, plan_model
from pipelines.request_settings import read_request_settings
from tests.helpers.rank_threads import run_ranks


def plan_of(run: RunConfig) -> ModelPlan:
    return plan_model(run, open_source(run.model), prepare_device(run.device), packed=True)


def rank_plan(run: RunConfig, division: Division, group: Group) -> ModelPlan:
    return divide_plan(plan_of(run), division, group)


def rank_engine(run: RunConfig, division: Division, group: Group) -> Engine:
    plan = rank_plan(run, division, group)
    return assemble(run, plan, read_request_settings(run.model, plan.source), 3)


@dataclass(frozen=True)
class Step:
    """What a rank has after a prompt: its logits, and of each layer all tensors of its keys and values, by token, [T, G, *]."""

    hidden: Tensor
    logits: Tensor
    cached: list[list[Tensor]]
    model: CausalLM


def step_of(engine: Engine, prompt: list[int], x: Tensor | None = None) -> Step:
    """Every token is an output row, with the run's first adapter, if it has one. `x` is what the stage before gave; the last has logits."""
    decode, adapter = (
        DecodeConfig(max_new_tokens=1, prefix_cache=False),
        next((id.name for id in engine.adapters.ids), None),
    )
    group = engine.add(engine.request(0, prompt, decode, adapter=adapter))
    plan = engine.scheduler.plan()
    every = plan._replace(scheduled=[plan.scheduled[0]._replace(num_outputs=len(prompt))])
    batch = build_batch(every, engine.block_size)
    model = engine.runner.model
    hidden = model(batch, engine.runner.cache, x)
    logits = hidden if isinstance(model.head, Absent) else model.logits(hidden, batch)
    cached = [
        [tensor.flatten(0, 1)[batch.slots].clone() for part in layer for tensor in part.tensors]
        for layer in engine.runner.cache.layers
    ]
    engine.scheduler.cancel(group)
    return Step(hidden, logits, cached, model)


@torch.inference_mode()
def whole_steps(run: RunConfig, prompts: list[list[int]]) -> list[Step]:
    engine = rank_engine(run, Division(), Alone())
    return [step_of(engine, prompt) for prompt in prompts]


def divided_steps(run: RunConfig, tp: int, prompts: list[list[int]]) -> list[list[Step]]:
    """By rank."""

    def work(group: Any) -> list[Step]:
        engine = rank_engine(run, Division(tp, 1, group.rank, 0), group)
        return [step_of(engine, prompt) for prompt in prompts]

    return run_ranks(tp, work)


def stage_steps(run: RunConfig, tp: int, pp: int, prompts: list[list[int]]) -> list[list[Step]]:
    """By rank, its layers of all stages behind each other. Each stage is given what the one before made."""
    made: list[list[Tensor | None]] = [[None] * len(prompts)] * tp
    ranks: list[list[Step]] = []
    for stage in range(pp):

        def work(group: Any, stage: int = stage, given: Any = made) -> list[Step]:
            engine = rank_engine(run, Division(tp, pp, group.rank, stage), group)
            return [step_of(engine, prompt, x) for prompt, x in zip(prompts, given[group.rank], strict=True)]

        found = run_ranks(tp, work)
        made = [[step.hidden for step in steps] for steps in found]
        before = ranks or [[replace(step, cached=[]) for step in steps] for steps in found]
        ranks = [
            [replace(new, cached=old.cached + new.cached) for old, new in zip(*steps, strict=True)]
            for steps in zip(before, found, strict=True)
        ]
    return ranks


def assert_same_bits(whole: list[Step], ranks: list[list[Step]]) -> None:
    """Logits of the first rank, and each rank's keys and values, are those of one process."""
    for step, of_ranks in zip(whole, zip(*ranks, strict=True), strict=True):
        assert of_ranks[0].logits.equal(step.logits)
        for layer, cached in enumerate(step.cached):
            num_keys = step.model.attention_heads[layer].num_key_value_heads
            for rank, own in enumerate(of_ranks):
                keys = share_of(step.model, layer, len(ranks), rank)
                for tensor, part in zip(cached, own.cached[layer], strict=True):
                    assert tensor.shape[1] == num_keys
                    assert part.equal(tensor[:, keys.start : keys.stop])


def share_of(model: CausalLM, layer: int, tp: int, rank: int) -> range:
    """A rank's key heads, by the definition: of as many or more heads its part, else the one that its part of the ranks shares."""
    num_keys = model.attention_heads[layer].num_key_value_heads
    first = rank * num_keys // tp
    return range(first, (rank + 1) * num_keys // tp if tp <= num_keys else first + 1)
