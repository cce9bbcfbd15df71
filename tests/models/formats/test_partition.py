"""Sharding axes compared with transformers' tensor parallel plans, if it has them, and with Megatron's rule by hand."""

import re

from transformers import AutoConfig

from models.causal_lm import CausalLM
from models.formats.partition import expected_tensors, split_axis
from tests.helpers.builders import SMALL
from tests.helpers.cases import each
from tests.helpers.meta_device import DEEPSEEK, build, golden

PLANS = {"colwise": 0, "rowwise": 1, "colwise_gather_output": 0, "rowwise_split_input": 1, "replicated": None}


@each("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "glm", "glm4"])
def test_axes_match_transformers(model_type: str) -> None:
    sizes = {**SMALL, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(model_type, **sizes)
    model = build(config.to_dict())
    plan = {re.compile(name.replace("*", r"\d+")): PLANS.get(kind) for name, kind in config.base_model_tp_plan.items()}
    axes = {name: split_axis(model, name) for name, parameter in model.named_parameters() if parameter.ndim == 2}
    layers = {name: axis for name, axis in axes.items() if ".layers." in name}
    expected = {
        name: next(axis for pattern, axis in plan.items() if pattern.fullmatch(name[len("model.") : -len(".weight")]))
        for name in layers
    }
    assert layers == expected
    assert len(layers) >= 2 * 4
    assert {name: axis for name, axis in axes.items() if name not in layers}.items() >= {
        ("model.embed_tokens.weight", 0)
    }
    norms = [name for name, parameter in model.named_parameters() if "norm" in name]
    assert {split_axis(model, name) for name in norms} == {None}


# The last parts of a layer's tensor names, by axis; all other tensors are whole.
AXES = {
    "baichuan-7b": ({"W_pack.weight", "gate_proj.weight", "up_proj.weight"}, {"o_proj.weight", "down_proj.weight"}),
    "bloom": (
        {"query_key_value.weight", "query_key_value.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias"},
        {"dense.weight", "dense_4h_to_h.weight"},
    ),
    "chatglm": (
        {"query_key_value.weight", "query_key_value.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias"},
        {"dense.weight", "dense_4h_to_h.weight"},
    ),
    "chatglm2": (
        {"query_key_value.weight", "query_key_value.bias", "dense_h_to_4h.weight"},
        {"dense.weight", "dense_4h_to_h.weight"},
    ),
    # Transposed: c_proj is sharded along its first axis, its inputs, and the biases of the other layers along their
    # only axis.
    "gpt2": ({"c_attn.bias", "c_fc.bias", "c_proj.weight"}, {"c_attn.weight", "c_fc.weight"}),
    "mixtral": (
        {"q_proj.weight", "k_proj.weight", "v_proj.weight", "w1.weight", "w3.weight"},
        {"o_proj.weight", "w2.weight"},
    ),
    "opt": (
        {f"{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj", "fc1") for kind in ("weight", "bias")},
        {"out_proj.weight", "fc2.weight"},
    ),
    "qwen": ({"c_attn.weight", "c_attn.bias", "w1.weight", "w2.weight"}, {"c_proj.weight"}),
    "qwen2_moe": (
        {f"{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")} | {"gate_proj.weight", "up_proj.weight"},
        {"o_proj.weight", "down_proj.weight"},
    ),
}  # fmt: skip


@each("family", AXES)
def test_axes_by_hand(family: str) -> None:
    model = golden(family)
    names_by_axis: dict[int | None, set[str]] = {0: set(), 1: set(), None: set()}
    for name, _ in model.named_parameters():
        if re.search(r"\.\d+\.", name):
            names_by_axis[split_axis(model, name)].add(".".join(name.split(".")[-2:]))
    assert (names_by_axis[0], names_by_axis[1]) == AXES[family]
    assert not names_by_axis[None] & (names_by_axis[0] | names_by_axis[1])


def test_embeddings_and_heads_are_cut_along_the_vocabulary_and_tables_of_positions_are_not() -> None:
    gpt2, baichuan2, opt = golden("gpt2", tie_word_embeddings=False), golden("baichuan2-7b"), golden("opt")
    assert [split_axis(gpt2, name) for name in ("transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight")] == [
        0, None, 0,
    ]  # fmt: skip
    assert split_axis(baichuan2, "lm_head.weight") == 0  # its rows are normalised
    assert split_axis(opt, "model.decoder.embed_positions.weight") is None


def cuts_of(model: CausalLM, layer: str) -> dict[str, tuple[int, ...]]:
    """Return the axes of the tensors outside the layers and of one layer, by the last parts of their names."""
    outside = {name: tensor for name, tensor in expected_tensors(model).items() if not re.search(r"\.\d+\.", name)}
    inside = {name: tensor for name, tensor in expected_tensors(model).items() if layer in name}
    return {".".join(name.split(".")[-2:]): tensor.shard_axes for name, tensor in (outside | inside).items()}


def test_slices_that_ranks_may_hold() -> None:
    """Embeddings along either axis. For fused tensors the slicing is unknown."""
    rows, columns, replicated = (0,), (1,), ()
    llama = build({**SMALL, "model_type": "llama", "rms_norm_eps": 1e-5, "attention_bias": True})
    assert cuts_of(llama, "layers.1.") == {
        "embed_tokens.weight": (0, 1), "norm.weight": replicated, "lm_head.weight": rows,
        "input_layernorm.weight": replicated, "post_attention_layernorm.weight": replicated,
        **{f"{name}_proj.{kind}": rows for name in "qkv" for kind in ("weight", "bias")},
        "o_proj.weight": columns, "o_proj.bias": replicated,
        "gate_proj.weight": rows, "up_proj.weight": rows, "down_proj.weight": columns,
    }  # fmt: skip
    gpt2 = cuts_of(golden("gpt2"), "h.1.")
    assert [gpt2[f"{name}.weight"] for name in ("wpe", "c_attn", "c_fc", "c_proj")] == [
        replicated,
        replicated,
        columns,
        rows,
    ]
    assert gpt2["c_attn.bias"] == replicated
    mixtral = cuts_of(golden("mixtral"), "layers.1.")
    assert [mixtral[f"{name}.weight"] for name in ("gate", "w1", "w2", "w3")] == [replicated, rows, columns, rows]
    assert {tensor.shape for tensor in expected_tensors(llama).values()} == {
        tuple(parameter.shape) for parameter in llama.parameters()
    }


def test_latents_and_routers_are_whole() -> None:
    model = build(DEEPSEEK)
    replicated = {name.split(".", 3)[-1] for name, _ in model.named_parameters() if split_axis(model, name) is None}
    assert {"self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.weight"} <= replicated
    cut = {name.split(".", 3)[-1]: split_axis(model, name) for name, _ in model.named_parameters()}
    assert (cut["self_attn.q_b_proj.weight"], cut["self_attn.kv_b_proj.weight"], cut["self_attn.o_proj.weight"]) == (
        0,
        0,
        1,
    )
    assert cut["mlp.experts.3.down_proj.weight"] == cut["mlp.shared_experts.down_proj.weight"] == 1
