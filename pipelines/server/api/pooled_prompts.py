"""Prompts of requests without generation: texts and pairs of texts, cut to the lengths that the request gives."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from conf.errors import UserError
from models.tokenizers.base import Tokenizer
from models.tokenizers.pairs import encode_pair, encode_question
from models.tokenizers.truncation import truncated
from pipelines.replicas.engine_process.frames import Ready
from pipelines.server.api.errors import bad_request, too_long
from pipelines.server.api.requests import Body, NumTokens

MAX_INPUTS = 2048  # per request, as in OpenAI's API
Texts: TypeAlias = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PooledBody(Body):
    """Base of the requests whose prompts are texts without generation."""

    truncate_prompt_tokens: Literal[-1] | Annotated[NumTokens, Field(ge=1)] | None = None
    """Maximum tokens of a prompt, whose text is cut; -1: as many as the model takes. None: a longer prompt is an error,
    unless the model's files give a maximum."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut. The default is right."""

    @property
    def from_left(self) -> bool:
        return self.truncation_side == "left"


class TextEncoder:
    """Encodes the texts of one request, and counts the texts that it cuts."""

    def __init__(self, model: Ready, tokenizer: Tokenizer | None, request: PooledBody, param: str) -> None:
        """`param`: the field to blame."""
        self._model, self._given_tokenizer, self._request, self.param = model, tokenizer, request, param
        self.num_cut = 0
        most, context = request.truncate_prompt_tokens, model.context_length
        self._most = None if most is None else context if most == -1 else min(most, context)

    @property
    def warnings(self) -> list[str]:
        return [f"{self.param}: {self.num_cut} texts were cut"] if self.num_cut else []

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given_tokenizer is None:
            problem = "this server has no tokenizer, which texts need"
            raise bad_request(f"{problem}: start it with model.tokenizer", self.param)
        return self._given_tokenizer

    def token_ids(self, token_ids: list[int]) -> list[int]:
        """Return a prompt that the request gives as token ids."""
        if self._most is None or len(token_ids) <= self._most:
            return token_ids
        self.num_cut += 1
        return token_ids[-self._most :] if self._request.from_left else token_ids[: self._most]

    def text(self, text: str, instruction: str) -> list[int]:
        """Return the prompt of a text, equal to the prompt of `task=embed`."""
        limits = [limit for limit in (self._most, self._model.max_text_tokens) if limit is not None]
        text, end, most = instruction + text, [], min(limits, default=None)
        if most is None:
            self._check_length(text)
        token_ids, final = self._tokenizer.encode(text, True), self._model.final_token_id
        if not token_ids and self._tokenizer.bos_token_id is not None:
            token_ids = [self._tokenizer.bos_token_id]  # an empty prompt needs one token
        if final is not None and token_ids[-1:] != [final]:
            end = [final]
        most = None if most is None else most - len(end)
        token_ids, num_cut = truncated(self._tokenizer, text, token_ids, most, self._request.from_left)
        self.num_cut += num_cut > 0
        return [*token_ids, *end]

    def pair(self, query: str, document: str) -> list[int]:
        """Return the prompt by which a reranker scores a pair, equal to the prompt of `task=score`.

        A prompt that is too long loses tokens of its document: the template stays whole. Raises ApiError, also for a
        tokenizer without a template for pairs.
        """
        if self._most is None:
            self._check_length(query + document)
        token_ids = self._encoded_pair(query, document)
        excess = len(token_ids) - (self._most or len(token_ids))
        if excess <= 0:
            return token_ids
        self.num_cut += 1
        kept = len(self._tokenizer.encode(document, add_special_tokens=False))
        while excess > 0 and kept > 0:
            kept = max(0, kept - excess)
            document = self._first(document, kept)
            token_ids = self._encoded_pair(query, document)
            excess = len(token_ids) - (self._most or 0)
        if excess > 0:
            whole = f"the prompt has {len(token_ids)} tokens without a document"
            limit = f"the {self._most} that truncate_prompt_tokens={self._request.truncate_prompt_tokens} allows"
            raise bad_request(f"{whole}, more than {limit}: shorten the query", "truncate_prompt_tokens")
        return token_ids

    def cut(self, text: str, most: int | None) -> str:
        """Return the text, or its first tokens (with `truncation_side` left its last) if it has more than `most`.

        `most`: None or 0: no limit.
        """
        if not most or len(self._tokenizer.encode(text, add_special_tokens=False)) <= most:
            return text
        self.num_cut += 1
        return self._first(text, most)

    def _first(self, text: str, most: int) -> str:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        part = token_ids[len(token_ids) - most :] if self._request.from_left else token_ids[:most]
        return self._tokenizer.decode(part, skip_special_tokens=False)

    def _encoded_pair(self, query: str, document: str) -> list[int]:
        try:
            if self._model.pooled == "labels":
                return encode_pair(self._tokenizer, query, document)
            return encode_question(self._tokenizer, self._model.instruction, query, document)
        except UserError as error:
            raise bad_request(str(error), self.param) from error

    def _check_length(self, text: str) -> None:
        """Raise ApiError, before encoding, if the text must have too many tokens."""
        most = self._model.context_length
        if (least := self._tokenizer.least_tokens(text)) > most:
            raise too_long(f"at least {least}", most, self.param)
