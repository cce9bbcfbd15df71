"""Read MindSpore checkpoints of Llama, Qwen 2 and Mistral with MindFormers' names.

The weights are `.ckpt` files, or one folder rank_N for each rank with its slice. The config is config.json or
MindFormers' YAML.

Query and key rows are in Hugging Face's order: MindFormers renames Hugging Face's tensors and reorders Meta's
(mindformers/models/llama/convert_weight.py: `convert_pt_to_ms`, and `permute` in `convert_meta_torch_ckpt`).
"""

import re
from functools import partial
from pathlib import Path

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.base import Checkpoint, ExpectedTensors, WeightFile
from models.formats.huggingface import GENERATION_CONFIG
from models.formats.meta import MODULES
from models.formats.mindspore.ckpt import VALUE, CkptFile
from models.formats.mindspore.config import read_mindformers_config
from models.formats.ranks import JoinedRanks, rank_folders
from models.tokenizers import load_tokenizer

CKPT = "*.ckpt"
OUTSIDE_LAYERS = {
    "model.tok_embeddings.embedding_weight": "model.embed_tokens.weight",
    "model.norm_out.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
IN_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")  # with Meta's module names
# Stored tensors that are not weights: optimizer states, counters, loss scales, caches.
STATE = re.compile(
    r"(adam_[mv]|moments?[12]?|accu_grads|learning_rate|beta[12]_power)\b.*|.*\b(key|value)_cache|random_op|network_name|"
    r"(global|current_iterator|last_overflow_iterator)_step|(epoch|step)_num|(loss_scale|scale_sense).*"
)
FUSED = re.compile(r".*\.(w_qkv|w_gate_hidden)\..*")
EXPERTS = re.compile(r".*\.feed_forward\.(ffn|router|routed_experts|shared_experts)\..*")


def is_mindspore_layout(folder: Path) -> bool:
    """Return whether a folder has no safetensors, and `.ckpt` files that begin as protobuf does.

    The `.ckpt` files of other programs are archives.
    """
    if any(folder.glob("*.safetensors")):
        return False
    folders = [folder, *rank_folders(folder, CKPT)]
    return any(_begins_as_protobuf(file) for where in folders for file in where.glob(CKPT))


def _begins_as_protobuf(file: Path) -> bool:
    try:
        with open(file, "rb") as stream:
            return stream.read(1) == VALUE
    except OSError:
        return False


def open_mindspore(folder: Path) -> Checkpoint:
    has_json = (folder / "config.json").is_file()
    return Checkpoint(
        folder,
        ConfigReader.from_folder(folder) if has_json else read_mindformers_config(folder),
        read_json(folder / GENERATION_CONFIG),
        partial(open_ckpt_files, folder),
        partial(load_tokenizer, folder),
    )


def open_ckpt_files(folder: Path, expected: ExpectedTensors) -> list[WeightFile]:
    """Open the folder's files, or all ranks as one file.

    Raises UserError if a file is missing or damaged, or if slices do not fit.
    """
    files, ranks = sorted(folder.glob(CKPT)), rank_folders(folder, CKPT)
    if files and ranks:
        raise UserError(
            f"{folder} has both {files[0].name} and {ranks[0].name}/{CKPT}: remove the files that are not to be read"
        )
    if not ranks:
        return [CkptFile(file, our_name) for file in files]
    return [JoinedRanks(ranks[0], [[CkptFile(_only_file(rank), our_name)] for rank in ranks], expected)]


def _only_file(rank: Path) -> Path:
    files = sorted(rank.glob(CKPT))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise UserError(f"{rank} has {len(files)} checkpoints ({names}): remove the files that are not to be read")
    return files[0]


def our_name(tag: str) -> str | None:
    """Return the tensor's name in Hugging Face's layout; None if it is not a weight.

    Keeps an unknown name, which is rejected later. Raises ValueError for matrices whose order the file does not show.
    """
    if STATE.fullmatch(tag):
        return None
    if FUSED.fullmatch(tag):
        # llama/convert_weight.py stacks them. utils/convert_utils.py (qkv_concat_hf2mg) interleaves them by head, with
        # the same name and shape.
        raise ValueError(
            f"{tag} is fused in one of two orders, which the file does not show: convert it to qkv_concat=False"
        )
    if EXPERTS.fullmatch(tag):
        # research/mixtral/convert_weight.py stacks experts as [N, F, E]; for grouped matrix products they are
        # transposed.
        raise ValueError(
            f"{tag} belongs to a mixture of experts, whose order the file does not show: use Hugging Face's layout"
        )
    match = IN_LAYER.fullmatch(tag)
    if match is None or match[2] not in MODULES:
        return OUTSIDE_LAYERS.get(tag, tag)
    return f"model.layers.{match[1]}.{MODULES[match[2]][0]}.{match[3]}"
