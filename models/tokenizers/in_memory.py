"""A tokenizer of transformers that a script holds: read back from the files that it writes of itself."""

import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.tokenizers import Tokenizer, load_tokenizer


def tokenizer_in_memory(tokenizer: Any, config: dict[str, Any]) -> Tokenizer:
    """Return what `load_tokenizer` reads of the files of a PreTrainedTokenizerBase. config: that of its model, which may choose the rules.

    The files are in a temporary folder for as long as the tokenizer lives. Raises UserError where they cannot be written or read.
    """
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    try:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # of a class that is anybody's
            raise UserError(
                f"the {type(tokenizer).__name__} cannot be saved ({error}): give the folder of its files"
            ) from error
        if config:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        found = load_tokenizer(folder)
        if found is None:
            raise UserError(
                f"the {type(tokenizer).__name__} writes no files that are read: give a folder of a tokenizer"
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
    return found
