"""Typed reading of a checkpoint's config.json, which is untrusted input: wrong types and unsupported values are refused by name."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import UserError

T = TypeVar("T", bool, int, float, str, dict)  # type: ignore[type-arg]

# Keys that change nothing in inference: names, versions, training settings, and what is read elsewhere.
HARMLESS = frozenset(
    """
    _name_or_path architectures attention_dropout auto_map aux_loss_alpha bos_token_id dtype eos_token_id ep_size
    initializer_range is_llama_config max_sequence_length model_max_length model_type output_router_logits pad_token_id
    pretraining_tp seq_aux tokenizer_class torch_dtype transformers_version unsloth_version use_cache
    _attn_implementation_autoset
    """.split()
)


class ConfigReader:
    """Reads keys of one JSON object by type and remembers which were read. `where` names the object in errors."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    @classmethod
    def from_folder(cls, folder: Path, name: str = "config.json") -> "ConfigReader":
        file = folder / name
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{folder} has no {name}: model.path must be a folder in Hugging Face layout") from None
        except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long a number, too deep
            raise UserError(f"{file} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{file} holds a {type(values).__name__}, not a JSON object")
        return cls(values, str(file))

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of an optional key; null counts as absent."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else self._typed(key, value, kind)

    def require(self, key: str, kind: type[T]) -> T:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            raise UserError(f"{self._where}: {key} is missing")
        return self._typed(key, value, kind)

    def count(self, key: str, default: int | None = None) -> int:
        """A number above 0 and below 2**31, as sizes are."""
        value = self.require(key, int) if default is None else self.get(key, int, default)
        if not 0 < value < 2**31:
            raise UserError(f"{self._where}: {key}={str(value)[:40]} is not a number above 0 and below 2**31")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.require(key, float) if default is None else self.get(key, float, default)
        if not 0 < value < math.inf:
            raise UserError(f"{self._where}: {key}={value} is not a finite number above 0")
        return value

    def expect(self, key: str, supported: tuple[Any, ...], default: Any) -> Any:
        """The value of a key of which only some values are supported."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value not in supported:
            raise UserError(f"{self._where}: {key}={value!r} is not supported: only {', '.join(map(repr, supported))}")
        return value

    def section(self, key: str) -> "ConfigReader | None":
        """A nested object, or None where the key is absent, null or empty."""
        values = self.get(key, dict, {})
        return ConfigReader(values, f"{self._where}: {key}") if values else None

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self._values.get(key)

    def unread(self) -> list[str]:
        """Keys that nobody asked for and that may mean something."""
        return sorted(
            key for key, value in self._values.items() if key not in self._read | HARMLESS and value is not None
        )

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self._where}: {key}={value!r} is not of type {kind.__name__}")
        return value
