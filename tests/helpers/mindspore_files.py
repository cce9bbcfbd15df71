"""MindSpore checkpoints with MindFormers' names, written by the protobuf library, and their YAML."""

from pathlib import Path
from typing import Any

import torch
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from torch import Tensor

NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
WHOLE = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
    "lm_head.weight": "lm_head.weight",
}
TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16", torch.int8: "Int8"}
MODEL_CONFIG = {
    "type": "LlamaConfig",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 96,
    "intermediate_size": 88,
    "rms_norm_eps": 1e-6,
    "seq_length": 128,
    "eos_token_id": None,
    "compute_dtype": "float16",
    "use_past": True,
}


def messages(packed: bool) -> Any:
    """Return checkpoint.proto's message classes."""
    file = descriptor_pb2.FileDescriptorProto(name=f"checkpoint{packed}.proto", package=f"p{packed}", syntax="proto2")
    kinds, labels = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FieldDescriptorProto
    fields: dict[str, list[tuple[str, int, bool, str]]] = {
        "TensorProto": [
            ("dims", kinds.TYPE_INT64, True, ""),
            ("tensor_type", kinds.TYPE_STRING, False, ""),
            ("tensor_content", kinds.TYPE_BYTES, False, ""),
        ],
        "Value": [("tag", kinds.TYPE_STRING, False, ""), ("tensor", kinds.TYPE_MESSAGE, False, "TensorProto")],
        "Checkpoint": [("value", kinds.TYPE_MESSAGE, True, "Value")],
    }
    for name, members in fields.items():
        message = file.message_type.add(name=name)
        for number, (member, kind, repeated, type_name) in enumerate(members, 1):
            label = labels.LABEL_REPEATED if repeated else labels.LABEL_REQUIRED
            added = message.field.add(name=member, number=number, type=kind, label=label)
            if type_name:
                added.type_name = f".p{packed}.{type_name}"
            if kind == kinds.TYPE_INT64:
                added.options.packed = packed
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p{packed}.Checkpoint"))


CHECKPOINT = {packed: messages(packed) for packed in (False, True)}


def ckpt(tensors: dict[str, Tensor], packed: bool = False, part: int = 2**29) -> bytes:
    """Return the file's bytes. Tensors above `part` bytes are split into several Values, as MindSpore does."""
    checkpoint = CHECKPOINT[packed]()
    for tag, tensor in tensors.items():
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for start in range(0, len(content), part):
            value = checkpoint.value.add(tag=tag)
            value.tensor.dims.extend(tensor.shape)
            value.tensor.tensor_type = TYPES[tensor.dtype]
            value.tensor.tensor_content = content[start : start + part]
    return checkpoint.SerializeToString()


def mindformers_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return f"model.layers.{layer}.{NAMES[module]}.{leaf}"


SOUND = ckpt({mindformers_name(f"model.layers.0.{name}.weight"): torch.ones(3, 2) for name in NAMES})


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {mindformers_name(name): tensor for name, tensor in tensors.items()}


def write_yaml(folder: Path, **config: Any) -> Path:
    content = {
        "run_mode": "predict",
        "model": {"model_config": MODEL_CONFIG | config, "arch": {"type": "LlamaForCausalLM"}},
    }
    (folder / "predict.yaml").write_text(yaml.safe_dump(content))
    return folder
