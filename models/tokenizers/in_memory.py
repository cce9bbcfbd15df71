"""Load a transformers tokenizer from memory, through the files that it saves."""

import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.tokenizers import Tokenizer, load_tokenizer


def tokenizer_in_memory(tokenizer: Any, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `load_tokenizer` reads from a PreTrainedTokenizerBase's files.

    `config`: config of its model, which may select the family. The files are in a temporary folder until the tokenizer
    is freed. Raises UserError if they cannot be written or read.
    """
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    try:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # the class can be user code
            raise UserError(
                f"the {type(tokenizer).__name__} cannot be saved ({error}): give the folder of its files"
            ) from error
        if config:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        loaded = load_tokenizer(folder)
        if loaded is None:
            raise UserError(
                f"the {type(tokenizer).__name__} writes no tokenizer file that can be read: give a tokenizer's folder"
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(loaded, shutil.rmtree, folder, ignore_errors=True)
    return loaded
