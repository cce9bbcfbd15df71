"""What the tests know of an architecture: its class in transformers, small models of it, and what its config.json may not say."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from tests.helpers import family_twins
from tests.helpers.builders import SMALL
from tests.helpers.oracle import write_random

LEFT_OUT: Any = ...
"""Stands for a key that config.json does not have."""
BASE: dict[str, Any] = {**SMALL, "pad_token_id": 0}
FULL, SLIDING = "full_attention", "sliding_attention"
NOT_SILU = ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'")
THREE_KEYS = ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Family:
    """A row of the table. `variants` and `refused` change the settings of `sizes`."""

    model: str
    """The class in transformers, or in tests/helpers/family_twins.py."""
    variants: list[dict[str, Any]]
    """One for each feature. Tests of all families take the first."""
    refused: list[tuple[dict[str, Any], str]]
    """What is not supported, and what the error says: a regular expression."""
    read: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Settings, and fields of the config that they become: `rotary.theta` is the field of a field."""
    sizes: dict[str, Any] = field(default_factory=lambda: BASE)
    config: dict[str, Any] = field(default_factory=dict)
    """What config.json says otherwise than `sizes`."""
    model_type: str = ""
    """Of config.json, where it is not the name of the row."""
    lengths: tuple[int, ...] = (5, 1, 40, 17)
    """Of the prompts."""

    def write(self, folder: Path, **settings: Any) -> Any:
        """Write a random float32 model, and return transformers' own."""
        model_class = getattr(family_twins, self.model, None) or getattr(transformers, self.model)
        return write_random(folder, model_class(model_class.config_class(**{**self.sizes, **settings})))

    def json(self, changes: dict[str, Any]) -> dict[str, Any]:
        """A config.json."""
        values = {"rms_norm_eps": 1e-6, **self.sizes, **self.config, **changes}
        return {key: value for key, value in values.items() if value is not LEFT_OUT}


@contextmanager
def noted(value: object) -> Iterator[None]:
    """An error says for which value it came."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"with {value}")
        raise
