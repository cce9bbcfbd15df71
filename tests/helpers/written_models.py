"""Whole models after a soft prefix, in plain PyTorch and float64, without a cache.

T tokens, P virtual tokens, L layers, H heads, D channels per head, V vocabulary. A prefix is PaddleNLP's array [L, 2,
H, P, D]. Positions, masks and biases follow PaddleNLP's llm/predict/predictor.py; Qwen's scalings follow its
transformers/qwen/modeling.py.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from tests.helpers.catalog import GOLDENS, link

Weights: TypeAlias = dict[str, Tensor]
"""By the checkpoint's names, in float64."""
LAYERS, HEADS, HEAD_DIM, EPS = 2, 4, 16, 1e-6  # of all models in this file
NO_PREFIX = torch.zeros(LAYERS, 2, HEADS, 0, HEAD_DIM, dtype=torch.float64)
GMASK, SOP = 281, 284
QWEN: dict[str, Any] = {
    "model_type": "qwen",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": 96,
    "kv_channels": HEAD_DIM,
    "layer_norm_epsilon": EPS,
    "rotary_emb_base": 10000,
    "seq_length": 16,
    "max_position_embeddings": 256,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}


def attended(query: Tensor, key: Tensor, value: Tensor, past: Tensor, scale: float, bias: Tensor) -> Tensor:
    """Return attention [T, H * D] of query, key and value [T, H, D] after the keys and values [2, H, P, D]. bias [H or
    1, T, P + T]."""
    keys, values = (torch.cat((old.transpose(0, 1), new)) for old, new in zip(past, (key, value), strict=True))
    weights = (torch.einsum("qhd,khd->hqk", query, keys) * scale + bias).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def later_tokens(num_tokens: int, num_virtual: int, seen_by_all: int = 0) -> Tensor:
    """Return the mask [1, T, P + T]: minus infinity for later tokens, except the first `seen_by_all` tokens of a
    prompt."""
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    hidden[:, :seen_by_all] = False
    visible = torch.zeros(num_tokens, num_virtual + num_tokens, dtype=torch.float64)
    visible[:, num_virtual:].masked_fill_(hidden, -torch.inf)
    return visible[None]


