"""Read generation_config.json, a checkpoint's default decode settings in the terms of transformers."""

import logging
from typing import Any

from conf.decoding import FURTHER, NEUTRAL, DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.tokenizers import Tokenizer

log = logging.getLogger(__name__)

FILE = "generation_config.json"
SAMPLING = {"temperature", "top_k", "top_p", "min_p", *FURTHER}
SEARCH = {"num_beams", "num_return_sequences", "penalty_alpha"}
SETTINGS = {*NEUTRAL, "max_new_tokens", "max_length"}  # settings that the file may set
OTHER = set(
    """
    do_sample eos_token_id bos_token_id pad_token_id use_cache transformers_version _from_model_config return_dict_in_generate
    output_attentions output_hidden_states output_logits output_scores trust_remote_code
    """.split()
)


def decode_defaults(values: dict[str, Any], context_length: int) -> dict[str, Any]:
    """Return the file's decode settings.

    Warns of unused settings. Raises UserError for values of a wrong type or size.
    """
    sampling = values.get("do_sample") is True
    settings = {name: value for name, value in values.items() if value is not None}
    # As in transformers, sampling settings need do_sample, except top_k, the number of candidates of contrastive
    # search.
    unused = SEARCH if sampling else SAMPLING if not settings.get("penalty_alpha") else SAMPLING - {"top_k"}
    decode_settings = {name: value for name, value in settings.items() if name in SETTINGS - unused}
    if sampling:
        decode_settings.setdefault("temperature", 1.0)
    if isinstance(decode_settings.get("max_length"), int):
        decode_settings["max_length"] = min(decode_settings["max_length"], context_length)
    if isinstance(decode_settings.get("max_new_tokens"), int) and decode_settings["max_new_tokens"] >= context_length:
        decode_settings["max_new_tokens"] = "auto"
    if unread := {name for name, value in settings.items() if _is_on(name, value)} - decode_settings.keys() - OTHER:
        log.warning("%s has settings that are not used: %s", FILE, ", ".join(sorted(unread)))
    try:
        for name, value in decode_settings.items():
            DecodeConfig().replaced({name: value})
        DecodeConfig().resolved(decode_settings)
    except UserError as error:
        raise UserError(f"{FILE}: {error}") from error
    return decode_settings


def _is_on(name: str, value: object) -> bool:
    """Return whether a setting has an effect: True, any token id, or a value other than 0, 1 and empty."""
    is_id = name.endswith("_token_id") and value is not False
    return is_id or value is True or value not in (False, 0, 1, [], {})


def eos_token_ids(values: dict[str, Any], reader: ConfigReader, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end a text, plus the tokenizer's end-of-turn ids.

    The first of generation_config.json, config.json and the tokenizer that has an eos_token_id is used.
    """
    value = values.get("eos_token_id")
    if value is None:
        value = reader.raw("eos_token_id")
    if value is None and tokenizer is not None:
        value = tokenizer.eos_token_id
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise UserError(f"eos_token_id={value!r} of the checkpoint is neither an id nor a list of ids")
    return frozenset([*ids, *(tokenizer.turn_end_ids if tokenizer else ())])
