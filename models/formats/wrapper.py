"""Load the text model of a multimodal checkpoint as a separate checkpoint, without vision tower and projector."""

import logging
from typing import Any

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.base import WeightFile
from models.formats.renamed import renamed

log = logging.getLogger(__name__)

TEXT_MODELS = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "kimi_k2",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "perception_lm": "llama",
    "qianfan_ocr": "qwen3",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
}
"""The text model's `model_type` by the wrapper's, if `text_config` does not name one of `registry.ARCHITECTURES`."""
TEXT_TYPES = {
    "exaone4_5_text": "exaone4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""The equivalent architecture by the text's `model_type`. They are equivalent if all positions are text positions."""
OTHER_TOWERS = tuple(
    prefix + name
    for prefix in ("", "model.")
    for name in """
    audio_tower. connector. embed_audio. embed_vision. image_newline mm_projector. multi_modal_projector. projector.
    vision_embedder. vision_encoder. vision_model. vision_projection. vision_tower. visual. visual_embeddings_table.
    """.split()
)
"""Name prefixes of tensors that text does not use."""
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""Name prefixes of the text's tensors: in a text checkpoint, by the prefix in the wrapper. The first match applies."""
OTHER_SETTINGS = frozenset(
    """
    _pad_token_id adapter_layer_norm_eps alignment_intermediate_size audio_config audio_soft_tokens_per_image
    audio_token_id boa_token_id boi_token_id boi_token_index downsample_factor downsample_ratio eoa_token_id
    eoa_token_index eoi_token_id eoi_token_index ignore_index image_grid_pinpoints image_seq_length
    image_token_id image_token_index language_model_only media_placeholder_token_id mm_tokens_per_image
    multimodal_projector_bias projection_hidden_size projection_layer_norm_eps projector_hidden_act
    scale_factor spatial_merge_size use_unified_vision_chunk video_placeholder video_token_id
    video_token_index vision_aspect_ratio vision_config vision_end_token_id vision_feature_layer
    vision_feature_select_strategy vision_soft_tokens_per_image vision_start_token_id vision_token_id
    visual_indicator_token_ids
    """.split()
)
"""Settings of a wrapper without effect on text."""
OUTER_WINS = ("architectures", "eos_token_id", "quantization_config", "tie_word_embeddings")
"""Settings of the whole checkpoint, which override `text_config`."""


TEXT_DEFAULTS = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Settings that files of LLaVA omit, because they equal the defaults of transformers, by the text's `model_type`."""


def is_wrapper(config: dict[str, Any]) -> bool:
    return config.get("model_type") in TEXT_MODELS


def text_config(config: dict[str, Any], where: str) -> ConfigReader:
    """Return the config of a wrapper's text. Raises UserError if `text_config` is not an object.

    The first files of Qwen2-VL have the text's settings at the top level.
    """
    wrapper = str(config["model_type"])
    inner = config.get("text_config") or {}
    if not isinstance(inner, dict):
        raise UserError(f"{where}: text_config={inner!r} is not an object")
    outer = {key: value for key, value in config.items() if key not in OTHER_SETTINGS | {"text_config", "model_type"}}
    values = outer | inner | {key: outer[key] for key in OUTER_WINS if outer.get(key) is not None}
    text_type = inner.get("model_type", wrapper)
    if text_type == wrapper:
        text_type = TEXT_MODELS[wrapper]
    values["model_type"] = TEXT_TYPES.get(str(text_type), text_type)
    values = TEXT_DEFAULTS.get(str(text_type), {}) | values
    if wrapper == "qwen3_vl_moe":  # its own code always normalises
        ConfigReader(values, where).expect("norm_topk_prob", (True, None), None)
        values["norm_topk_prob"] = True
    names = values.get("architectures")
    if isinstance(names, list) and all(str(name).endswith("ForConditionalGeneration") for name in names):
        del values["architectures"]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(key), dict):
            values[key] = _rope_of_text(values[key])
    if isinstance(values.get("quantization_config"), dict):
        values["quantization_config"] = _quantization_of_text(values["quantization_config"], where)
    return ConfigReader(values, where)


def _rope_of_text(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a type of text."""
    return scaling | {key: "default" for key in ("type", "rope_type") if scaling.get(key) == "mrope"}


def _quantization_of_text(settings: dict[str, Any], where: str) -> dict[str, Any]:
    keys = ("ignore", "modules_to_not_convert", "ignored_layers")
    changed = settings | {key: _names_in_text(settings[key], key, where) for key in keys if key in settings}
    groups = settings.get("config_groups")
    if isinstance(groups, dict):
        changed["config_groups"] = {
            name: group | {"targets": _names_in_text(group["targets"], f"{name}: targets", where)}
            if isinstance(group, dict) and "targets" in group
            else group
            for name, group in groups.items()
        }
    return changed


def _names_in_text(names: Any, key: str, where: str) -> Any:
    """Return a list of modules without modules of other towers, with their names in a text checkpoint.

    Raises UserError for an expression with the name of the text model.
    """
    if not isinstance(names, list):
        return names
    texts = [name for name in names if not (isinstance(name, str) and f"{name}.".startswith(OTHER_TOWERS))]
    texts = [text_name(name) if isinstance(name, str) else name for name in texts]
    if unclear := [name for name in texts if "language_model" in str(name)]:
        raise UserError(
            f"{where}: quantization_config: {key}: {unclear[0]!r} does not show "
            "which modules of the text it names: give their full names"
        )
    return texts


def text_name(name: str) -> str:
    """Return a text tensor's or module's name in a text checkpoint."""
    for prefix, text_prefix in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name


def text_files(files: list[WeightFile]) -> list[WeightFile]:
    """Return the files without the tensors of vision tower and projector, and log one line about these.

    Unknown tensors stay. Raises UserError if two tensors would have the same name.
    """
    texts, left_out = list[WeightFile](), list[str]()
    for file in files:
        skipped = [name for name in file.shapes if name.startswith(OTHER_TOWERS)]
        names = {text_name(name): name for name in file.shapes if not name.startswith(OTHER_TOWERS)}
        if len(names) + len(skipped) < len(file.shapes):
            raise UserError(
                f"{file.path} holds tensors of the text twice: with and without language_model in their names"
            )
        texts.append(renamed(file, names))
        left_out += skipped
    if left_out:
        prefixes = [prefix for prefix in OTHER_TOWERS if any(name.startswith(prefix) for name in left_out)]
        log.warning("%d tensors of %s are not loaded: only text is supported", len(left_out), ", ".join(prefixes))
    return texts
