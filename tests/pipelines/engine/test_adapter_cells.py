"""Adapters with every scheme and every cache format, and in many families: a row's bits alone and mixed; PEFT's and
merged models' results."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DType
from pipelines.engine import Engine
from tests.helpers.adapters import (
    ALL_LINEAR,
    GREEDY,
    PROMPTS,
    Rows,
    check_as_peft,
    completions,
    load_with,
    outputs,
    peft_model,
    write_adapter,
)
from tests.helpers.builders import run_config, write_llama, write_random
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.conversion import convert
from tests.helpers.deepseek import SMALL as DEEPSEEK
from tests.helpers.hybrid_families import DELTA, KIMI, MAMBA2
from tests.helpers.quantized_models import CACHES, SCHEMES, make, quantize_run, random_rows, write_rows
from tests.helpers.random_adapters import write_random_adapter
from tests.helpers.tiers import in_turn, tiers

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": None}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Callable[[], Any], list[str]]] = {
    "gpt2": (GPT2LMHeadModel, lambda: GPT2Config(**GPT2), ["c_attn", "c_proj", "c_fc"]),
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(**SMALL), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "gemma2": (Gemma2ForCausalLM, lambda: Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16), ALL_LINEAR),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        lambda: Qwen2MoeConfig(**SMALL, **MOE, num_key_value_heads=2),
        ["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        lambda: DeepseekV3Config(**DEEPSEEK, n_group=4, topk_group=2),
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        lambda: Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
        ["in_proj", "out_proj", "q_proj", "w1", "w2"],
    ),
    "kimi_linear": (
        KimiLinearForCausalLM,
        lambda: KimiLinearConfig(**KIMI, layer_types=["linear_attention", "full_attention"] * 2),
        ["q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    ),
    "qwen3_5_text": (
        Qwen3_5ForCausalLM,
        lambda: Qwen3_5TextConfig(**DELTA, layer_types=["linear_attention", "full_attention"] * 2),
        ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj"],
    ),
    "bamba": (
        BambaForCausalLM,
        lambda: BambaConfig(**MAMBA2, attn_layer_indices=[1, 3]),
        ["in_proj", "out_proj", "q_proj", "down_proj"],
    ),
}
QUICK = [name for name in FAMILIES if name not in ("qwen3_5_text", "bamba")]
MIXED: Rows = [
    (PROMPTS[0], "one"),
    (PROMPTS[1], None),
    (PROMPTS[2], "two"),
    (PROMPTS[3], "one"),
]


def write_two(base: Path, folder: Path, kind: type[PreTrainedModel], modules: list[str]) -> dict[str, Path]:
    ranks = {"one": 4, "two": 24}
    return {
        name: write_adapter(folder / name, base, kind, rank, r=rank, lora_alpha=rank, target_modules=modules)
        for name, rank in ranks.items()
    }


def engine_of(base: Path, adapters: dict[str, Path], quant: QuantConfig | None = None, **device: Any) -> Engine:
    run = run_config(base)
    return load_with(replace(run, quant=quant or QuantConfig(), device=replace(run.device, **device)), adapters)


def check_bits(base: Path, adapters: dict[str, Path], quant: QuantConfig | None = None) -> None:
    """Compare rows alone, mixed and in chunks; and rows without an adapter with an engine without adapters."""
    engine = engine_of(base, adapters, quant)
    alone = [outputs(engine, [row])[0].completions for row in MIXED]
    assert completions(outputs(engine, MIXED)) == alone
    assert completions(outputs(engine_of(base, adapters, quant, max_batched_tokens=5, block_size=4), MIXED)) == alone
    assert outputs(engine_of(base, {}, quant), [MIXED[1]])[0].completions == alone[1]
    assert outputs(engine, [(PROMPTS[0], None)])[0].completions != alone[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cells")
    write_llama(folder / "float", intermediate_size=96)
    write_two(folder / "float", folder, LlamaForCausalLM, ALL_LINEAR)
    write_rows(folder / "rows.jsonl", random_rows(20, 16))
    return folder


CHOSEN = in_turn(SCHEMES, CACHES), in_turn(SCHEMES, CACHES, first=3)
CELLS = tiers(product(SCHEMES, CACHES), quick=CHOSEN[0][:6], long=sum(CHOSEN, []))


@pytest.mark.parametrize(("scheme", "kv_cache"), CELLS)
def test_every_scheme_and_cache(scheme: str, kv_cache: str, models: Path, tmp_path: Path) -> None:
    quant, base = replace(SCHEMES[scheme], **CACHES[kv_cache]), models / "float"
    if quant.needs_calibration:
        base = tmp_path / "quantized"
        when_run = QuantConfig() if quant.has_static_kv_cache else QuantConfig(kv_cache=quant.kv_cache)
        made = quant if quant.has_static_kv_cache else replace(quant, kv_cache=KVCacheFormat.none)
        make(quantize_run(models / "float", made, base, models / "rows.jsonl"), tmp_path / "run")
        quant = when_run
    check_bits(base, {name: models / name for name in ("one", "two")}, quant)


@pytest.mark.parametrize("family", tiers(FAMILIES, quick=QUICK, long=FAMILIES))
def test_families_as_peft(family: str, tmp_path: Path) -> None:
    kind, config, modules = FAMILIES[family]
    write_random(tmp_path / "base", kind, config())
    adapters = write_two(tmp_path / "base", tmp_path, kind, modules)
    peft = peft_model(tmp_path / "base", kind, adapters)
    check_as_peft(peft, MIXED, outputs(engine_of(tmp_path / "base", adapters), MIXED))
    check_bits(tmp_path / "base", adapters)


@pytest.mark.long
@pytest.mark.parametrize("family", ["baichuan-7b", "baichuan2-13b", "chatglm2", "qwen"])
def test_families_that_peft_cannot_load(family: str, tmp_path: Path) -> None:
    """Fused matrices: the bits of a row, and the merged model's log probabilities."""
    base = GOLDENS / family
    model = engine_of(base, {}).executor.model
    adapters = {
        name: write_random_adapter(tmp_path / name, model, rank, seed=rank, std=0.15)
        for name, rank in (("one", 4), ("two", 24))
    }
    check_bits(base, adapters)
    check_merged(base, adapters["one"], tmp_path)


