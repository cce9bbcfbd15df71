"""Input factors in PaddleNLP's quantised checkpoints: the results of its formula in float64, and cases that no folder
can represent."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conf.errors import UserError
from models.formats.huggingface import SafetensorsFile
from models.formats.paddle.scales import Scales
from models.formats.paddle.smooth import SmoothedFile
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.cases import each
from tests.helpers.conversion import convert, tensors_in
from tests.helpers.huggingface_files import load
from tests.helpers.paddle_files import Arrays, save_safetensors
from tests.helpers.paddle_scales import GROUPS, HEADS, PROMPT, expected_logits, quantise
from tests.helpers.quantized_models import reloaded

SMOOTHED = ("o_proj", "down_proj")


def factors_of(arrays: Arrays) -> Arrays:
    """Return factors by module, from a quarter to one, so that no input is clipped. Query heads with the same value
    head have equal factors."""
    generator = np.random.default_rng(5)
    factors = {}
    for name in [name for name in arrays if name.endswith(tuple(f"{module}.weight" for module in SMOOTHED))]:
        values = np.exp2(generator.uniform(-2, 0, len(arrays[name]))).astype(np.float32)
        if "o_proj" in name:
            of_groups = values.reshape(GROUPS, HEADS // GROUPS, -1)
            values = np.repeat(of_groups[:, :1], HEADS // GROUPS, 1).reshape(-1)
        factors[name.removesuffix(".weight")] = values
    return factors


def smooth(folder: Path, arrays: Arrays, factors: Arrays, **changes: np.ndarray) -> None:
    """Change a quantised folder to PTQ's output with `smooth_all_linears`: wrapped layers, whose parameters have two
    names."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["shift_smooth_all_linears"] = True
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("act_scales.json", "weight_scales.json"):
        scales = json.loads((folder / file).read_text())
        for module in SMOOTHED:
            scales = {name.replace(f"{module}.", f"{module}.layer."): value for name, value in scales.items()}
        (folder / file).write_text(json.dumps(scales))
    written = dict(arrays)
    for module, values in factors.items():
        weight = arrays[f"{module}.weight"]
        zeros = np.zeros(weight.shape[1], np.float32)
        written |= {f"{module}.smooth_weight": values, f"{module}.shift_bias": np.zeros_like(values)}
        written |= {f"{module}.layer.weight": weight, f"{module}.bias": zeros, f"{module}.layer.bias": zeros}
    save_safetensors(folder / "model.safetensors", written | changes)


def skip(folder: Path, arrays: Arrays, module: str) -> None:
    """Exclude a module from quantisation, as skip_list_names does."""
    for file in ("act_scales.json", "weight_scales.json"):
        scales = json.loads((folder / file).read_text())
        if file == "weight_scales.json":
            threshold = np.float32(scales[f"{module}.weight_quanter"])
            arrays[f"{module}.weight"] = arrays[f"{module}.weight"] * (threshold / 127)
        kept = {name: value for name, value in scales.items() if not name.startswith(f"{module}.")}
        (folder / file).write_text(json.dumps(kept))


