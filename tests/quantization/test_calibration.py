"""Layer by layer a model gives the results of the whole; linear layers that share an input are detected, and folds keep
the output."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from conf.quantization import QuantConfig, SmoothConfig
from conf.schema import DType
from kernels import build
from models.linear_layers import linear_layer
from pipelines.engine import Engine
from pipelines.loading.quantize.layers import calibration_batches
from quantization.calibration import SequentialCalibrator, Statistics
from quantization.plan import float_weight, plan
from quantization.smoothing import Smoother
from tests.helpers.builders import run_config, unpacked_engine
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, WHOLE_PROMPTS
from tests.helpers.quantized_models import A8W8, SMOOTHQUANT, STATIC, random_rows

QUANT = QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC, smooth=SmoothConfig(alpha=0.7))


def calibrator_of(
    family: str, sequential: bool = True, dtype: DType = DType.float32
) -> tuple[Engine, SequentialCalibrator, torch.Tensor]:
    """Return a calibrator, and the whole model's result [T, E] for the same samples."""
    run = run_config(GOLDENS / family, allow_pickle=True)
    engine = unpacked_engine(replace(run, model=replace(run.model, dtype=dtype)), 3)
    golden = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    samples = random_rows(3, 17, golden[-2:] if family in WHOLE_PROMPTS else ())
    model, cache, (probe, *batches) = engine.executor.model, engine.executor.cache, calibration_batches(engine, samples)
    with torch.inference_mode():
        expected = torch.cat([model(batch, cache) for batch in batches])
    calibrator = SequentialCalibrator(
        model, batches, probe, engine.executor.cache.one_of_each_shape(), sequential, with_cache=True
    )
    return engine, calibrator, expected


@each("family", GOLDEN_FAMILIES)
def test_layers_in_turn_are_the_model(family: str) -> None:
    engine, calibrator, expected = calibrator_of(family)
    for _ in engine.executor.model.layers:
        calibrator.advance()
    head = calibrator.observe_head(["lm_head"], Statistics(hessian=True))
    assert head.sample.equal(expected)
    assert head.absmax.equal(expected.abs().amax(0))
    assert head.hessian is not None
    torch.testing.assert_close(head.hessian.mean(), expected.T @ expected / len(expected))


@pytest.mark.long
@each("family", GOLDEN_FAMILIES)
def test_a_pass_that_observes_continues(family: str) -> None:
    """It stores the state of the cache, so that the second pass ends with the same result."""
    engine, calibrator, expected = calibrator_of(family, sequential=False)
    _, again, _ = calibrator_of(family)
    for _ in engine.executor.model.layers:
        calibrator.observe()
        observed, stepped = calibrator.advance(), again.advance()
        assert observed is not None
        assert stepped is not None
        assert all(one.equal(other) for one, other in zip(observed, stepped, strict=True))
    assert calibrator.observe_head(["lm_head"], Statistics()).sample.equal(expected)


SHARING = {
    "llama3": [{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"mlp.gate_proj", "mlp.up_proj"}],
    "opt": [{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"fc1"}],
    "bloom": [{"self_attention.query_key_value"}, {"mlp.dense_h_to_4h"}],
}


def linears_of(engine: Engine) -> tuple[list[str], str]:
    """Return the first layer's linear layers, by their names in it, and the prefix of their full names."""
    model = engine.executor.model
    names = list(plan(model, QUANT))
    prefix = f"{model.layout.layers}.0."
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)], prefix


@each("family", SHARING)
def test_layers_that_share_an_input_are_a_group_of_their_norm(family: str) -> None:
    engine, calibrator, _ = calibrator_of(family)
    linears, _ = linears_of(engine)
    groups = calibrator.observe(linears)
    assert sorted(name for group in groups for name in group.linears) == sorted(linears)
    assert [set(group.linears) for group in groups if group.norm is not None] == SHARING[family]


@pytest.mark.skipif(build.library() is None, reason="without the C++ kernels the layers' own products are the fastest")
@each("dtype", [DType.float32, DType.bfloat16, DType.float16])
@each("family", ["llama3", "gpt2", "opt"])
def test_layers_are_observed_in_fast_products(family: str, dtype: DType) -> None:
    """The products are the model's except for rounding, in the same groups, and the layer is unchanged afterwards."""
    engine, calibrator, expected = calibrator_of(family, sequential=False, dtype=dtype)
    linears, prefix = linears_of(engine)
    methods = [linear_layer(engine.executor.model, prefix + name).method for name in linears]
    with pytest.MonkeyPatch.context() as patch:
        for method in set(map(type, methods)):  # the layers' own products must not be used
            patch.setattr(method, "apply", None)
        groups = calibrator.observe(linears)
    assert sorted(name for group in groups for name in group.linears) == sorted(linears)
    assert [linear_layer(engine.executor.model, prefix + name).method for name in linears] == methods
    calibrator.advance()
    for _ in engine.executor.model.layers[1:]:
        calibrator.observe()
        calibrator.advance()
    sample = calibrator.observe_head(["lm_head"], Statistics()).sample
    # a dozen roundings of one unit in the last place in each of two layers
    assert (sample - expected.float()).norm() < 24 * torch.finfo(expected.dtype).eps * expected.float().norm()


@pytest.mark.long
@each("family", GOLDEN_FAMILIES)
def test_folds_leave_the_float_model_as_it_was(family: str) -> None:
    """Folds that would change it are omitted: ChatGLM-6B's norms feed the residual stream, a mixture's second norm the
    router."""
    engine, calibrator, expected = calibrator_of(family)
    linears, prefix = linears_of(engine)
    weights = {name: float_weight(linear_layer(engine.executor.model, prefix + name)).float() for name in linears}
    schemes = plan(engine.executor.model, QUANT)
    groups = calibrator.observe(linears)
    before = {name: weight.clone() for name, weight in weights.items()}
    smoother = Smoother(
        engine.executor.model.layers[0], engine.executor.model.layout, weights, QUANT, calibrator.output
    )
    notes, _ = smoother.smooth(groups, {name: schemes[prefix + name].weights for name in linears})
    for name in linears:  # all or nothing
        assert (name in notes) or not weights[name].equal(before[name]) or family in WHOLE_PROMPTS
    normed = {name for group in groups if group.norm is not None for name in group.linears}
    is_mixture = family in ("mixtral", "qwen2_moe")
    if family in WHOLE_PROMPTS:
        assert normed <= notes.keys()
    elif not is_mixture:
        assert not normed & notes.keys()
    for _ in engine.executor.model.layers:
        calibrator.advance()
    after = calibrator.observe_head(["lm_head"], Statistics()).sample
    assert (after - expected).norm() < 1e-4 * expected.norm()  # float32, a handful of roundings in one layer


def test_statistics_include_folded_scales() -> None:
    engine, calibrator, _ = calibrator_of("llama3")
    linears, prefix = linears_of(engine)
    weights = {name: float_weight(linear_layer(engine.executor.model, prefix + name)).float() for name in linears}
    groups = calibrator.observe(linears)
    schemes = plan(engine.executor.model, QUANT)
    smoother = Smoother(
        engine.executor.model.layers[0], engine.executor.model.layout, weights, QUANT, calibrator.output
    )
    smoother.smooth(groups, {name: schemes[prefix + name].weights for name in linears})
    for told, seen in zip(groups, calibrator.observe(linears), strict=True):
        torch.testing.assert_close(told.absmax, seen.absmax)  # static scales equal those of the final model
        torch.testing.assert_close(told.sample, seen.sample)
