"""DeepSeek-V2 and -V3 compared with transformers, which computes keys and values of every head; absorbed attention must
equal it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import DType
from models.config import ConfigReader
from models.registry import find_architecture
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, complete, engine_of, generate, run_config, weights_of
from tests.helpers.cases import each
from tests.helpers.deepseek import CASES, SMALL, V2_GROUPS, V3_GROUPS, YARN, build, change_config
from tests.helpers.oracle import assert_equals_transformers, random_prompts


@each("name", CASES, quick=("v2_groups", "v3"))
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    version, config = CASES[name]
    reference = build(version, **config)
    reference.save_pretrained(tmp_path)
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def test_prompts_that_the_cache_knows(tmp_path: Path) -> None:
    build(3, **V3_GROUPS).save_pretrained(tmp_path)
    engine, decode = engine_of(tmp_path, max_batched_tokens=5, block_size=4), DecodeConfig(max_new_tokens=12)
    first, second = (generate(engine, random_prompts(96), decode) for _ in range(2))
    assert [output.completions for output in second] == [output.completions for output in first]
    assert [output.num_cached_tokens for output in second] == [4, 0, 36, 16]


@pytest.mark.long
def test_experts_in_every_second_layer(tmp_path: Path) -> None:
    """moe_layer_freq follows the model's own code; transformers ignores it."""
    reference = build(2, first_k_dense_replace=0)
    dense = DeepseekV2MLP(reference.config)
    reference.model.layers[1].mlp = dense
    reference.save_pretrained(tmp_path)
    change_config(tmp_path, moe_layer_freq=2)
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def add_layer(folder: Path, layer: int) -> None:
    """Add a layer like the last one, with the additional tensors of V3's multi-token prediction."""
    tensors = load_file(folder / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    added = {name.replace("layers.2.", f"layers.{layer}."): tensor.clone() for name, tensor in last.items()}
    added[f"model.layers.{layer}.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors | added, folder / "model.safetensors")


def test_layers_for_more_tokens_are_left_out(tmp_path: Path) -> None:
    reference = build(3, **V3_GROUPS)
    reference.save_pretrained(tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=1)
    before = all_logits(engine_of(tmp_path), [5, 6, 7])
    add_layer(tmp_path, 3)
    assert torch.equal(all_logits(engine_of(tmp_path), [5, 6, 7]), before)
    add_layer(tmp_path, 4)
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.4\."):
        engine_of(tmp_path)


def test_cache_holds_latents_only(tmp_path: Path) -> None:
    build(2).save_pretrained(tmp_path)
    cache = engine_of(tmp_path).executor.cache
    assert {tensor.shape[2:] for tensor in cache.tensors} == {(1, 24 + 8), (1, 0)}


def test_the_router_stays_float32(tmp_path: Path) -> None:
    reference = build(3, **V3_GROUPS)
    reference.save_pretrained(tmp_path)
    run = run_config(tmp_path)
    run.model.dtype = DType.bfloat16
    model = load_engine(run, 1).executor.model
    dtypes = {name: parameter.dtype for name, parameter in weights_of(model).items()}
    kept = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert kept == {
        f"model.layers.{i}.mlp.gate.{tensor}" for i in (1, 2) for tensor in ("e_score_correction_bias", "weight")
    }
    gates = (model.get_submodule("model.layers.1.mlp.gate"), reference.model.layers[1].mlp.gate)
    assert torch.equal(*(gate.e_score_correction_bias.data for gate in gates))


@each("dtype", [DType.float32, DType.bfloat16], quick=[DType.float32])
def test_log_probabilities_are_the_same_to_the_bit_in_any_company(dtype: DType, tmp_path: Path) -> None:
    # Whole vectors of 64: torch's loop over elements uses other arithmetic for a remainder.
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 64}
    build(3, **V3_GROUPS, **sizes).save_pretrained(tmp_path)
    run = run_config(tmp_path)
    run.model.dtype = dtype
    engine = load_engine(run, 7)
    decode = DecodeConfig(max_new_tokens=12, logprobs=20, prefix_cache=False)
    rows = [*random_prompts(96), [8], [5, 6, 7], [1]]
    alone = [complete(engine, [row], decode)[0] for row in rows]
    assert complete(engine, rows, decode) == alone


def read(version: int, **changes: Any) -> ConfigReader:
    groups = V2_GROUPS if version == 2 else V3_GROUPS
    reader = ConfigReader({"model_type": f"deepseek_v{version}", **SMALL, **groups, **changes}, "config.json")
    find_architecture(reader).read_config(reader)
    return reader


HUB = {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1}


@each(
    "version, keys",
    [
        (2, {"scoring_func": "softmax", "norm_topk_prob": False}),
        (2, {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
        (3, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}),
    ],
)
def test_keys_of_hub_configs_are_known(version: int, keys: dict[str, Any]) -> None:
    assert read(version, **HUB | keys).unread() == []


@each(
    "version, changes, message",
    [
        (2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported: only 'softmax'"),
        (2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported: only 'greedy', 'group_limited"),
        (2, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported: only False"),
        (2, {"n_group": None}, "n_group is missing"),
        (2, {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: only 'sigmoid'"),
        (3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported: only 'noaux_tc'"),
        (
            3,
            {"num_nextn_predict_layers": 2**31},
            "num_nextn_predict_layers=2147483648 is not between 0 and num_hidden_layers=3",
        ),
        (3, {"n_group": 3}, "n_routed_experts=8 is not a multiple of n_group=3"),
        (3, {"topk_group": 5}, "topk_group=5 is more than n_group=4"),
        (3, {"n_group": 8}, "n_group=8 leaves 1 expert to a group, which needs 2"),
        (3, {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts of topk_group=2 groups"),
        (3, {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported: only 4, None"),
        (3, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
        (3, {"q_lora_rank": 0}, "q_lora_rank=0 is not a number above 0"),
        (3, {"n_shared_experts": None}, "n_shared_experts is missing"),
    ],
)
def test_refuses(version: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(version, **changes)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its own code is V3's with another name, one group of experts and other sizes."""
    reference = build(3, n_group=1, topk_group=1, routed_scaling_factor=2.827, rope_parameters=YARN)
    reference.save_pretrained(tmp_path)
    change_config(tmp_path, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    assert_equals_transformers(tmp_path, reference, random_prompts(96))
