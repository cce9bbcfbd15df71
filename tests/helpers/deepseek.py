"""DeepSeek-V2 and -V3 in small sizes, in all variants, by transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.6}
V3_GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "v2": (2, {}),
    "v2_no_q_lora": (2, {"q_lora_rank": None}),
    "v2_groups": (2, V2_GROUPS),
    "v2_two_groups": (2, V2_GROUPS | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}),
    "v2_all_experts": (2, {"first_k_dense_replace": 0, "num_experts_per_tok": 8, "n_shared_experts": 1}),
    "v2_biases_tied": (2, {"attention_bias": True, "tie_word_embeddings": True}),
    "v2_yarn": (2, {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "v2_yarn_mscale": (2, {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0}}),
    "v2_yarn_plain": (2, {"rope_parameters": YARN}),
    "v2_linear": (2, {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}}),
    "v3": (3, V3_GROUPS),
    "v3_no_q_lora": (3, V3_GROUPS | {"q_lora_rank": None}),
    "v3_one_group": (3, {"n_group": 1, "topk_group": 1}),
    "v3_two_groups": (3, {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}),
    "v3_not_normed": (3, V3_GROUPS | {"norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    "v3_half_split": (3, V3_GROUPS | {"rope_interleave": False}),
    "v3_biases_tied": (3, V3_GROUPS | {"attention_bias": True, "tie_word_embeddings": True}),
    "v3_dense": (3, V3_GROUPS | {"first_k_dense_replace": 3}),
    "v3_yarn": (3, V3_GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
}


def build(version: int, **config: Any) -> PreTrainedModel:
    """Return transformers' model. Every parameter is random, including biases and the routers' corrections."""
    torch.manual_seed(0)
    if version == 2:
        model: PreTrainedModel = DeepseekV2ForCausalLM(DeepseekV2Config(**{**SMALL, **config}))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**SMALL, **config}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model.eval()


def change_config(folder: Path, **changes: Any) -> None:
    """Change values in the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class NextTokenReference:
    """V3's model and its first multi-token prediction module in float64. The module's block is transformers' decoder
    layer."""

    def __init__(self, folder: Path, **config: Any) -> None:
        """Write a checkpoint of `num_hidden_layers` layers and the module into the folder. Every parameter is
        random."""
        num_layers = {**SMALL, **config}["num_hidden_layers"]
        model = build(3, **{**V3_GROUPS, **config, "num_hidden_layers": num_layers + 1})
        hidden_size = model.config.hidden_size
        self._own = {
            name: torch.randn(shape) * 0.15 + ("norm" in name)
            for name, shape in {
                "enorm.weight": (hidden_size,),
                "hnorm.weight": (hidden_size,),
                "shared_head.norm.weight": (hidden_size,),
                "eh_proj.weight": (hidden_size, 2 * hidden_size),
            }.items()
        }
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        for name, tensor in [
            *self._own.items(),
            *((name_in_file, tensors[shared].clone()) for name_in_file, shared in copies.items()),
        ]:
            tensors[f"model.layers.{num_layers}.{name}"] = tensor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        file = folder / "config.json"
        changes = {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        model.config._experts_implementation = "eager"  # the other implementations do not multiply float64
        self._model = model.double()
        self._block = model.model.layers[-1]
        model.model.layers = model.model.layers[:-1]
        self._own = {name: tensor.double() for name, tensor in self._own.items()}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self._own[f"{name}.weight"]

    @torch.no_grad()
    def hidden(self, token_ids: list[int]) -> Tensor:
        """Return the model's hidden states [T, E] after its final norm."""
        return self._model.model(torch.tensor([token_ids])).last_hidden_state[0]

    @torch.no_grad()
    def ahead(self, hidden: Tensor, token_ids: list[int]) -> Tensor:
        """Return the module's hidden states [T, E] after its norm, from hidden states [T, E] and the following tokens,
        starting at position 0."""
        embedded = self._model.model.embed_tokens(torch.tensor(token_ids))
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), dim=-1)
        x = (both @ self._own["eh_proj.weight"].T)[None]
        positions = torch.arange(len(token_ids))[None]
        mask = torch.full((len(token_ids), len(token_ids)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        angles = self._model.model.rotary_emb(x, positions)
        x = self._block(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return self._norm(x[0], "shared_head.norm")

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return the most likely tokens after a sequence. Each is computed from the module's previous hidden state and
        the previous token."""
        hidden, behind = self.hidden(token_ids)[:-1], token_ids[1:]
        drafts: list[int] = []
        for _ in range(count):
            last = self.ahead(hidden, behind)[-1:]
            drafts.append(int(self._model.lm_head(last).argmax()))
            hidden, behind = torch.cat((hidden, last)), [*behind, drafts[-1]]
        return drafts
