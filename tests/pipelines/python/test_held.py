"""Models and tokenizers held by a script: the same results as from the folder that save_pretrained writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from conf.errors import UserError
from models.tokenizers.in_memory import tokenizer_in_memory
from pipelines import LLM, TextGenerationPipeline, pipeline
from tests.helpers.cases import each

SIZES = {
    "vocab_size": 336,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [300]}]


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=336, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    elif name == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4))
    elif name == "qwen3_moe":
        moe_sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **moe_sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**EXPERTS, tie_word_embeddings=name == "tied"))
    model.generation_config = GenerationConfig(repetition_penalty=1.5, eos_token_id=17)
    return model.to(torch.bfloat16 if name == "bfloat16" else torch.float32)


def said(pipe: TextGenerationPipeline) -> list[dict[str, Any]]:
    return pipe(PROMPTS, max_new_tokens=6, logprobs=5, prompt_logprobs=5)


@each("name", ["gpt2", "mixtral", "qwen3_moe", "tied", "bfloat16"], quick=["mixtral"])
def test_a_model_in_memory_is_its_folder(name: str, chatty: Path, tmp_path: Path) -> None:
    """Experts are fused in memory but not in files; a tied head is stored once in a file, and twice in memory."""
    model, options = made(name), {"device": "cpu", "tokenizer": chatty}
    model.save_pretrained(tmp_path / "saved")
    expected = pipeline("text_generation", model=tmp_path / "saved", **options)
    held = pipeline("text_generation", model=model, **options)
    assert held.engine.dtype == expected.engine.dtype == (torch.bfloat16 if name == "bfloat16" else torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the pipeline has a copy
    assert said(held) == said(expected)
    if name == "tied":
        int8 = [
            pipeline("text_generation", model=source, quant="int8", **options)
            for source in (made(name), tmp_path / "saved")
        ]
        assert said(int8[0]) == said(int8[1])


def test_a_tokenizer_in_memory_is_its_folder(chatty: Path, tmp_path: Path) -> None:
    model, tokenizer = made("llama"), AutoTokenizer.from_pretrained(chatty)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|own|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    expected = pipeline("text_generation", model=model, tokenizer=tmp_path / "tokenizer", device="cpu")
    assert expected.tokenizer is not None
    for held_tokenizer in (tokenizer, expected.tokenizer):
        pipe = pipeline("text_generation", model=model, tokenizer=held_tokenizer, device="cpu")
        for text in ("Once upon <|own|> a time", [{"role": "user", "content": "我 am"}]):
            assert pipe(text, max_new_tokens=4) == expected(text, max_new_tokens=4)
    read = tokenizer_in_memory(tokenizer, {})
    folder = read.source
    assert folder.is_dir()
    del read
    assert not folder.exists()
    model.config.name_or_path = str(chatty)  # as from_pretrained returns it
    assert pipeline("text_generation", model=model, device="cpu").tokenizer is not None


def test_objects_that_cannot_be_used_are_refused_in_one_line(chatty: Path) -> None:
    model = made("llama")
    offloaded = LlamaForCausalLM(model.config).to("meta")
    for options, message in (
        ({"model": 5}, "model is of type int: give a folder, a hub id, an option or a PreTrainedModel of transformers"),
        (
            {"model": model, "tokenizer": torch.nn.Linear(1, 1)},
            "tokenizer is of type Linear, not a path or a tokenizer",
        ),
        (
            {"model": model, "parallel": "tp"},
            "^parallel=tp is of a model's files, and LlamaForCausalLM is in memory: save_",
        ),
        (
            {"model": model, "quant": "a8w8"},
            "^quant=a8w8 calibrates a model from its files: save_pretrained it, and give",
        ),
        ({"model": model, "overrides": ["model.keep_packed=true"]}, "^model.keep_packed=true is of a model's files"),
        ({"model": offloaded}, "is not in memory: load the model without offloading, or give its folder"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            pipeline("text_generation", **{"tokenizer": chatty, "device": "cpu", **options})  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="there is no tokenizer, so no text"):
        pipeline("text_generation", model=model, device="cpu")("Once")
    with pytest.raises(
        UserError, match="^model is of type LlamaForCausalLM, not a path: give a folder, a hub id or an op"
    ):
        LLM(model)  # type: ignore[arg-type]
