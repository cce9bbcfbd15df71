"""Small embedding models and rerankers in published form: weights, a tokenizer, and sentence-transformers' files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from transformers import LlamaForSequenceClassification, MistralModel, Qwen3ForCausalLM, Qwen3Model

from tests.helpers.oracle import write_model
from tests.helpers.small_tokenizers import byte_level, save

QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
END = ("</s>", 1)
POOLING = {"mean": "mean_tokens", "last": "lasttoken", "cls": "cls_token"}


def write_modules(folder: Path, pooling: str, *modules: str, **settings: Any) -> None:
    """Write modules.json and the pooling config. `modules` come after Transformer and Pooling."""
    names = ("Transformer", "Pooling", *modules)
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], 1))]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    modes = {f"pooling_mode_{theirs}": ours == pooling for ours, theirs in POOLING.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 64, "pooling_mode_max_tokens": False, **modes, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config | settings))


def write_qwen3_embedding(folder: Path) -> Any:
    """Write Qwen3-Embedding: no head, names without their first part, an eos after each text, pooling of the last
    token, normalised."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[END])
    size = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    reference = write_model(folder, Qwen3Model, **size, head_dim=16)
    save(tokenizer, folder)
    write_modules(folder, "last", "Normalize")
    prompts = {"query": QUERY, "document": ""}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": None})
    )
    return reference


def write_e5_mistral(folder: Path, *, eos_in_tokenizer_json: bool) -> Any:
    """Write e5-mistral: a BOS, and an eos that tokenizer.json or the settings add."""
    tokenizer = byte_level()
    single = "<s> $A </s>" if eos_in_tokenizer_json else "<s> $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), END])
    reference = write_model(folder, MistralModel, vocab_size=tokenizer.get_vocab_size(), sliding_window=9)
    save(tokenizer, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_eos_token": True}))
    write_modules(folder, "last", "Normalize")
    return reference


def write_qwen3_reranker(folder: Path) -> Any:
    """Write Qwen3-Reranker: a causal model whose tokens yes and no are the answer."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("yes", normalized=False), AddedToken("no", normalized=False)])
    size = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    reference = write_model(folder, Qwen3ForCausalLM, **size, head_dim=16)
    save(tokenizer, folder)
    return reference


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}{% elif m.role == 'document' %}"
    " D: {{ m.content }}{% else %}[{{ m.role }}] {{ m.content }}{% endif %}</s>{% endfor %}"
)
"""A template of sentence-transformers' cross-encoders."""


def write_reward_model(folder: Path, template: str = TEMPLATE, **config: Any) -> Any:
    """Write a reward model whose pad token is the eos, with which conversations end."""
    tokenizer = byte_level()
    size = {"vocab_size": tokenizer.get_vocab_size(), "pad_token_id": 1}
    reference = write_model(folder, LlamaForSequenceClassification, **{**size, "num_labels": 1, **config})
    save(tokenizer, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return reference
