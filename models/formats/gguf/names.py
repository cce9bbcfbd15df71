"""llama.cpp's names of architectures and tensors, for the families whose GGUF files are read and written."""

import re

ARCHITECTURE = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2"}  # by model_type
ROTARY_FACTORS = "rope_freqs.weight"
WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
IN_EXPERT = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
WHOLE_NAME = re.compile(r"(\w+)\.(weight|bias)")
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
EXPERT_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(\d+)\.weight")  # of files before April 2024
EXPERTS_NAME = re.compile(r"blk\.(\d+)\.(\w+)_exps\.weight")
OUR_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
OUR_EXPERT = re.compile(r"block_sparse_moe\.experts\.\d+\.(w\d)")


def hugging_face_name(name: str) -> str:
    """Return the tensor's name in Hugging Face's layout. An unknown name stays as it is, and is refused as unexpected later."""
    if (match := WHOLE_NAME.fullmatch(name)) and match[1] in WHOLE:
        return f"{WHOLE[match[1]]}.{match[2]}"
    if (match := LAYER_NAME.fullmatch(name)) and match[2] in IN_LAYER:
        return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.{match[3]}"
    if (match := EXPERT_NAME.fullmatch(name)) and match[2] in IN_EXPERT:
        return expert_name(match[1], match[3], IN_EXPERT[match[2]])
    return name


def expert_names(name: str, count: int) -> list[str] | None:
    """Return the names of the experts that a tensor [count, ...] holds, or None for another tensor."""
    match = EXPERTS_NAME.fullmatch(name)
    if match is None or match[2] not in IN_EXPERT:
        return None
    return [expert_name(match[1], i, IN_EXPERT[match[2]]) for i in range(count)]


def expert_name(layer: int | str, expert: int | str, module: str) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{module}.weight"


def llama_cpp_name(name: str) -> str:
    """Return llama.cpp's name of a parameter. The experts of a layer share one name, because they are one tensor."""
    module, _, leaf = name.rpartition(".")
    match = OUR_LAYER_NAME.fullmatch(name)
    if match is None:
        return f"{_key_of(WHOLE, module)}.{leaf}"
    if expert := OUR_EXPERT.fullmatch(match[2]):
        return f"blk.{match[1]}.{_key_of(IN_EXPERT, expert[1])}_exps.{leaf}"
    return f"blk.{match[1]}.{_key_of(IN_LAYER, match[2])}.{leaf}"


def _key_of(names: dict[str, str], wanted: str) -> str:
    return next(key for key, value in names.items() if value == wanted)
