"""Vocabularies of published models, which are next to the repository."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import TikTokenConverter

from models.tokenizers import Tokenizer, load_tokenizer
from tests.helpers.builders import REPOSITORY, SHARED

REAL = SHARED / "data" / "tokenizers"
NPM = REPOSITORY / ".venv" / "tokenizers"  # packages that make test-all installs
LLAMA4_TOKENS = "begin_of_text end_of_text fim_prefix fim_middle fim_suffix header_start header_end eom eot"
real = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")
MODEL_TYPES = {"qwen1": "qwen", "chatglm2": "chatglm", "chatglm-6b": "chatglm", "baichuan1": "baichuan"}


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def load_real(name: str, folder: Path) -> Tokenizer:
    """Load the real vocabulary of this name through links in an empty folder, with a config.json if the family needs
    one."""
    for file in (REAL / name).iterdir():
        (folder / file.name).symlink_to(file)
    if name in MODEL_TYPES:
        (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[name]}))
    return load(folder)


def write_llama4(folder: Path) -> None:
    """Write the tokenizer.json of Llama 4 into a folder of the package llama-models, which has Meta's file and pattern."""
    source = folder / "llama_models" / "llama4"
    pattern = re.search(r'O200K_PATTERN = r"""(.*?)"""', (source / "tokenizer.py").read_text())
    assert pattern is not None
    special = [f"<|{name}|>" for name in LLAMA4_TOKENS.split()]
    converter = TikTokenConverter(str(source / "tokenizer.model"), pattern[1], extra_special_tokens=special)
    backend: Backend = converter.converted()
    bos = special[0]
    backend.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
