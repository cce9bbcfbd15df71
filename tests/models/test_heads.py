"""Heads other than the vocabulary: labels as in transformers' classifiers, no head, and refused heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomForSequenceClassification,
    Gemma2ForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralForSequenceClassification,
    MixtralForSequenceClassification,
    OPTForSequenceClassification,
    Phi3ForSequenceClassification,
    Qwen2ForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import ModelConfig
from models.heads import HeadKind
from pipelines.engine.request import Pooling
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from tests.helpers.builders import run_config
from tests.helpers.cases import each
from tests.helpers.oracle import random_prompts, write_model

CLASSIFIERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForSequenceClassification, {"num_labels": 1, "pad_token_id": 0}),
    "qwen2": (Qwen2ForSequenceClassification, {"num_labels": 3}),
    "qwen3": (Qwen3ForSequenceClassification, {"head_dim": 16}),
    "mistral": (MistralForSequenceClassification, {"num_labels": 5, "sliding_window": 7}),
    "mixtral": (MixtralForSequenceClassification, {"num_local_experts": 4}),
    "gemma2": (Gemma2ForSequenceClassification, {"head_dim": 16, "num_labels": 1, "final_logit_softcapping": 0.5}),
    "phi3": (Phi3ForSequenceClassification, {"pad_token_id": 0, "num_labels": 17}),
    "gpt2": (GPT2ForSequenceClassification, {"n_embd": 64, "n_head": 4, "n_layer": 2, "num_labels": 1}),
    "opt": (OPTForSequenceClassification, {"word_embed_proj_dim": 32, "ffn_dim": 64, "num_labels": 4}),
    "bloom": (BloomForSequenceClassification, {"n_head": 4, "n_layer": 2, "num_labels": 1}),
}


def outputs(folder: Path, head: HeadKind | None, prompts: list[list[int]], pooling: Pooling) -> list[torch.Tensor]:
    engine = load_engine(run_config(folder), 3, head=head)
    requests = [engine.pooled_request(i, prompt, pooling, DecodeConfig()) for i, prompt in enumerate(prompts)]
    return [output.pooled for output in sorted(engine.generate(requests), key=lambda output: output.request_id)]


@each("family", CLASSIFIERS)
def test_labels_match_transformers(tmp_path: Path, family: str) -> None:
    model_class, config = CLASSIFIERS[family]
    reference, prompts = write_model(tmp_path, model_class, **config), random_prompts(96)
    for prompt, scores in zip(prompts, outputs(tmp_path, None, prompts, Pooling.last), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)  # float32 sums in another order


@each("family", ["gemma2", "gpt2", "opt"])
def test_without_a_head_outputs_are_hidden_states(tmp_path: Path, family: str) -> None:
    model_class, config = CLASSIFIERS[family]
    reference, prompts = write_model(tmp_path, model_class, **config), random_prompts(96)
    for prompt, vector in zip(prompts, outputs(tmp_path, HeadKind.none, prompts, Pooling.last), strict=True):
        with torch.inference_mode():
            expected = reference.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)


def test_a_classifier_is_refused_where_tokens_are_wanted(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForSequenceClassification, num_labels=1)
    message = "is a LlamaForSequenceClassification, which scores a text and predicts no token: give task=score$"
    with pytest.raises(UserError, match=message):
        resolve_model(ModelConfig(path=str(tmp_path)))


def test_labels_that_are_not_the_file_s_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForSequenceClassification, num_labels=3)
    change(tmp_path, id2label={"0": "good", "1": "bad"})
    with pytest.raises(UserError, match=r"wrong shape: score.weight \[3, 64\], expected \[2, 64\]"):
        load_engine(run_config(tmp_path), 1, head=None)


def test_a_missing_head_is_missed_by_those_who_need_it(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaForCausalLM.config_class(hidden_size=64, vocab_size=96, num_hidden_layers=1))
    model.model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="missing: lm_head.weight"):
        load_engine(run_config(tmp_path), 1)
    load_engine(run_config(tmp_path), 1, head=HeadKind.none)


@each(
    "config, message",
    [
        ({"is_causal": False}, "is_causal=false is bidirectional attention, which is not supported: give a model with"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true is bidirectional attention"),
        ({"model_type": "bert"}, "model_type='bert' is a bidirectional encoder, which is not supported: give a model with"),
        ({"model_type": "xlm-roberta"}, "model_type='xlm-roberta' is a bidirectional encoder"),
        ({"model_type": "gpt_x"}, "model_type='gpt_x' is not supported: only afmoe, apertus"),
    ],
)  # fmt: skip
def test_bidirectional_models_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_model(tmp_path, LlamaForSequenceClassification)
    change(tmp_path, **config)
    with pytest.raises(UserError, match=message):
        resolve_model(ModelConfig(path=str(tmp_path)), HeadKind.none)


@each("kind", ["ForRewardModel", "ForProcessRewardModel", "ForTokenClassification"])
def test_other_heads_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Qwen2ForRewardModel has two layers with a ReLU between them; process rewards have one output per token."""
    write_model(tmp_path, LlamaForSequenceClassification)
    change(tmp_path, architectures=[f"Qwen2{kind}"])
    message = f"architectures='Qwen2{kind}' has a head that is not supported: give a reward model that is a ...ForSeq"
    with pytest.raises(UserError, match=message):
        resolve_model(ModelConfig(path=str(tmp_path)), None)


def change(folder: Path, **config: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
