"""The layouts that checkpoints come in, told apart by what is in them and never by a name alone."""

from pathlib import Path

from conf.errors import UserError
from models.formats.base import Checkpoint, WeightFile
from models.formats.huggingface import open_huggingface
from models.formats.meta import is_meta_layout, open_meta
from models.formats.mindspore import is_mindspore_layout, open_mindspore
from models.formats.sharded import is_sharded_layout, open_sharded
from models.formats.tensor_parallel import is_tensor_parallel, open_tensor_parallel

__all__ = ["Checkpoint", "WeightFile", "open_checkpoint"]


def open_checkpoint(path: Path, allow_pickle: bool) -> Checkpoint:
    """Raises UserError where the configuration cannot be read; what is wrong with weights or tokenizer is said when they are opened."""
    if not path.is_dir():
        raise UserError(f"{path} is a file: model.path must be a folder that holds a model, or a hub id")
    if is_sharded_layout(path):
        return open_sharded(path)
    if is_meta_layout(path):
        return open_meta(path, allow_pickle)
    if is_mindspore_layout(path):
        return open_mindspore(path)
    if is_tensor_parallel(path):
        return open_tensor_parallel(path, allow_pickle)
    return open_huggingface(path, allow_pickle)
