"""Models for texts and images, of which only the text model is read."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from conf.decoding import DecodeConfig
from pipelines.loading.model_source import resolve_model
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
GEMMA4 = {"global_head_dim": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
MROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}


SMALL_PICTURES = {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
DEEPSEEK = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4},
}
LLAMA4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 7,
    "floor_scale": 4,
}
LLAMA4_PICTURES = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 16)
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # transformers leaves out logit_scale
    "aya_vision": ({"sliding_window": 8, "logit_scale": 1.0}, SMALL_PICTURES, {"alignment_intermediate_size": 32}),
    "cohere2_vision": ({"sliding_window": 8, "logit_scale": 1.0}, SMALL_PICTURES, {"alignment_intermediate_size": 32}),
    "exaone4_5": (
        {"sliding_window": 8, "model_type": "exaone4"},
        {"depth": 1, "out_hidden_size": 48, "patch_size": 4},
        {},
    ),
    "got_ocr2": ({}, {**SMALL_PICTURES, "output_channels": 16, "mlp_dim": 16, "global_attn_indexes": [0]}, {}),
    "idefics3": ({}, SMALL_PICTURES, {}),
    "internvl": ({}, {**SMALL_PICTURES, "image_size": [8, 8], "patch_size": [4, 4]}, {}),
    "kimi_k25": (DEEPSEEK, {"num_hidden_layers": 1, "patch_size": 4}, {"image_token_id": 96}),
    "lighton_ocr": ({}, {**SMALL_PICTURES, "head_dim": 8}, {}),
    "llama4": (LLAMA4, {**SMALL_PICTURES, **LLAMA4_PICTURES}, {"image_token_index": 96}),
    "llava": ({}, {**SMALL_PICTURES, "model_type": "clip_vision_model"}, {}),
    "llava_next": ({}, {**SMALL_PICTURES, "model_type": "clip_vision_model"}, {}),
    "llava_onevision": ({}, SMALL_PICTURES, {}),
    "ovis2": ({}, SMALL_PICTURES, {"vocab_size": 96, "hidden_size": 48}),
    "smolvlm": ({}, SMALL_PICTURES, {}),
    "video_llama_3": ({}, {"num_hidden_layers": 1, "patch_size": 4}, {}),
}
"""Settings of the text, of the images and of the wrapper."""


def write_other(folder: Path, model_type: str, tie_word_embeddings: bool) -> Any:
    """Write a random model of one of OTHERS, and return transformers' model of it."""
    text, vision, outer = OTHERS[model_type]
    sizes = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = transformers.AutoConfig.for_model(
        model_type,
        text_config={**sizes, "tie_word_embeddings": tie_word_embeddings, **text},
        vision_config={**PICTURES, **vision},
        tie_word_embeddings=tie_word_embeddings,
        **{"image_token_id": 3, **outer},
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    reference = write_random(folder, model)
    if model_type == "kimi_k25":  # transformers also renames layers of the text like layers for images
        tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return reference


def write_gemma3n(folder: Path, tie_word_embeddings: bool) -> Any:
    """Write a random Gemma 3n, and return transformers' model of its text.

    transformers builds the image tower with the package timm. Names and settings are the published files'.
    """
    text = {**TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "laurel_rank": 5}
    text |= {"num_kv_shared_layers": 1, "num_hidden_layers": 3}
    text |= {"activation_sparsity_pattern": [0.95, 0.0, 0.5], "layer_types": [*GEMMA4["layer_types"], "full_attention"]}
    text |= {"sliding_window": 6, "tie_word_embeddings": tie_word_embeddings}
    wrapper = transformers.Gemma3nConfig(text_config=text, tie_word_embeddings=tie_word_embeddings)
    reference = write_random(folder, transformers.Gemma3nForCausalLM(wrapper.text_config))
    wrapper.architectures = ["Gemma3nForConditionalGeneration"]
    wrapper.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    for tower in ("audio_tower.subsample_conv_projection", "embed_audio.embedding", "embed_vision.embedding"):
        tensors[f"model.{tower}.weight"] = torch.zeros(3)
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return reference


def reference_of(model_type: str, **text: Any) -> Any:
    """Return transformers' model of the wrapper, with few layers for images."""
    is_qwen = model_type.startswith("qwen")
    vision = QWEN_PICTURES if is_qwen else {**PICTURES, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    outer: dict[str, Any] = {"tie_word_embeddings": text.pop("tie_word_embeddings", False)}
    if is_qwen:
        text = {"rope_parameters": MROPE, **text}
        outer |= dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 3)
    else:
        outer["image_token_id" if model_type.startswith("gemma") else "image_token_index"] = 3
    if model_type.startswith("gemma4"):
        text = {**GEMMA4, **text}
        # ids that no text has: transformers replaces them before it looks up the inputs of the layers
        outer |= {"audio_config": None, "image_token_id": 97, "video_token_id": 98, "audio_token_id": 99}
    if model_type == "gemma4":
        text = {**GEMMA4_INPUTS, **text}
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
    """Compare logits and greedy tokens of a batch of texts, and check that every key of the config is read."""
    source = resolve_model(run_config(folder).model)
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


def change(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
