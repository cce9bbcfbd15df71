"""Read a checkpoint's config.json with type checks.

The file is untrusted: errors name the key of a wrong or unsupported value.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import UserError

T = TypeVar("T", bool, int, float, str, dict)  # type: ignore[type-arg]

MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # products and quotients of a few such numbers do not overflow or underflow

# Aliases of activation functions in transformers (ACT2FN in activations.py).
SAME_ACTIVATIONS = {"swish": "silu", "gelu_python": "gelu", "gelu_python_tanh": "gelu_pytorch_tanh"}

# Keys that do not affect inference: names, versions, training settings, and keys that other code reads.
HARMLESS = frozenset(
    """
    _attn_implementation_autoset _from_model_config _model_name_or_path _name_or_path activation_dropout apply_query_key_layer_scaling
    architectures attention_dropout attention_probs_dropout_prob attention_softmax_in_fp32 attn_dropout_prob
    attn_implementation attn_pdrop auto_map aux_loss_alpha bf16 bias_dropout_fusion bos_token_id
    cache_implementation dropout dtype emb_dropout_prob embd_pdrop eos_token_id ep_size fp16 fp32
    gradient_checkpointing hidden_dropout hidden_dropout_prob init_method init_std initializer_range is_llama_config layerdrop
    masked_softmax_fusion max_sequence_length model_max_length model_type n_ctx offset_alibi onnx_safe
    output_router_logits pad_token_id prefix prefix_projection pretraining_tp reorder_and_upcast_attn resid_pdrop
    router_aux_loss_coef router_jitter_noise seq_aux skip_bias_add skip_bias_add_qkv slow_but_exact
    softmax_in_fp32 summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class torch_dtype transformers_version unk_token_id unsloth_version use_cache
    use_cache_kernel use_flash_attn smoothed_by
    """.split()
)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file, or an empty one if the file does not exist.

    Raises UserError for a file that holds no object.
    """
    try:
        values = read_json_value(file)
    except FileNotFoundError:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{file} holds a {type(values).__name__}, not a JSON object")
    return values


def read_json_value(file: Path) -> Any:
    """Return the value of a JSON file. Raises FileNotFoundError for a missing file, UserError for an unreadable one."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long an integer, too deep
        raise UserError(f"{file} cannot be read: {error}") from error


class ConfigReader:
    """Reads the keys of one JSON object by type, and records which keys were read.

    `where` names the object in errors.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    @classmethod
    def from_folder(cls, folder: Path, name: str = "config.json") -> "ConfigReader":
        file = folder / name
        if not file.is_file():
            raise UserError(f"{folder} has no {name}: model.path must be a folder in Hugging Face layout")
        return cls(read_json(file), str(file))

    @property
    def values(self) -> dict[str, Any]:
        """A copy of the whole object, including unread keys."""
        return dict(self._values)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """Return the value of an optional key. null counts as absent."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else self._typed(key, value, kind)

    def require(self, key: str, kind: type[T]) -> T:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            raise UserError(f"{self._where}: {key} is missing")
        return self._typed(key, value, kind)

    def count(self, key: str, default: int | None = None, bits: int = 31) -> int:
        """Return a size: an integer above 0 and below 2**bits."""
        value = self.require(key, int) if default is None else self.get(key, int, default)
        if not 0 < value < 2**bits:
            raise UserError(f"{self._where}: {key}={str(value)[:40]} is not a number above 0 and below 2**{bits}")
        return value

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """Return a number of layers. Its limit bounds the size of configs that hold one value per layer."""
        return self.count(key, bits=20)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number from MIN_NUMBER to MAX_NUMBER."""
        value = self.require(key, float) if default is None else self.get(key, float, default)
        if not MIN_NUMBER <= value <= MAX_NUMBER:
            raise UserError(f"{self._where}: {key}={value} is not a number from {MIN_NUMBER} to {MAX_NUMBER}")
        return value

    def expect(self, key: str, supported: tuple[Any, ...], default: Any) -> Any:
        """Return the value of a key. Raises UserError for a value that is not in `supported`."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value not in supported:
            raise UserError(f"{self._where}: {key}={value!r} is not supported: only {', '.join(map(repr, supported))}")
        return value

    def activation(self, supported: tuple[str, ...], default: str) -> str:
        """Return hidden_act under its name in `supported`. Raises UserError for an unsupported function."""
        activation = self.raw("hidden_act")
        name = SAME_ACTIVATIONS.get(activation, activation) if isinstance(activation, str) else activation
        return str(name) if name in supported else str(self.expect("hidden_act", supported, default))

    def check_multiple(self, key: str, value: int, of: str, divisor: int) -> None:
        """Raise UserError if the value of one key is not a multiple of the value of another key."""
        if value % divisor:
            raise UserError(f"{self._where}: {key}={value} is not a multiple of {of}={divisor}")

    def section(self, key: str) -> "ConfigReader | None":
        """Return a reader of a nested object. None: the key is absent, null or empty."""
        values = self.get(key, dict, {})
        return ConfigReader(values, f"{self._where}: {key}") if values else None

    def raw(self, key: str, default: Any = None) -> Any:
        """Return the value as it is in the file, including null. The default is used only for an absent key."""
        self._read.add(key)
        return self._values.get(key, default)

    def unread(self) -> list[str]:
        """Return the keys that were not read and that may affect inference."""
        return sorted(
            key for key, value in self._values.items() if key not in self._read | HARMLESS and value is not None
        )

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self._where}: {key}={value!r} is not of type {kind.__name__}")
        return value
