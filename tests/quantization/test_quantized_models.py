"""Every scheme that needs no calibration on every family: it runs, its error is bounded, and no row depends on its
batch."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from conf.decoding import DecodeConfig
from conf.quantization import Activations, QuantConfig, QuantScheme
from models.layers.moe import Experts
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, complete, engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS
from tests.helpers.tiers import in_turn

FAMILIES = [family for family in GOLDEN_FAMILIES if not family.endswith("_bin")]
# Random weights have no outliers, but do not average errors out either: bounds are 1.3 to 1.6 times the largest error
# of any family, relative to the standard deviation of the logits. A tied embedding has the format of its head: of 4-bit
# schemes qwen2, which is tied, has the largest errors.
SCHEMES = {
    "int8": (QuantConfig(QuantScheme.int8), 0.05),
    "int4": (QuantConfig(QuantScheme.int4), 0.7),
    "int4 asymmetric": (QuantConfig(QuantScheme.int4, symmetric=False), 0.7),
    "a8w8": (QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic), 0.12),
    "fp8": (QuantConfig(QuantScheme.fp8, activations=Activations.dynamic), 0.2),
    "mxfp4": (QuantConfig(QuantScheme.mxfp4), 0.7),
    "nvfp4": (QuantConfig(QuantScheme.nvfp4), 0.7),
}


def quantized(family: str, quant: QuantConfig) -> Engine:
    return load_engine(replace(run_config(GOLDENS / family), quant=quant), 3)


@pytest.mark.long
@each("family, scheme", in_turn(FAMILIES, SCHEMES))
def test_errors_are_bounded_and_rows_are_independent(family: str, scheme: str) -> None:
    check_family(family, scheme)


@pytest.mark.matrix
@each("family", FAMILIES)
@each("scheme", SCHEMES)
def test_every_family_by_every_scheme(family: str, scheme: str) -> None:
    check_family(family, scheme)


def check_family(family: str, scheme: str) -> None:
    quant, bound = SCHEMES[scheme]
    golden = load_file(GOLDENS / family / "golden.safetensors")
    prompt, expected = golden["input_ids"][0].tolist(), golden["logits"][0]
    engine = quantized(family, quant)
    error = (all_logits(engine, prompt) - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < bound
    decode = DecodeConfig(max_new_tokens=6, temperature=0, ignore_eos=True, logprobs=0, prefix_cache=False)
    prompts = [prompt, prompt[-9:], prompt[-5:]] if family[:7] != "chatglm" or family[7:8] in "23" else [prompt]
    alone = [complete(engine, [one], decode)[0] for one in prompts]
    assert complete(engine, prompts, decode) == alone  # log probabilities bit for bit


@each("scheme", SCHEMES)
def test_weight_memory_falls(scheme: str) -> None:
    before = engine_of(GOLDENS / "llama3").executor.weight_bytes
    floats = 2 * 64 * 512 * 4  # the embedding, and the norms, which are small
    after = quantized("llama3", SCHEMES[scheme][0]).executor.weight_bytes
    assert after < floats / 2 + (before - floats / 2) / 2.5


def test_a_tied_head_is_quantised_next_to_its_embedding() -> None:
    engine = quantized("llama_tied_bias", QuantConfig(QuantScheme.int8))
    plain = quantized("llama_tied_bias", QuantConfig(QuantScheme.int8, skip=["lm_head"]))
    assert engine.executor.step_weight_bytes(1) < plain.executor.step_weight_bytes(1)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        engine.executor.model.logits(hidden), plain.executor.model.logits(hidden), rtol=0, atol=0.05
    )  # steps of 1/127 of the largest weight


@each("family", ["mixtral", "qwen2_moe"])
@each("scheme", SCHEMES)
def test_experts_together_are_the_experts_one_by_one(family: str, scheme: str) -> None:
    engine = quantized(family, SCHEMES[scheme][0])
    prompt = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    mixtures = [module for module in engine.executor.model.modules() if isinstance(module, Experts)]
    called: list[torch.nn.Module] = []
    for expert in itertools.chain(*mixtures):
        expert.register_forward_pre_hook(lambda module, inputs: called.append(module))
    together = all_logits(engine, prompt)
    assert not called
    for mixture in mixtures:
        mixture._merged = None
    assert torch.equal(all_logits(engine, prompt), together)
    assert called


def test_few_rows_of_each_expert_stay_floats_with_activations_auto() -> None:
    auto = quantized("mixtral", QuantConfig(QuantScheme.int8, activations=Activations.auto))
    plain = quantized("mixtral", QuantConfig(QuantScheme.int8))
    prompt = [1, 2, 3, 4, 5, 6]  # 12 rows for 4 experts: the 8 rows of one layer would be quantised
    assert torch.equal(all_logits(auto, prompt), all_logits(plain, prompt))


def test_a_step_reads_the_experts_that_it_needs() -> None:
    engine = quantized("mixtral", QuantConfig(QuantScheme.int8))
    executor, config = engine.executor, json.loads((GOLDENS / "mixtral/config.json").read_text())
    mixtures = [module for module in executor.model.modules() if isinstance(module, Experts)]
    experts = sum(parameter.nbytes for mixture in mixtures for parameter in mixture.parameters())
    idle = 1 - config["num_experts_per_tok"] / config["num_local_experts"]
    assert executor.step_weight_bytes(1000) - executor.step_weight_bytes(1) == pytest.approx(idle * experts)
    assert executor.step_weight_bytes(2) == pytest.approx(executor.step_weight_bytes(1000) - idle**2 * experts)


def test_random_weights_are_quantised_too() -> None:
    from conf.schema import Weights

    run = run_config(GOLDENS / "llama3", weights=Weights.random)
    first, second = (load_engine(replace(run, quant=QuantConfig(QuantScheme.int8)), 3) for _ in range(2))
    assert all_logits(first, [1, 2, 3]).equal(all_logits(second, [1, 2, 3]))