def alibi(num_tokens: int, num_virtual: int) -> Tensor:
    """Return the bias [H, T, P + T]: slope times the key's position, which counts virtual tokens. The slopes of 4 heads
    are 2^-2 to 2^-8."""
    slopes = torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(HEADS)], dtype=torch.float64)
    places = torch.arange(num_virtual + num_tokens, dtype=torch.float64)
    return slopes[:, None, None] * places + later_tokens(num_tokens, num_virtual)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM))


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def centred(w: Weights, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def rms(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}.weight"]


def swish(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [T, H, D] rotated: channels i and i + D/2 are a complex number, multiplied by the angle [T, D/2]."""
    real, imaginary = x.chunk(2, dim=-1)
    pairs = torch.complex(real, imaginary) * torch.exp(1j * angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def bloom(w: Weights, ids: list[int], prefix: Tensor) -> Tensor:
    """Return logits [T, V]."""
    x = centred(w, "word_embeddings_layernorm", w["word_embeddings.weight"][ids])
    bias = alibi(len(ids), prefix.shape[3])
    for i, past in enumerate(prefix):
        h = f"h.{i}"
        fused = affine(w, f"{h}.self_attention.query_key_value", centred(w, f"{h}.input_layernorm", x))
        query, key, value = fused.unflatten(-1, (HEADS, 3, HEAD_DIM)).unbind(2)
        x = x + affine(w, f"{h}.self_attention.dense", attended(query, key, value, past, HEAD_DIM**-0.5, bias))
        y = affine(w, f"{h}.mlp.dense_h_to_4h", centred(w, f"{h}.post_attention_layernorm", x))
        x = x + affine(w, f"{h}.mlp.dense_4h_to_h", gelu(y, approximate="tanh"))
    return centred(w, "ln_f", x) @ w["word_embeddings.weight"].T


def baichuan_13b(w: Weights, ids: list[int], prefix: Tensor) -> Tensor:
    """Return logits [T, V]."""
    x = w["model.embed_tokens.weight"][ids]
    bias = alibi(len(ids), prefix.shape[3])
    for i, past in enumerate(prefix):
        h = f"model.layers.{i}"
        fused = rms(w, f"{h}.input_layernorm", x) @ w[f"{h}.self_attn.W_pack.weight"].T
        query, key, value = map(heads, fused.chunk(3, dim=-1))
        x = x + attended(query, key, value, past, HEAD_DIM**-0.5, bias) @ w[f"{h}.self_attn.o_proj.weight"].T
        y = rms(w, f"{h}.post_attention_layernorm", x)
        gated = swish(y @ w[f"{h}.mlp.gate_proj.weight"].T) * (y @ w[f"{h}.mlp.up_proj.weight"].T)
        x = x + gated @ w[f"{h}.mlp.down_proj.weight"].T
    return rms(w, "model.norm", x) @ w["lm_head.weight"].T


def chatglm(w: Weights, ids: list[int], prefix: Tensor) -> Tensor:
    """Return logits [T, V] of ids that contain [gMASK] and <sop>: the text begins at position 0, and every token
    attends to all of it."""
    text_length, mask = ids.index(SOP), ids.index(GMASK)
    places = torch.tensor([i if i < text_length else mask for i in range(len(ids))]).double()
    blocks = torch.tensor([max(0, i - text_length + 1) for i in range(len(ids))]).double()
    bias = later_tokens(len(ids), prefix.shape[3], text_length)
    residual = math.sqrt(2 * 28)
    x = w["transformer.word_embeddings.weight"][ids]
    for i, past in enumerate(prefix):
        h = f"transformer.layers.{i}"
        frequencies = w[f"{h}.attention.rotary_emb.inv_freq"]  # [D/4]
        x = centred(w, f"{h}.input_layernorm", x)
        fused = affine(w, f"{h}.attention.query_key_value", x)
        query, key, value = fused.unflatten(-1, (HEADS, 3 * HEAD_DIM)).chunk(3, dim=-1)

        def both(y: Tensor, frequencies: Tensor = frequencies) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return torch.cat(
                (turned(first, places[:, None] * frequencies), turned(second, blocks[:, None] * frequencies)), -1
            )

        y = attended(both(query), both(key), value, past, HEAD_DIM**-0.5, bias)
        x = x * residual + affine(w, f"{h}.attention.dense", y)
        x = centred(w, f"{h}.post_attention_layernorm", x)
        y = gelu(affine(w, f"{h}.mlp.dense_h_to_4h", x), approximate="tanh")
        x = x * residual + affine(w, f"{h}.mlp.dense_4h_to_h", y)
    return centred(w, "transformer.final_layernorm", x) @ w["lm_head.weight"].T


def qwen(
    w: Weights, ids: list[int], prefix: Tensor, prompt_length: int = 0, first: int = 0, logn: bool = True
) -> Tensor:
    """Return logits [T, V]. The rotary base follows the prompt's length; 0: it is the initial base. `first`: the first
    token's position."""
    num_virtual = prefix.shape[3]
    alpha = next(2 ** (k + 1) - 1 for k in range(9) if prompt_length <= QWEN["seq_length"] * 2**k)
    base = QWEN["rotary_emb_base"] * alpha ** (HEAD_DIM / (HEAD_DIM - 2))
    frequencies = torch.tensor([1 / base ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], dtype=torch.float64)
    angles = torch.arange(first, first + len(ids))[:, None] * frequencies
    places = range(num_virtual, num_virtual + len(ids))
    scales = [math.log(p + 1, QWEN["seq_length"]) if logn and p + 1 > QWEN["seq_length"] else 1.0 for p in places]
    bias = later_tokens(len(ids), num_virtual)
    x = w["transformer.wte.weight"][ids]
    for i, past in enumerate(prefix):
        h = f"transformer.h.{i}"
        query, key, value = map(heads, affine(w, f"{h}.attn.c_attn", rms(w, f"{h}.ln_1", x)).chunk(3, dim=-1))
        query = turned(query, angles) * torch.tensor(scales, dtype=torch.float64)[:, None, None]
        y = attended(query, turned(key, angles), value, past, HEAD_DIM**-0.5, bias)
        x = x + y @ w[f"{h}.attn.c_proj.weight"].T
        y = rms(w, f"{h}.ln_2", x)
        gated = swish(y @ w[f"{h}.mlp.w2.weight"].T) * (y @ w[f"{h}.mlp.w1.weight"].T)
        x = x + gated @ w[f"{h}.mlp.c_proj.weight"].T
    return rms(w, "transformer.ln_f", x) @ w["lm_head.weight"].T


def write_qwen(folder: Path, **config: bool) -> Weights:
    """Write a random model and return its weights."""
    hidden, half, vocabulary = QWEN["hidden_size"], QWEN["intermediate_size"] // 2, QWEN["vocab_size"]
    shapes = {"transformer.wte.weight": (vocabulary, hidden), "transformer.ln_f.weight": (hidden,)}
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        shapes |= {f"{h}.ln_1.weight": (hidden,), f"{h}.ln_2.weight": (hidden,)}
        shapes |= {f"{h}.attn.c_attn.weight": (3 * hidden, hidden), f"{h}.attn.c_attn.bias": (3 * hidden,)}
        shapes |= {f"{h}.attn.c_proj.weight": (hidden, hidden), f"{h}.mlp.c_proj.weight": (hidden, half)}
        shapes |= {f"{h}.mlp.w1.weight": (half, hidden), f"{h}.mlp.w2.weight": (half, hidden)}
    shapes["lm_head.weight"] = (vocabulary, hidden)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(shape, generator=generator) + ("ln_" in name) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(QWEN | config))
    return {name: tensor.double() for name, tensor in weights.items()}


def write_written(folder: Path, family: str) -> Weights:
    """Write the model of a family of `WRITTEN` and return its weights."""
    if family == "qwen":
        return write_qwen(folder)
    link(family, folder)
    return {name: tensor.double() for name, tensor in load_file(GOLDENS / family / "model.safetensors").items()}


WRITTEN: dict[str, Callable[[Weights, list[int], Tensor], Tensor]] = {
    "bloom": bloom,
    "baichuan-13b": baichuan_13b,
    "chatglm": chatglm,
    "qwen": qwen,
}