@each("dtype", ["bfloat16", "float16"])
def test_bits_in_narrow_floats(dtype: str, models: Path) -> None:
    run = run_config(models / "float")
    run = replace(run, model=replace(run.model, dtype=DType[dtype]))
    engine = load_with(run, {name: models / name for name in ("one", "two")})
    alone = [outputs(engine, [row])[0].completions for row in MIXED]
    assert completions(outputs(engine, MIXED)) == alone


def test_the_merged_twin(models: Path, tmp_path: Path) -> None:
    check_merged(models / "float", models / "one", tmp_path)


def check_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Compare log probabilities within 1e-4 in float32; the products are added in another order."""
    decode, prompt = DecodeConfig(max_new_tokens=1, prompt_logprobs=0), [token % 60 + 3 for token in range(20)]
    ours = outputs(engine_of(base, {"one": adapter}), [(prompt, "one")], decode)[0]
    twin = outputs(engine_of(convert(base, tmp_path / "merged", lora=str(adapter)), {}), [(prompt, None)], decode)[0]
    assert ours.completions[0].token_ids == twin.completions[0].token_ids
    assert len(ours.prompt_logprobs or []) == len(prompt) - 1
    for one, other in zip(ours.prompt_logprobs or [], twin.prompt_logprobs or [], strict=True):
        for token, logprob in one.logprobs.items():
            assert abs(logprob - other.logprobs[token]) < 1e-4


def test_an_adapted_head(models: Path, tmp_path: Path) -> None:
    """PEFT may save copies of the base's head and embedding with it. They are ignored if they equal the base, else
    refused."""
    base = models / "float"
    adapter = write_adapter(tmp_path / "head", base, LlamaForCausalLM, r=4, target_modules=["lm_head", "q_proj"])
    peft = peft_model(base, LlamaForCausalLM, {"head": adapter})
    rows: Rows = [(PROMPTS[0], "head"), (PROMPTS[1], None)]
    file, copy = adapter / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(file)
    bare = {name: tensor for name, tensor in tensors.items() if name != copy}
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    assert copy in tensors
    expected = None
    for saved in (tensors, bare, tensors | {"base_model.model.model.embed_tokens.weight": embedding.double()}):
        save_file(saved, file)
        engine = engine_of(base, {"head": adapter})
        actual = completions(outputs(engine, rows))
        if expected is None:
            check_as_peft(peft, rows, outputs(engine, rows))
            assert actual == [outputs(engine, [row])[0].completions for row in rows]
        assert actual == (expected := expected or actual)
    save_file(tensors | {copy: tensors[copy] + 1}, file)
    with pytest.raises(UserError, match=r"replaces a bias or a saved module \(lm_head\)"):
        engine_of(base, {"head": adapter})


def test_drafts_change_nothing(models: Path) -> None:
    """Rows with adapters get drafts from their own outputs."""
    engine = engine_of(models / "float", {name: models / name for name in ("one", "two")})
    plain = outputs(engine, MIXED, replace(GREEDY, max_new_tokens=20))
    drafted = DecodeConfig.replaced(replace(GREEDY, max_new_tokens=20), {"speculate": "ngram"})
    assert completions(outputs(engine, MIXED, drafted)) == completions(plain)
