"""Read Mistral's tekken.json: special tokens, then BPE ranks, and the split pattern.

Mistral Small 3.2 has no other file.
"""

import base64
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import read_json
from models.tokenizers.base import Tokenizer
from models.tokenizers.huggingface import damage_refused
from models.tokenizers.template_files import chat_templates
from models.tokenizers.tiktoken import TiktokenTokenizer

TEKKEN = "tekken.json"


class TekkenTokenizer(TiktokenTokenizer):
    def __init__(self, file: Path) -> None:
        content = read_json(file)
        count, size = (content["config"][f"default_{name}"] for name in ("num_special_tokens", "vocab_size"))
        named = {token["rank"]: token["token_str"] for token in content["special_tokens"]}
        names = tuple(named.get(id, f"<SPECIAL_{id}>") for id in range(count))
        tokens: list[dict[str, Any]] = content["vocab"][: size - count]  # the remaining ones are padding
        if (
            [token["rank"] for token in tokens] != [*range(size - count)]
            or len({*names}) < count
            or max(named) >= count
        ):
            raise UserError(f"its ranks are not {count} special tokens and {size - count} other tokens, each once")
        ranks = {base64.b64decode(token["token_bytes"]): count + token["rank"] for token in tokens}
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise UserError(f"no token is the byte {missing[0]}")
        super().__init__(file, ranks, content["config"]["pattern"], names, first_special=0)
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.bos_token_id, self.eos_token_id = (self._specials[name] for name in self.special_tokens.values())
        self.take_templates(chat_templates(file.parent))


def load_tekken(folder: Path) -> Tokenizer:
    """Return the tokenizer in a folder. Raises UserError if it cannot be read."""
    with damage_refused(folder):
        try:
            return TekkenTokenizer(folder / TEKKEN)
        except UserError as error:
            raise UserError(f"the tokenizer in {folder} cannot be read: {TEKKEN}: {error}") from error
