"""Qwen of 2023 above its training context, where no golden set goes, against its formulas in float64; and what config.json may not say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families.qwen import read_config
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.cases import each

LAYERS, HIDDEN, HEADS, HEAD_DIM, HALF, VOCAB, SEQ_LENGTH, EPS = 2, 64, 4, 16, 40, 96, 16, 1e-6
CONFIG: dict[str, Any] = {
    "model_type": "qwen",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HALF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "kv_channels": HEAD_DIM,
    "layer_norm_epsilon": EPS,
    "rotary_emb_base": 10000,
    "seq_length": SEQ_LENGTH,
    "max_position_embeddings": 256,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
NEW_TOKENS = 24
LENGTHS = (5, 16, 17, 32, 33, 70)  # below, at and above the training context, twice and four times that


def write_qwen(folder: Path, **config: bool) -> dict[str, Tensor]:
    shapes = {"transformer.wte.weight": (VOCAB, HIDDEN), "transformer.ln_f.weight": (HIDDEN,)}
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        shapes |= {f"{h}.ln_1.weight": (HIDDEN,), f"{h}.ln_2.weight": (HIDDEN,)}
        shapes |= {f"{h}.attn.c_attn.weight": (3 * HIDDEN, HIDDEN), f"{h}.attn.c_attn.bias": (3 * HIDDEN,)}
        shapes |= {f"{h}.attn.c_proj.weight": (HIDDEN, HIDDEN), f"{h}.mlp.c_proj.weight": (HIDDEN, HALF)}
        shapes |= {f"{h}.mlp.w1.weight": (HALF, HIDDEN), f"{h}.mlp.w2.weight": (HALF, HIDDEN)}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(shape, generator=generator) + ("ln_" in name) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return {name: tensor.double() for name, tensor in weights.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def reference_logits(w: dict[str, Tensor], ids: list[int], prompt_length: int, ntk: bool, logn: bool) -> Tensor:
    """The whole sequence without a cache: pairs of channels as complex numbers that turn."""
    alpha = next(2 ** (k + 1) - 1 for k in range(9) if prompt_length <= SEQ_LENGTH * 2**k) if ntk else 1
    base = 10000 * alpha ** (HEAD_DIM / (HEAD_DIM - 2))
    angles = [[p / base ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)] for p in range(len(ids))]
    turns = torch.exp(1j * torch.tensor(angles, dtype=torch.float64))[:, None]
    scale = [math.log(p + 1, SEQ_LENGTH) if logn and p + 1 > SEQ_LENGTH else 1.0 for p in range(len(ids))]

    def turn(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]) * turns
        return torch.cat((pairs.real, pairs.imag), -1)

    x = w["transformer.wte.weight"][ids]
    later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        qkv = norm(x, w[f"{h}.ln_1.weight"]) @ w[f"{h}.attn.c_attn.weight"].T + w[f"{h}.attn.c_attn.bias"]
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in qkv.split(HIDDEN, dim=-1))
        q = turn(q) * torch.tensor(scale, dtype=torch.float64)[:, None, None]
        scores = torch.einsum("qhd,khd->hqk", q, turn(k)) / HEAD_DIM**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        x = x + attended.flatten(1) @ w[f"{h}.attn.c_proj.weight"].T
        y = norm(x, w[f"{h}.ln_2.weight"])
        gate = y @ w[f"{h}.mlp.w2.weight"].T
        y = (y @ w[f"{h}.mlp.w1.weight"].T) * gate / (1 + (-gate).exp())
        x = x + y @ w[f"{h}.mlp.c_proj.weight"].T
    return norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def assert_greedy(w: dict[str, Tensor], prompt: list[int], answer: list[int], ntk: bool, logn: bool) -> None:
    """Each token of the answer is the likeliest one after those before it."""
    logits = reference_logits(w, prompt + answer, len(prompt), ntk, logn)
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == answer


@pytest.mark.long
@each("ntk, logn", [(False, False), (False, True), (True, False), (True, True)], quick=[(True, True)])
def test_equals_the_formulas_in_float64(ntk: bool, logn: bool, tmp_path: Path) -> None:
    weights = write_qwen(tmp_path, use_dynamic_ntk=ntk, use_logn_attn=logn)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    engine = engine_of(tmp_path, block_size=4)
    for prompt in prompts:
        expected = reference_logits(weights, prompt, len(prompt), ntk, logn).float()
        # 1e-4: float32 against float64; the logits are of order 1 to 10
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=1e-4, rtol=0)
    prompts += [prompts[-1][:20], prompts[-1][:40]]  # beginnings of others, which the cache may not give them
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS)
    expected_ids = [complete(engine, [prompt], decode)[0].token_ids for prompt in prompts]
    for prompt, answer in zip(prompts, expected_ids, strict=True):
        assert_greedy(weights, prompt, answer, ntk, logn)
    chunked = engine_of(tmp_path, max_batched_tokens=5, block_size=4)
    for either in (engine, chunked):
        assert [output.token_ids for output in complete(either, prompts, decode)] == expected_ids


def test_prompts_share_their_beginnings_where_no_base_grows() -> None:
    def depends(**changes: Any) -> bool:
        return read_config(ConfigReader(CONFIG | changes, "config.json")).keys_depend_on_length

    assert depends()
    assert not depends(use_dynamic_ntk=False)
    assert not depends(max_position_embeddings=SEQ_LENGTH)  # as on the hub: 8192 and 8192


@each(
    "changes, message",
    [
        ({"no_bias": False}, "no_bias=False is not supported: only True"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported: only True"),
        ({"rotary_pct": 0.5}, "rotary_pct=0.5 is not supported: only 1.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported: only False"),
        ({"use_cache_quantization": True}, "use_cache_quantization=True is not supported: only False"),
        ({"kv_channels": 8}, "kv_channels=8 is not supported: only 16"),
        ({"hidden_size": 60}, "hidden_size=60 is not a multiple of twice num_attention_heads=4"),
        ({"hidden_size": 8}, "hidden_size=8 gives each of 4 heads 2 channels: at least 4 are needed"),
        ({"intermediate_size": 81}, "intermediate_size=81 is odd"),
        ({"seq_length": 1}, "use_logn_attn needs a seq_length above 1"),
        ({"use_dynamic_ntk": None}, "use_dynamic_ntk is missing"),
        ({"use_logn_attn": 1}, "use_logn_attn=1 is not of type bool"),
        ({"rotary_emb_base": 0}, "rotary_emb_base=0.0 is not a number from 1e-30"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))
