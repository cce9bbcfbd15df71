"""Read generation_config.json, a checkpoint's suggestions for decoding in transformers' terms."""

import logging
from typing import Any

from conf.decoding import NEUTRAL, DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.tokenizers import Tokenizer

log = logging.getLogger(__name__)

FILE = "generation_config.json"
SAMPLING = {"temperature", "top_k", "top_p", "min_p"}
SEARCH = {"num_beams", "num_return_sequences", "penalty_alpha"}
SETTINGS = {*NEUTRAL, "max_new_tokens", "max_length"}  # these may come from the file
OTHER = set(
    """
    do_sample eos_token_id bos_token_id pad_token_id use_cache transformers_version _from_model_config return_dict_in_generate
    output_attentions output_hidden_states output_logits output_scores trust_remote_code
    """.split()
)


def decode_defaults(values: dict[str, Any], context_length: int) -> dict[str, Any]:
    """Return the suggested decode settings. Warns of unused ones. Raises UserError for values of a wrong type or size."""
    sampling = values.get("do_sample") is True
    given = {name: value for name, value in values.items() if value is not None}
    # As in transformers, sampling settings count with do_sample alone, except the number of contrastive candidates.
    unused = SEARCH if sampling else SAMPLING if not given.get("penalty_alpha") else SAMPLING - {"top_k"}
    taken = {name: value for name, value in given.items() if name in SETTINGS - unused}
    if sampling:
        taken.setdefault("temperature", 1.0)
    if isinstance(taken.get("max_length"), int):
        taken["max_length"] = min(taken["max_length"], context_length)
    if isinstance(taken.get("max_new_tokens"), int) and taken["max_new_tokens"] >= context_length:
        taken["max_new_tokens"] = "auto"
    if unread := {name for name, value in given.items() if _is_on(name, value)} - taken.keys() - OTHER:
        log.warning("%s has settings that are not used: %s", FILE, ", ".join(sorted(unread)))
    try:
        for name, value in taken.items():
            DecodeConfig().replaced({name: value})
        DecodeConfig().resolved(taken)
    except UserError as error:
        raise UserError(f"{FILE}: {error}") from error
    return taken


def _is_on(name: str, value: object) -> bool:
    """Return whether a setting changes something: a switch, an id, which may be 0 or 1, or a number other than these."""
    is_id = name.endswith("_token_id") and value is not False
    return is_id or value is True or value not in (False, 0, 1, [], {})


def eos_token_ids(values: dict[str, Any], reader: ConfigReader, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end a text, from generation_config.json, else config.json, else the tokenizer, and those that end a turn."""
    value = values.get("eos_token_id")
    if value is None:
        value = reader.raw("eos_token_id")
    if value is None and tokenizer is not None:
        value = tokenizer.eos_token_id
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise UserError(f"eos_token_id={value!r} of the checkpoint is neither an id nor a list of ids")
    return frozenset([*ids, *(tokenizer.turn_end_ids if tokenizer else ())])
