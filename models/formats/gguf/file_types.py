"""Choose the type of each tensor in a GGUF file as llama-quantize does without options (src/llama-quant.cpp)."""

import logging
import re
from collections.abc import Mapping

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from models.formats.gguf.tensors import STORED

log = logging.getLogger(__name__)

T = GGMLQuantizationType
FILE_TYPES = {  # by dtype: type of most matrices, and the file type
    "float32": (T.F32, LlamaFileType.ALL_F32),
    "float16": (T.F16, LlamaFileType.MOSTLY_F16),
    "bfloat16": (T.BF16, LlamaFileType.MOSTLY_BF16),
    "q4_0": (T.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (T.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": (T.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": (T.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q8_0": (T.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q3_k_m": (T.Q3_K, LlamaFileType.MOSTLY_Q3_K_M),
    "q4_k_m": (T.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "q5_k_m": (T.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "q6_k": (T.Q6_K, LlamaFileType.MOSTLY_Q6_K),
}
WITH_MINIMUM = {T.Q4_0: T.Q4_1, T.Q5_0: T.Q5_1}
MIXED = (T.Q4_K, T.Q5_K)  # in files of these types, sensitive matrices are Q6_K
# as in the converter: routers, positions, convolutions, norms by group, and vectors of the recurrence
ALWAYS_FLOAT32 = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "shortconv.conv.weight"),
    *("ssm_conv1d.weight", "_norm.weight", "ssm_a", "ssm_d"),
)
VALUE_PROJECTIONS = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
SHORTER_BLOCKS = {T.Q3_K: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}
"""Types for rows whose length is not a multiple of 256."""
LAYER = re.compile(r"blk\.(\d+)\.")


def tensor_types(
    dtype: str, shapes: Mapping[str, tuple[int, ...]], architecture: str, has_importance: bool = False
) -> dict[str, T]:
    """Return the type of each tensor, by llama.cpp's names.

    `dtype`: one of FILE_TYPES. `shapes`: of all tensors, row length last. `has_importance`: with an importance matrix.
    Vectors, routers, position tables and convolutions are F32. If a matrix has rows that are not a multiple of the block
    size, it gets a type with shorter blocks, or F16, and a warning counts it.
    """
    matrices = MatrixTypes(FILE_TYPES[dtype][0], shapes, architecture, has_importance)
    chosen = {
        name: T.F32 if len(shape) == 1 or name.endswith(ALWAYS_FLOAT32) else matrices.type_of(name)
        for name, shape in shapes.items()
    }
    types = {name: _with_fitting_blocks(kind, shapes[name][-1]) for name, kind in chosen.items()}
    if unfit := [name for name, kind in chosen.items() if types[name] is not kind]:
        replacements = sorted({types[name].name for name in unfit})
        message = (
            "%s: the rows of %d tensors are not a multiple of the block size, so their type is %s (the first is %s)"
        )
        log.warning(message, dtype, len(unfit), " or ".join(replacements), unfit[0])
    return types


class MatrixTypes:
    """The types of a file's matrices, without regard to row length."""

    def __init__(
        self, base_type: T, shapes: Mapping[str, tuple[int, ...]], architecture: str, has_importance: bool
    ) -> None:
        self._base_type, self._has_importance = base_type, has_importance
        self._shapes = shapes
        self._head = "output.weight" if "output.weight" in shapes else "token_embd.weight"
        self._num_layers = 1 + max((int(match[1]) for name in shapes if (match := LAYER.match(name))), default=-1)
        values = [name for name in shapes if name.endswith(VALUE_PROJECTIONS)]
        self._numbers, self._num_values = _numbers(values), len(values)
        if not any("_exps." in name for name in shapes):
            self._numbers |= _numbers([name for name in shapes if "ffn_down" in name])
        # Key and value matrices get more bits where they are a small part of the model: with 8 experts, as in Mixtral,
        # and in 70B models, whose heads share values.
        self._has_8_experts = any("_exps." in name and shape[0] == 8 for name, shape in shapes.items())
        query, key = (shapes.get(f"blk.0.attn_{part}.weight") for part in "qk")
        shares_values = architecture == "qwen2" or (architecture == "llama" and query != key)
        self._is_70b = self._num_layers == 80 and shares_values

    def type_of(self, name: str) -> T:
        if self._base_type in STORED:
            return self._base_type
        if name == self._head:
            return T.Q8_0 if self._base_type is T.Q8_0 or self._shapes[name][-1] % _block(self._base_type) else T.Q6_K
        if self._has_8_experts and name.endswith((*VALUE_PROJECTIONS, "attn_k.weight")):
            return T.Q8_0
        if self._has_8_experts and name.endswith("attn_output.weight") and self._base_type in (T.Q3_K, T.Q4_K):
            return T.Q5_K
        kind = self._of_mixture(name)
        return T.Q5_K if self._is_70b and name.endswith(VALUE_PROJECTIONS) and kind in (T.Q3_K, T.Q4_K) else kind

    def _of_mixture(self, name: str) -> T:
        is_value, is_down = name.endswith(VALUE_PROJECTIONS), "ffn_down" in name
        if not is_value and not is_down:
            return T.Q4_K if self._base_type is T.Q3_K and name.endswith("attn_output.weight") else self._base_type
        number = self._numbers[name] if name in self._numbers else _layer_of(name)
        count = self._num_values if is_value else self._num_layers
        if self._base_type in MIXED and _is_sensitive(number, count):
            return T.Q6_K
        if self._base_type is T.Q3_K:
            return T.Q5_K if number < (2 if is_value else count // 16) else T.Q4_K
        if self._has_importance and self._base_type in WITH_MINIMUM and is_down:
            return WITH_MINIMUM[self._base_type] if number < count // 8 else self._base_type
        return self._base_type


def _is_sensitive(number: int, count: int) -> bool:
    """Whether a matrix is in the first or last eighth of `count`, or every third between."""
    num_first = count // 8
    return number < num_first or number >= 7 * count // 8 or (number - num_first) % 3 == 2


def _numbers(names: list[str]) -> dict[str, int]:
    """Return the number of each tensor in the order of the layers, some of which may have none."""
    return {name: number for number, name in enumerate(sorted(names, key=_layer_of))}


def _layer_of(name: str) -> int:
    match = LAYER.match(name)
    assert match is not None
    return int(match[1])


def _with_fitting_blocks(kind: T, row: int) -> T:
    fitting = kind if row % _block(kind) == 0 else SHORTER_BLOCKS.get(kind, T.F16)
    return fitting if row % _block(fitting) == 0 else T.F16


def _block(kind: T) -> int:
    return GGML_QUANT_SIZES[kind][0]
