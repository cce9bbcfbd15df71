"""Open checkpoints of every supported layout. The content of a path decides the layout, never its name alone.

The functions import torch only when they open a checkpoint, because the HTTP server process opens only tokenizers.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import UserError
from models.formats.gguf.magic import is_gguf_layout
from models.formats.other_folders import refuse_other_folders
from models.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from models.formats.base import Checkpoint

__all__ = ["open_checkpoint", "open_tokenizer"]


def open_checkpoint(path: Path, allow_pickle: bool) -> "Checkpoint":
    """Return the checkpoint in a folder or a GGUF file, of any layout.

    Raises UserError if the configuration cannot be read. Weights and tokenizer raise their errors when they are opened.
    """
    if is_gguf_layout(path):
        from models.formats.gguf.reader import open_gguf

        return open_gguf(path)
    if not path.is_dir():
        raise UserError(f"{path} is a file: model.path must be a folder that holds a model, a GGUF file, or a hub id")
    refuse_other_folders(path)
    from models.formats.huggingface import open_huggingface
    from models.formats.meta import is_meta_layout, open_meta
    from models.formats.mindspore.checkpoint import is_mindspore_layout, open_mindspore
    from models.formats.paddle.checkpoint import is_paddle_layout, open_paddle
    from models.formats.sharded import is_sharded_layout, open_sharded
    from models.formats.tensor_parallel import is_tensor_parallel, open_tensor_parallel

    if is_sharded_layout(path):
        return open_sharded(path)
    if is_meta_layout(path):
        return open_meta(path, allow_pickle)
    if is_mindspore_layout(path):
        return open_mindspore(path)
    if is_paddle_layout(path):
        return open_paddle(path, allow_pickle)
    if is_tensor_parallel(path):
        return open_tensor_parallel(path, allow_pickle)
    return open_huggingface(path, allow_pickle)


def open_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder or a GGUF file, or None if there is none. The path need not hold a model.

    Raises UserError if the tokenizer cannot be read.
    """
    if is_gguf_layout(path):
        from models.formats.gguf.header import read_gguf_headers
        from models.formats.gguf.tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(read_gguf_headers(path)[0])
    return load_tokenizer(path) if path.is_dir() else None
