"""PaddleNLP's quantised checkpoints: what its own formulas give, and a compressed-tensors folder by task=convert."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conf.errors import UserError
from models.formats import open_checkpoint
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.conversion import convert, tensors_in
from tests.helpers.goldens import GOLDENS
from tests.helpers.huggingface_files import load
from tests.helpers.paddle_files import Arrays, save_safetensors, write_paddle
from tests.helpers.quantized_models import reloaded

FAMILY, HEADS, GROUPS = "llama3", 4, 2
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
PROMPT = load_file(GOLDENS / FAMILY / "golden.safetensors")["input_ids"][0].tolist()


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight") and not name.startswith("llama.layers.1.mlp.down_proj")  # one that was skipped


def quantise(folder: Path, largest: float, quant_type: str, per_tensor: bool = False) -> Arrays:
    """Write what PTQ leaves: integers in float arrays, and thresholds. Returns the arrays."""
    settings = {"quant_type": quant_type, "smooth": True, "shift": False, "shift_smooth_all_linears": False}
    arrays, _ = write_paddle(folder, GOLDENS / FAMILY, quantization_config=settings)
    inputs, weights, cache = {}, {}, {}
    for name in filter(is_quantised, list(arrays)):
        module = name.removesuffix(".weight")
        threshold = np.abs(arrays[name]).max(None if per_tensor else 0)  # of [inputs, outputs]: one for each output
        arrays[name] = np.round(arrays[name] / threshold * largest).astype(np.float32)
        weights[f"{module}.weight_quanter"] = threshold.tolist()
        if module.rpartition(".")[2] not in SHARED:
            inputs[f"{module}.activation_quanter"] = 3.0 + len(inputs) / 8
    for layer in range(2):
        for own in ("cachek", "cachev"):
            thresholds = [2.0 + layer + head / 4 for head in range(HEADS)]
            cache[f"llama.layers.{layer}.self_attn.{own}_matmul.activation_quanter"] = thresholds
    (folder / "act_scales.json").write_text(json.dumps(inputs))
    (folder / "weight_scales.json").write_text(json.dumps(weights))
    if "c8" in quant_type:
        (folder / "cachekv_scales.json").write_text(json.dumps(cache))
    save_safetensors(folder / "model.safetensors", arrays)
    return arrays


def thresholds(folder: Path, file: str, module: str, end: str) -> Any:
    return json.loads((folder / file).read_text())[f"{module}.{end}"]


def test_codes_and_scales_of_int8(tmp_path: Path) -> None:
    arrays = quantise(tmp_path / "source", 127.0, "a8w8")
    made = tensors_in(convert(tmp_path / "source", tmp_path / "made"))
    for name in filter(is_quantised, arrays):
        module, ours = name.removesuffix(".weight"), name.removesuffix(".weight").replace("llama.", "model.", 1)
        assert made[f"{ours}.weight"].equal(torch.from_numpy(arrays[name].T.astype(np.int8)))
        scale = torch.tensor(thresholds(tmp_path / "source", "weight_scales.json", module, "weight_quanter")) / 127
        assert made[f"{ours}.weight_scale"].equal(scale.unsqueeze(1))
        parent, _, own = module.rpartition(".")
        reader = f"{parent}.{SHARED.get(own, own)}"
        threshold = thresholds(tmp_path / "source", "act_scales.json", reader, "activation_quanter")
        assert made[f"{ours}.input_scale"].equal(torch.tensor([threshold]) / 127)
    assert made["model.layers.1.mlp.down_proj.weight"].is_floating_point()
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def expected_logits(
    folder: Path, arrays: Arrays, factors: Arrays | None = None, floats: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits of transformers' Llama whose layers compute as PaddleNLP's a8w8 does, with its thresholds, in float64.

    factors: by module of PaddleNLP's what it multiplies its inputs by before it codes them. floats: weights that differ from the golden's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((GOLDENS / FAMILY / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**config)).double().eval()
    state = load_file(GOLDENS / FAMILY / "model.safetensors") | (floats or {})
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()}, strict=False)
    for name in filter(is_quantised, arrays):
        module = name.removesuffix(".weight")
        parent, _, own = module.rpartition(".")
        t_a = thresholds(folder, "act_scales.json", f"{parent}.{SHARED.get(own, own)}", "activation_quanter")
        t_w = torch.tensor(thresholds(folder, "weight_scales.json", module, "weight_quanter"), dtype=torch.float64)
        codes = torch.from_numpy(arrays[name]).double()

        def compute(x: torch.Tensor, codes: Any = codes, t_a: float = t_a, t_w: Any = t_w) -> torch.Tensor:
            rounded = (127 * x / t_a).round().clamp(-127, 127)
            return rounded @ codes * (t_w * t_a / (127 * 127))

        model.get_submodule(module.replace("llama.", "model.", 1)).forward = compute
    for module, of_inputs in (factors or {}).items():
        layer = model.get_submodule(module.replace("llama.", "model.", 1))
        layer.register_forward_pre_hook(lambda _, args, by=of_inputs: (args[0] * torch.from_numpy(by),))
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def test_logits_of_int8(tmp_path: Path) -> None:
    arrays = quantise(tmp_path / "source", 127.0, "a8w8")
    expected = expected_logits(tmp_path / "source", arrays)
    golden = load_file(GOLDENS / FAMILY / "golden.safetensors")["logits"][0]
    logits = all_logits(engine_of(tmp_path / "source"), PROMPT)
    differences = (logits.double() - expected).abs().amax(-1)
    # A token is as near as float32 is to float64, unless a value of it or of an earlier one lies in the middle between two codes and is
    # rounded to the other one, which moves its logits by hundredths (0.06 seen; 3 of 17 tokens have no such value).
    assert differences.min() < 1e-5
    assert differences.max() < 0.2
    assert (golden.double() - expected).abs().amax(-1).min() > 0.01
    converted = all_logits(reloaded(convert(tmp_path / "source", tmp_path / "made")), PROMPT)
    assert converted.equal(logits)


def test_fp8(tmp_path: Path) -> None:
    arrays = quantise(tmp_path / "source", 448.0, "a8w8_fp8", per_tensor=True)
    made = tensors_in(convert(tmp_path / "source", tmp_path / "made"))
    name = "llama.layers.0.mlp.up_proj"
    expected = torch.from_numpy(arrays[f"{name}.weight"].T.copy()).to(torch.float8_e4m3fn)
    assert made["model.layers.0.mlp.up_proj.weight"].view(torch.uint8).equal(expected.view(torch.uint8))
    threshold = thresholds(tmp_path / "source", "weight_scales.json", name, "weight_quanter")
    assert made["model.layers.0.mlp.up_proj.weight_scale"].equal(torch.tensor([threshold]) / 448)
    logits = all_logits(engine_of(tmp_path / "source"), PROMPT)
    assert all_logits(reloaded(tmp_path / "made"), PROMPT).equal(logits)


def test_the_cache(tmp_path: Path) -> None:
    """A threshold for each query head, of which a group's first is the key/value head's."""
    quantise(tmp_path / "source", 127.0, "a8w8c8")
    made = tensors_in(convert(tmp_path / "source", tmp_path / "made"))
    expected = torch.tensor([3.0, 3.5]).reshape(GROUPS, 1, 1) / 127
    assert made["model.layers.1.self_attn.k_scale"].equal(expected)
    assert made["model.layers.1.self_attn.v_scale"].equal(expected)
    logits = all_logits(reloaded(tmp_path / "made"), PROMPT)
    assert logits.equal(all_logits(engine_of(tmp_path / "source"), PROMPT))
    quantise(tmp_path / "without", 127.0, "a8w8")
    assert not logits.equal(all_logits(engine_of(tmp_path / "without"), PROMPT))


def change(folder: Path, file: str, **entries: Any) -> None:
    values = json.loads((folder / file).read_text())
    for name, value in entries.items():
        values = {key: value if key.endswith(name) else old for key, old in values.items()}
    (folder / file).write_text(json.dumps(values))


@pytest.mark.parametrize("value", [0.0, -1.0, [], [1.0, 2.0], "3", None, float("nan")])
def test_thresholds_that_are_none(value: Any, tmp_path: Path) -> None:
    quantise(tmp_path, 127.0, "a8w8")
    change(tmp_path, "act_scales.json", **{"o_proj.activation_quanter": value})
    with pytest.raises(UserError, match=r"the thresholds of .*o_proj are .*, expected 1 finite numbers above 0"):
        open_checkpoint(tmp_path, False)


def test_a_threshold_of_another_shape(tmp_path: Path) -> None:
    quantise(tmp_path, 127.0, "a8w8")
    change(tmp_path, "weight_scales.json", **{"layers.0.mlp.up_proj.weight_quanter": [1.0, 2.0]})
    with pytest.raises(
        UserError, match=r"weight_scales\.json has 2 thresholds of model\.layers\.0\.mlp\.up_proj, whose weight is"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("act_scales.json", "llama.layers.0.self_attn.o_proj.layer"),
        ("weight_scales.json", "llama.layers.0.mlp.up_proj"),
        ("cachekv_scales.json", "llama.layers.0.self_attn.activation_quanter"),
    ],
)
def test_entries_that_are_no_thresholds(file: str, name: str, tmp_path: Path) -> None:
    quantise(tmp_path, 127.0, "a8w8c8")
    values = json.loads((tmp_path / file).read_text()) | {name: 1.0}
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"{file}: {name} is no threshold that is known"):
        open_checkpoint(tmp_path, False)


def test_a_threshold_of_a_number(tmp_path: Path) -> None:
    arrays = quantise(tmp_path, 127.0, "a8w8")
    save_safetensors(tmp_path / "model.safetensors", arrays | {"llama.extra.weight": np.float32([1.0]).reshape(())})
    for file, end in (("act_scales.json", "activation_quanter"), ("weight_scales.json", "weight_quanter")):
        values = json.loads((tmp_path / file).read_text()) | {f"llama.extra.{end}": 1.0}
        (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"has 1 thresholds of model\.extra, whose weight is \(\)"):
        load(tmp_path)


def test_weights_that_are_no_codes(tmp_path: Path) -> None:
    arrays = quantise(tmp_path, 127.0, "a8w8")
    name = "llama.layers.0.mlp.up_proj.weight"
    for wrong in (arrays[name] / 127, arrays[name] * 2):
        save_safetensors(tmp_path / "model.safetensors", arrays | {name: wrong})
        with pytest.raises(UserError, match=r"up_proj\.weight holds values that are no codes of torch\.int8"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_type": "weight_only_int4"},
            "quant_type='weight_only_int4' is not supported: only 'a8w8', 'a8w8c8', 'a8w8_fp8'",
        ),
        (
            {"quant_type": "a8w8", "shift": True},
            "shift=True is not supported: codes of a vector that is added before them have no scale for a tensor: quantise without",
        ),
        (
            {"quant_type": "a8w8_fp8", "shift_smooth_all_linears": True},
            "shift_smooth_all_linears=True is not supported: only False",
        ),
        ({"weight_quantize_algo": "weight_only_int8"}, "weight_quantize_algo='weight_only_int8' is not supported"),
        ({"quant_type": "a8w8", "quant_method": "fp8"}, "quant_method='fp8' is not supported: only None"),
        ({}, r"has weight_scales\.json, but its config has no quantization_config with a quant_type"),
        ({"quant_type": "a8w8c8"}, r"quantised \(a8w8c8\), but has no cachekv_scales\.json"),
    ],
)
def test_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    quantise(tmp_path, 127.0, "a8w8")
    write_paddle(tmp_path, GOLDENS / FAMILY, quantization_config=settings)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path, False)


def test_files_that_are_missing(tmp_path: Path) -> None:
    quantise(tmp_path, 127.0, "a8w8")
    (tmp_path / "act_scales.json").rename(tmp_path / "act_scales_0.json")
    with pytest.raises(UserError, match=r"has not both act_scales\.json and weight_scales\.json: join those of ranks"):
        open_checkpoint(tmp_path, False)


def test_a_threshold_is_missing(tmp_path: Path) -> None:
    quantise(tmp_path, 127.0, "a8w8")
    values = json.loads((tmp_path / "act_scales.json").read_text())
    del values["llama.layers.0.self_attn.q_proj.activation_quanter"]
    (tmp_path / "act_scales.json").write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"no threshold of the input of model\.layers\.0\.self_attn\.[qkv]_proj, whose weight"
    ):
        open_checkpoint(tmp_path, False)
