"""Read Hugging Face's tokenizer files, tokenizer.json or vocab.json with merges.txt, without remote code.

transformers reads the folders that `read_tokenizer_json` does not: without tokenizer.json, or with an unknown class.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from conf.errors import UserError
from models.config import read_json
from models.tokenizers.base import Tokenizer
from models.tokenizers.runner_form import form_of_backend
from models.tokenizers.template_files import chat_templates
from models.tokenizers.token_decoder import LETTERS, steps, token_decoder
from models.tokenizers.tokenizer_json import read_tokenizer_json

log = logging.getLogger(__name__)

SETTINGS = (
    "tokenizer_config.json",
    "config.json",
    "tokenizer.json",
)  # without these files it can only be GPT-2's tokenizer
PADDLE_GPT = "GPTTokenizer"  # PaddleNLP's name of GPT-2's tokenizer


class HuggingFaceTokenizer(Tokenizer):
    def __init__(
        self, source: Path, backend: Backend, special_tokens: Mapping[str, str], template: str | None = None
    ) -> None:
        self.source = source
        self.backend = backend
        backend.no_truncation()  # the file may have the truncation of the training
        backend.no_padding()
        self.special_tokens = special_tokens
        self.chat_template = template
        self.is_nfc = {"type": "NFC"} in _rules(backend.normalizer)
        self.size = max(backend.get_vocab().values(), default=-1) + 1
        self.bos_token_id, self.eos_token_id = (
            backend.token_to_id(special_tokens[name]) if name in special_tokens else None
            for name in ("bos_token", "eos_token")
        )

    @cached_property
    def max_token_bytes(self) -> int | None:
        return _max_token_bytes(self.backend)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL, 0.6 s for 1 MB, and computes token offsets, which are not used.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _control_names(self) -> Mapping[str, bool]:
        return {token.content: token.special for token in self.backend.get_added_tokens_decoder().values()}

    def _encode_parts(self, parts: list[str]) -> list[int]:
        read = partial(self.encode, add_special_tokens=False)
        ids = read(parts[0])
        for i, part in enumerate(parts[1:], 1):
            if not part:
                continue
            added = _behind_newline(part, self._encode_plain if i % 2 else read)
            if i % 2 and self.backend.token_to_id(part) in added:
                raise UserError(f"{part!r} is a control token, which this tokenizer cannot write as text: leave it out")
            ids += added
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text without recognising added tokens: runs the backend's steps one by one."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, id: int) -> bytes | None:
        added = self._added.get(id)
        if added is not None:
            return None if added.special else self._added_bytes(id)
        token = self.backend.id_to_token(id) if id >= 0 else None
        if token is None or token == self._unknown:
            return None
        return self._bytes_of(token)

    def _added_bytes(self, id: int) -> bytes:
        """Return the bytes of an added token, which the normaliser may change: what a second one adds to the first."""
        once, twice = (self.decode([id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self.backend.get_added_tokens_decoder()
        return added

    @cached_property
    def _unknown(self) -> str | None:
        return getattr(self.backend.model, "unk_token", None)

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes]:
        steps = json.loads(self.backend.decoder.__getstate__()) if self.backend.decoder else {"type": None}
        return token_decoder(steps, self.source)

    def _runner_form(self) -> dict[str, Any]:
        return form_of_backend(json.loads(self.backend.to_str()))

    def save(self, folder: Path) -> None:
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        settings |= self.named_templates
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _rules(part: Any) -> list[dict[str, Any]]:
    return steps(json.loads(part.__getstate__())) if part else []


def _max_token_bytes(backend: Backend) -> int | None:
    """Return `max_token_bytes`; None if a step can shorten texts, or if a token can have any number of bytes."""
    rules, cuts = _rules(backend.normalizer), _rules(backend.pre_tokenizer)
    added = backend.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    if strips or not all(map(_keeps_length, rules)) or not all(map(_keeps_text, cuts)):
        return None
    is_byte_level = any(cut["type"] == "ByteLevel" for cut in cuts)
    letters = LETTERS if is_byte_level else map("<0x{:02X}>".format, range(256))
    if not isinstance(backend.model, BPE) or any(backend.token_to_id(letter) is None for letter in letters):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    pieces = map(len, vocabulary) if is_byte_level else (len(token.encode()) for token in vocabulary)
    return max(*pieces, *(len(token.content.encode()) for token in added))


def _keeps_length(rule: Mapping[str, Any]) -> bool:
    """Return whether a normaliser never shortens a text, except by NFC."""
    match rule:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
        case _:
            return rule["type"] in ("NFC", "Prepend")


def _keeps_text(cut: Mapping[str, Any]) -> bool:
    return cut["type"] in ("ByteLevel", "Metaspace", "Digits") or (
        cut["type"] == "Split" and cut["behavior"] != "Removed"
    )


def _behind_newline(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the token ids of a text inside a conversation. A backend may add a space at the beginning of a text."""
    newline, ids = encode("\n"), encode("\n" + text)
    return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)


def load_huggingface(folder: Path, template: str | None = None) -> HuggingFaceTokenizer:
    """Read the folder's tokenizer.

    `template`: used if the folder has none. Raises UserError if the files cannot be read.
    """
    with damage_refused(folder):
        backend, special_tokens = read_tokenizer_json(folder) or _read_with_transformers(folder)
        tokenizer = HuggingFaceTokenizer(folder, backend, special_tokens)
        tokenizer.take_templates(chat_templates(folder), template)
    if dropout := getattr(backend.model, "dropout", None):
        behaviour = f"drops merges at random (dropout={dropout:g} of its tokenizer.json)"
        log.warning("the tokenizer in %s %s: a text has other tokens each time, unless it is null", folder, behaviour)
    return tokenizer


@contextmanager
def damage_refused(source: Path) -> Iterator[None]:
    """Convert every exception of the libraries for a damaged file to a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"the tokenizer in {source} cannot be read: {reason}") from error


def _read_with_transformers(folder: Path) -> tuple[Backend, dict[str, str]]:
    from transformers import AutoTokenizer, GPT2Tokenizer  # imported here, because it takes two seconds

    is_paddle = read_json(folder / "tokenizer_config.json").get("tokenizer_class") == PADDLE_GPT
    if is_paddle or not any((folder / name).is_file() for name in SETTINGS):
        tokenizer = GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is implemented only in Python: save it with its tokenizer.json")
    backend = tokenizer.backend_tokenizer
    if backend.get_vocab().keys() <= {token.content for token in backend.get_added_tokens_decoder().values()}:
        raise UserError(f"{folder} has no vocabulary of its {type(tokenizer).__name__}: put its tokenizer.json there")
    return backend, tokenizer.special_tokens_map
