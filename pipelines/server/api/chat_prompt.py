"""The prompt of a chat request, and what its answers are read with."""

import hashlib
import itertools
import json
from typing import Any

from conf.errors import UserError
from models.chat.calls import Tools
from models.chat.description import ChatFormat
from models.chat.reader import AnswerReader
from models.chat.special_tokens import Vocabulary
from models.tokenizers.base import Tokenizer
from pipelines.server.api.message_reader import CallIds, MessageReader


class ChatPrompt:
    """The prompt of a chat request, and the parser settings of its answers."""

    def __init__(
        self,
        text: str,
        token_ids: list[int],
        settings: dict[str, Any],
        form: ChatFormat,
        tools: Tools | None,
        begun: str,
        dropped: list[str],
        vocabulary: Vocabulary | None,
        num_calls: int,
    ) -> None:
        """`begun`, `dropped`, `vocabulary`: see AnswerReader. `num_calls`: number of calls in the conversation."""
        self.text = text
        self.token_ids = token_ids
        self.settings = settings
        """DecodeConfig settings that the tools and the reasoning require."""
        self.warnings: list[str] = []
        """Fields of the request that the chat template cannot honour."""
        self._form, self._tools, self._begun, self._dropped = form, tools, begun, dropped
        self._vocabulary, self._num_calls = vocabulary, num_calls
        self._digest = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()
        self._samples = itertools.count()

    def reader(self) -> MessageReader:
        """Return a parser for the answer of the next sample."""
        reader = AnswerReader(self._form, self._tools, self._begun, self._dropped, self._vocabulary)
        return MessageReader(reader, CallIds(self._form, f"{self._digest} {next(self._samples)}", self._num_calls))


def vocabulary_of(tokenizer: Tokenizer, form: ChatFormat) -> Vocabulary | None:
    """Return the special tokens in a format's literals; None if the tokenizer's tokens have no fixed bytes."""
    try:
        tokenizer.token_bytes(0)
    except UserError:
        return None
    texts = [text for text in tokenizer.special_texts if any(text in literal for literal in form.literals)]
    markers = {id: text for text in texts if (id := tokenizer.special_token_id(text)) is not None}

    def num_bytes(token_id: int) -> int:
        marker = markers.get(token_id)
        return len(tokenizer.token_bytes(token_id) or b"" if marker is None else marker.encode())

    return Vocabulary(markers, num_bytes)
