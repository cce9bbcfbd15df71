"""The text of multimodal checkpoints against transformers' whole model, in every spelling of configs and names that is around."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.formats.wrapper import text_config
from pipelines.loading import load_engine
from pipelines.opening import open_source
from pipelines.request_settings import read_request_settings
from tests.helpers.builders import all_logits, complete, engine_of, run_config
from tests.helpers.oracle import NEW_TOKENS, TOLERANCE, random_prompts, write_random

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
PICTURES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_heads": 2}
QWEN_PICTURES = {**PICTURES, "depth": 1, "embed_dim": 16, "out_hidden_size": 48, "patch_size": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}


def reference_of(model_type: str, **text: Any) -> Any:
    """transformers' model of the wrapper, with few layers for pictures."""
    is_qwen = model_type.startswith("qwen")
    vision = QWEN_PICTURES if is_qwen else {**PICTURES, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    outer: dict[str, Any] = {"tie_word_embeddings": text.pop("tie_word_embeddings", False)}
    if is_qwen:
        text = {"rope_parameters": MROPE, **text}
        outer |= dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 3)
    else:
        outer["image_token_id" if model_type == "gemma3" else "image_token_index"] = 3
    if model_type == "qwen3_vl_moe":
        text = {**EXPERTS, **text}
    if model_type == "qwen2_vl":
        vision = {**vision, "hidden_size": 48}
    sizes = {**TEXT, **text}
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        del sizes["head_dim"]
        sizes |= {"hidden_size": 64}
        vision = {**vision, "hidden_size": 64 if model_type == "qwen2_vl" else 16, "out_hidden_size": 64}
    config = transformers.AutoConfig.for_model(model_type, text_config=sizes, vision_config=vision, **outer)
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")


def assert_equal(folder: Path, reference: Any) -> None:
    """Logits and greedy tokens of texts, together; no key of the config unread."""
    source = open_source(run_config(folder).model)
    assert source.checkpoint.config.unread() == []
    engine, expected_ids, prompts = engine_of(folder), [], random_prompts(96)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = reference(input_ids=ids).logits[0]
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=TOLERANCE, rtol=0)
        output = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        expected_ids.append(output[0, len(prompt) :].tolist())
    answers = complete(engine, prompts, DecodeConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == expected_ids


def rename(folder: Path, prefixes: dict[str, str]) -> None:
    """Give the tensors' names other beginnings: the first that fits."""
    file = folder / "model.safetensors"

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    save_file({renamed(name): tensor for name, tensor in load_file(file).items()}, file)


def change(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


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
    },
    "new": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "visual.": "model.visual.",
    },
}
WRAPPERS = ("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_equals_transformers(model_type: str, spelling: str, tmp_path: Path) -> None:
    reference = write_random(tmp_path, reference_of(model_type, tie_word_embeddings=spelling == "new"))
    rename(tmp_path, SPELLINGS[spelling])
    assert_equal(tmp_path, reference)


def test_settings_beside_those_of_pictures(tmp_path: Path) -> None:
    """The files of Qwen2-VL on the hub, whose tensors of text have no prefix, either."""
    reference = write_random(tmp_path, reference_of("qwen2_vl"))
    rename(tmp_path, {"model.language_model.": "model.", "language_model.model.": "model.", "model.visual.": "visual."})
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["rope_parameters"]
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(text | config | rope))
    assert_equal(tmp_path, reference)


def test_what_is_left_out_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = write_random(tmp_path, reference_of("mistral3"))
    rename(tmp_path, SPELLINGS["new"])
    others = sum(not name.startswith("model.language_model.") for name in load_file(tmp_path / "model.safetensors")) - 1
    assert others == sum(1 for name, _ in reference.model.named_parameters() if not name.startswith("language_model."))
    with caplog.at_level(logging.WARNING):
        load_engine(run_config(tmp_path), 1)
    told = "tensors of model.vision_tower., model.multi_modal_projector. are not loaded: only text is computed"
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
    with pytest.raises(UserError, match="holds tensors of its text twice, with language_model in their names and"):
        engine_of(tmp_path)


def test_the_end_of_a_text_is_the_whole_checkpoints(tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("mistral3"))
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change(tmp_path, eos_token_id=[7, 9], text_config=inner | {"eos_token_id": 3})
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    run = run_config(tmp_path)
    assert set(read_request_settings(run.model, open_source(run.model)).eos_token_ids) == {7, 9}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": [1]}, r"config\.json: text_config=\[1\] is not an object"),
        (
            {"quantization_config": {"ignore": ["re:.*language_model.*q_proj"]}},
            r"quantization_config: ignore: 're:\.\*language_model\.\*q_proj' cannot be told of the text alone",
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
        open_source(run_config(tmp_path).model)
