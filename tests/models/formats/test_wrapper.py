"""The text model of multimodal checkpoints compared with transformers' whole model, in every published spelling of
configs and names."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from conf.errors import UserError
from models.formats.wrapper import text_config
from models.registry import ARCHITECTURES
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.request_settings import read_request_settings
from tests.helpers.builders import engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.oracle import write_random
from tests.helpers.wrapped_models import OTHERS, TEXT, assert_equal, change, reference_of, write_gemma3n, write_other


def rename(folder: Path, prefixes: dict[str, str]) -> None:
    """Replace the beginnings of the tensors' names, by the first that matches."""
    file = folder / "model.safetensors"

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    save_file({renamed(name): tensor for name, tensor in load_file(file).items()}, file)


def add_tensors(folder: Path, **tensors: Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


SPELLINGS = {
    "old": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.visual.": "visual.",
        "model.mm_projector.": "mm_projector.",
    },
    "new": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "visual.": "model.visual.",
    },
}
WRAPPERS = tuple(
    "gemma3 gemma3n gemma4 gemma4_unified mistral3 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe".split()
) + tuple(OTHERS)
CASES = [(model_type, spelling) for model_type in WRAPPERS for spelling in SPELLINGS]


@each("model_type, spelling", CASES, quick=[("gemma3", "old"), ("qwen2_vl", "new")])
def test_equals_transformers(model_type: str, spelling: str, tmp_path: Path) -> None:
    is_tied = spelling == "new"
    if model_type == "gemma3n":
        reference = write_gemma3n(tmp_path, is_tied)
    elif model_type in OTHERS:
        reference = write_other(tmp_path, model_type, is_tied)
    else:
        reference = write_random(tmp_path, reference_of(model_type, tie_word_embeddings=is_tied))
    rename(tmp_path, SPELLINGS[spelling])
    assert_equal(tmp_path, reference)


def test_settings_next_to_image_settings(tmp_path: Path) -> None:
    """The hub's files of Qwen2-VL, whose text tensors have no prefix either."""
    reference = write_random(tmp_path, reference_of("qwen2_vl"))
    rename(tmp_path, {"model.language_model.": "model.", "language_model.model.": "model.", "model.visual.": "visual."})
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["rope_parameters"]
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(text | config | rope))
    assert_equal(tmp_path, reference)


def test_tensors_that_are_not_loaded_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = write_random(tmp_path, reference_of("mistral3"))
    rename(tmp_path, SPELLINGS["new"])
    others = sum(not name.startswith("model.language_model.") for name in load_file(tmp_path / "model.safetensors")) - 1
    assert others == sum(1 for name, _ in reference.model.named_parameters() if not name.startswith("language_model."))
    with caplog.at_level(logging.WARNING):
        load_engine(run_config(tmp_path), 1)
    told = "tensors of model.multi_modal_projector., model.vision_tower. are not loaded: only text is supported"
    assert [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()] == [
        f"{others} {told}"
    ]


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("mistral3"))
    rename(tmp_path, SPELLINGS["new"])
    add_tensors(tmp_path, **{"model.ears.weight": torch.zeros(3), "model.language_model.more": torch.zeros(3)})
    with pytest.raises(UserError, match=r"unexpected: model\.ears\.weight, model\.more$"):
        engine_of(tmp_path)


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("mistral3"))
    rename(tmp_path, SPELLINGS["new"])
    add_tensors(tmp_path, **{"model.norm.weight": torch.zeros(48)})
    with pytest.raises(
        UserError, match="holds tensors of the text twice: with and without language_model in their names"
    ):
        engine_of(tmp_path)


def test_the_end_of_a_text_is_the_whole_checkpoints(tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("mistral3"))
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change(tmp_path, eos_token_id=[7, 9], text_config=inner | {"eos_token_id": 3})
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    run = run_config(tmp_path)
    assert set(read_request_settings(run.model, resolve_model(run.model)).eos_token_ids) == {7, 9}


def test_sizes_of_llava_that_its_files_omit() -> None:
    """They equal the defaults of transformers."""
    for text in ("llama", "mistral"):
        inner = {"model_type": text, "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
        reader = text_config({"model_type": "llava_next", "text_config": inner}, "config.json")
        shape = ARCHITECTURES[text].read_config(reader)
        expected = AutoConfig.for_model(text)
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        assert [getattr(shape, key) for key in sizes] == [getattr(expected, key) for key in sizes]


MISTRAL3: dict[str, Any] = {"model_type": "mistral3", "text_config": {"model_type": "mistral", **TEXT}}


def test_lists_of_modules_name_those_of_the_text() -> None:
    ignored = ["model.language_model.layers.0.mlp.down_proj", "language_model.lm_head", "lm_head", "re:.*mlp.gate$"]
    others = ["model.vision_tower", "vision_tower.patch_conv", "multi_modal_projector"]
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        settings = {"quant_method": "fp8", key: [*others, *ignored]}
        values = text_config(MISTRAL3 | {"quantization_config": settings}, "config.json").values
        assert values["quantization_config"] == {
            "quant_method": "fp8",
            key: ["model.layers.0.mlp.down_proj", "lm_head", "lm_head", "re:.*mlp.gate$"],
        }
    groups = {"group_0": {"targets": ["Linear", "language_model.model.layers.0.mlp.up_proj"], "weights": {}}}
    values = text_config(MISTRAL3 | {"quantization_config": {"config_groups": groups}}, "config.json").values
    (group,) = values["quantization_config"]["config_groups"].values()
    assert group == {"targets": ["Linear", "model.layers.0.mlp.up_proj"], "weights": {}}


@each(
    "changes, message",
    [
        ({"text_config": [1]}, r"config\.json: text_config=\[1\] is not an object"),
        (
            {"quantization_config": {"ignore": ["re:.*language_model.*q_proj"]}},
            r"quantization_config: ignore: 're:\.\*language_model\.\*q_proj' does not show which modules of the text",
        ),
        (
            {"quantization_config": {"config_groups": {"group_0": {"targets": ["re:.*language_model.*"]}}}},
            r"quantization_config: group_0: targets: 're:\.\*language_model\.\*' does not show which modules of the text",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        text_config(MISTRAL3 | changes, "config.json")


def test_another_text_is_refused_by_its_name(tmp_path: Path) -> None:
    config = MISTRAL3 | {"text_config": {"model_type": "brand_new", **TEXT}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type='brand_new' is not supported: only "):
        resolve_model(run_config(tmp_path).model)
