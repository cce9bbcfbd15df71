"""Compute the bytes of single tokens with the decoder of a tokenizer.json, whose steps are made for whole texts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.errors import UserError

BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_decoder(decoder: dict[str, Any], source: Path) -> Callable[[str], bytes]:
    """Return the function from a vocabulary token to its bytes inside a text.

    `decoder`: in the form of tokenizer.json. Raises UserError for steps with which a token's bytes depend on other
    tokens.
    """
    has_fallback, spaces = False, []
    for step in steps(decoder):
        match step:
            case {"type": "ByteLevel"}:
                return _of_letters
            case {"type": "ByteFallback"}:
                has_fallback = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                spaces.append((old, new))
            case {"type": "Metaspace", "replacement": old}:
                spaces.append((old, " "))
            case {"type": "Fuse" | "Strip"}:  # joins tokens, and trims the text's ends
                pass
            case _:
                kind = step.get("type")
                raise UserError(
                    f"the tokenizer in {source} joins tokens by {kind}, which gives a token no bytes of its own: "
                    "decode.guide and bytes of tokens need a byte-level tokenizer, or one of pieces"
                )

    def decode(token: str) -> bytes:
        if has_fallback and (byte := BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in spaces:
            token = token.replace(old, new)
        return token.encode()

    return decode


def steps(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer.json; flattens sequences."""
    if part.get("type") != "Sequence":
        return [part]
    (inner,) = (value for value in part.values() if isinstance(value, list))
    return [flat for step in inner for flat in steps(step)]


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's byte alphabet (`bytes_to_unicode` of its encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


LETTERS = _byte_letters()
BYTE_LETTERS = {byte: letter for letter, byte in LETTERS.items()}


def _of_letters(token: str) -> bytes:
    if all(letter in LETTERS for letter in token):
        return bytes(LETTERS[letter] for letter in token)
    return token.encode()