@each("float_module", [None, "mlp.up_proj", "self_attn.v_proj"])
def test_logits(float_module: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the layer that reads the factors, or the layer that had them, is not quantised."""
    arrays = quantise(tmp_path / "source", 127.0, "a8w8")
    factors = factors_of(arrays)
    if float_module:
        skip(tmp_path / "source", arrays, name := f"llama.layers.0.{float_module}")
        monkeypatch.setattr(
            "tests.helpers.paddle_scales.is_quantised",
            lambda weight_name: (
                weight_name.endswith("_proj.weight")
                and not weight_name.startswith(("llama.layers.1.mlp.down_proj", name))
            ),
        )
        state = {key: torch.from_numpy(array) for key, array in arrays.items()}
        floats = {f"model.{name.removeprefix('llama.')}.weight": state[f"{name}.weight"].T.contiguous()}
    else:
        floats = {}
    expected = expected_logits(tmp_path / "source", arrays, factors, floats)
    plain = expected_logits(tmp_path / "source", arrays, None, floats)
    smooth(tmp_path / "source", arrays, factors)
    logits = all_logits(engine_of(tmp_path / "source"), PROMPT)
    differences = (logits.double() - expected).abs().amax(-1)
    # As without factors: the error is that of float32, unless a value is in the middle between two codes.
    assert differences.min() < 1e-5
    assert differences.max() < 0.2
    assert (plain - expected).abs().amax(-1).min() > 0.05
    converted = all_logits(reloaded(convert(tmp_path / "source", tmp_path / "made")), PROMPT)
    assert converted.equal(logits)


def test_scales_take_the_factors_and_codes_stay(tmp_path: Path) -> None:
    arrays = quantise(tmp_path / "plain", 127.0, "a8w8")
    quantise(tmp_path / "source", 127.0, "a8w8")
    factors = factors_of(arrays)
    smooth(tmp_path / "source", arrays, factors)
    before = tensors_in(convert(tmp_path / "plain", tmp_path / "before"))
    after = tensors_in(convert(tmp_path / "source", tmp_path / "after"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    makers = ("self_attn.v_proj", "mlp.up_proj")
    assert changed == {f"model.layers.{layer}.{maker}.weight_scale" for layer in range(2) for maker in makers}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj.weight_scale"
        by = torch.from_numpy(factors[f"llama.layers.{layer}.mlp.down_proj"]).double()
        assert after[name].flatten().equal((before[name].flatten().double() * by).float())


def test_invalid_smoothing_factors_are_refused(tmp_path: Path) -> None:
    arrays = quantise(tmp_path / "source", 127.0, "a8w8")
    factors = factors_of(arrays)
    output_layer, mlp = "llama.layers.0.self_attn.o_proj", "llama.layers.0.mlp.down_proj"
    many, one = factors[output_layer].copy(), np.ones_like(factors[mlp])
    many[0] *= 2
    negative = one * -1
    first = factors[mlp][:-1].copy()
    smooth(tmp_path / "source", arrays, factors)
    for changes, message in (
        (
            {f"{output_layer}.smooth_weight": many},
            r"o_proj\.smooth_weight differs between query heads that read the same value: ",
        ),
        ({f"{mlp}.smooth_weight": negative}, "has factors that are not finite and above 0: it is damaged"),
        ({f"{mlp}.smooth_weight": one * np.float32("nan")}, "has factors that are not finite and above 0"),
        ({f"{mlp}.smooth_weight": first}, f"has {len(first)} factors, which do not fit the outputs of another layer"),
        ({"llama.layers.0.mlp.up_proj.smooth_weight": many}, "which do not fit the outputs of another layer"),
        (
            {f"{mlp}.shift_bias": one},
            r"down_proj\.shift_bias is not zero, but inputs that were shifted",
        ),
        ({f"{mlp}.layer.bias": many}, r"down_proj\.layer\.bias is not zero, but inputs"),
    ):
        smooth(tmp_path / "source", arrays, factors, **changes)
        with pytest.raises(UserError, match=message):
            load(tmp_path / "source")


def test_factors_behind_a_cache_with_scales(tmp_path: Path) -> None:
    """Its values are quantised before they are multiplied, so only factors of down_proj are accepted."""
    arrays = quantise(tmp_path, 127.0, "a8w8c8")
    factors = factors_of(arrays)
    smooth(tmp_path, arrays, factors)
    with pytest.raises(UserError, match=r"o_proj\.smooth_weight follows the cache, .*: quantise without c8, or"):
        load(tmp_path)
    ones = {name: np.ones_like(values) if "o_proj" in name else values for name, values in factors.items()}
    quantise(tmp_path, 127.0, "a8w8c8")
    smooth(tmp_path, arrays, ones)
    assert all_logits(engine_of(tmp_path), PROMPT).isfinite().all()


def test_values_that_are_not_of_the_groups(tmp_path: Path) -> None:
    """The config has other heads than the weights."""
    output_layer, maker = "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.v_proj"
    save_file(
        {f"{maker}.weight": torch.ones(5, 5), f"{output_layer}.smooth_weight": torch.ones(15)},
        tmp_path / "x.safetensors",
    )
    file = SafetensorsFile(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="has 15 factors, which do not fit the outputs of another layer"):
        SmoothedFile(file, Scales("a8w8", {}, {}, {}, is_smoothed=True), [f"{maker}.weight"], 6, 2)


@each("is_coded", [True, False])
def test_values_of_groups_and_their_biases(is_coded: bool, tmp_path: Path) -> None:
    """Six query heads read the values of two heads. The mean of values times a factor equals the mean of multiplied
    values."""
    generator = torch.Generator().manual_seed(2)
    output_layer, maker = "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.v_proj"
    weight, bias = torch.randn(6, 5, generator=generator), torch.randn(6, generator=generator)
    factors = torch.rand(2, 1, 3, generator=generator).add(0.5).expand(2, 3, 3).flatten()
    stored = {f"{maker}.weight": weight, f"{maker}.bias": bias, f"{output_layer}.smooth_weight": factors}
    save_file(
        stored | {f"{output_layer}.layer.weight": torch.randn(7, 18, generator=generator)}, tmp_path / "x.safetensors"
    )
    expected = {f"{maker}.weight", f"{maker}.bias", f"{output_layer}.weight"}
    coded = {output_layer: torch.ones(7, 1)} | ({maker: torch.ones(6, 1)} if is_coded else {})
    scales = Scales("a8w8", coded, {}, {}, is_smoothed=True)
    file = SmoothedFile(SafetensorsFile(tmp_path / "x.safetensors"), scales, expected, 6, 2)
    assert file.shapes.keys() == expected
    assert file.scales.weights[output_layer].equal(torch.ones(7, 1))
    tensors, x = dict(file.read(expected)), torch.randn(5, generator=generator)

    def of_query_heads(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        values = (weight.double() @ x.double() + bias.double()).view(2, 3)
        return values.repeat_interleave(3, 0).flatten()

    rows = tensors[f"{maker}.weight"] * file.scales.weights.get(maker, torch.ones(6, 1))
    assert tensors[f"{maker}.weight"].equal(weight) is is_coded
    own_values = of_query_heads(rows, tensors[f"{maker}.bias"])
    # float32 rounds each product once
    torch.testing.assert_close(own_values, of_query_heads(weight, bias) * factors.double(), rtol=0, atol=1e-6)
