"""The tests' description of an architecture: its class in transformers, small models of it, and refused values of its
config.json."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from tests.helpers import family_twins
from tests.helpers.builders import SMALL
from tests.helpers.oracle import TOLERANCE, write_random

LEFT_OUT: Any = ...
"""Marks a key that config.json lacks."""
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
    """One variant per feature. Tests of all families use the first."""
    refused: list[tuple[dict[str, Any], str]]
    """Unsupported settings and the error message, a regular expression."""
    read: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Settings, and the config fields that they become. `rotary.theta` is a nested field."""
    sizes: dict[str, Any] = field(default_factory=lambda: BASE)
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that differ from `sizes`."""
    model_type: str = ""
    """model_type in config.json, if it differs from the row's name."""
    lengths: tuple[int, ...] = (5, 1, 40, 17)
    """Lengths of the prompts in tokens."""
    tolerance: float = TOLERANCE
    """Maximum difference of a logit."""

    def write(self, folder: Path, **settings: Any) -> Any:
        """Write a random float32 model, and return transformers' model of it."""
        model_class = getattr(family_twins, self.model, None) or getattr(transformers, self.model)
        values = copy.deepcopy({**self.sizes, **settings})  # transformers changes the dicts of rope_parameters
        return write_random(folder, model_class(model_class.config_class(**values)))

    def json(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return a config.json."""
        values = {"rms_norm_eps": 1e-6, **self.sizes, **self.config, **changes}
        return {key: value for key, value in values.items() if value is not LEFT_OUT}


@contextmanager
def noted(value: object) -> Iterator[None]:
    """Add the value to the message of an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"with {value}")
        raise
