"""DeepSeek's kv_b_proj as two tensors, as in GGUF files since April 2025: one for keys, one for values.

H heads, L latent channels; per head N channels of a key without position, and D channels of a value.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.gguf.header import TensorInfo
from models.formats.gguf.names import DEEPSEEK
from models.formats.gguf.tensors import STORED, read_tensor

TO_KEY = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")


@dataclass(frozen=True)
class Halves:
    names: tuple[str, str]
    """llama.cpp's names of the two tensors."""
    to_key: TensorInfo
    """[H, L, N]."""
    to_value: TensorInfo
    """[H, D, L]."""

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Return the shape of kv_b_proj, [H * (N + D), L]."""
        heads, rank, key_size = self.to_key.shape
        return heads * (key_size + self.to_value.shape[1]), rank

    @property
    def dtype(self) -> torch.dtype:
        kinds = {STORED.get(half.type, torch.float32) for half in (self.to_key, self.to_value)}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def read(self) -> Tensor:
        """Read kv_b_proj [H * (N + D), L]. In each head, the rows for keys come before the rows for values."""
        to_key, to_value = read_tensor(self.to_key).to(self.dtype), read_tensor(self.to_value).to(self.dtype)
        joined: Tensor = torch.cat((to_key.transpose(1, 2), to_value), dim=1).flatten(0, 1)
        return joined


def find_halves(tensors: dict[str, TensorInfo]) -> dict[str, Halves]:
    """Return the halves of each kv_b_proj by its Hugging Face name.

    Raises UserError for halves that do not fit together.
    """
    halves = {}
    for name, to_key in tensors.items():
        match = TO_KEY.fullmatch(name)
        if match is None or (to_value := tensors.get(f"{match[1]}.attn_v_b.weight")) is None:
            continue
        shapes = to_key.shape, to_value.shape
        if [len(shape) for shape in shapes] != [3, 3] or (shapes[0][0], shapes[0][1]) != (shapes[1][0], shapes[1][2]):
            raise UserError(
                f"{to_key.path}: {match[1]}.attn_k_b has the shape {list(shapes[0])} and attn_v_b {list(shapes[1])}: "
                "expected [heads, latent, key] and [heads, value, latent]"
            )
        target = DEEPSEEK.hugging_face_name(f"{match[1]}.attn_kv_b.weight")
        halves[target] = Halves((name, f"{match[1]}.attn_v_b.weight"), to_key, to_value)
    return halves
