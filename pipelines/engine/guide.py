"""Guided decoding: computes which tokens may follow, so that the output matches a grammar.

llguidance parses, with Earley's algorithm over a lexer of derivatives. A mask contains exactly the tokens that continue
some text of the grammar. It depends only on the output so far, so a row's tokens do not depend on its batch. This
module does not import torch: masks are bytes.
"""

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from conf.errors import UserError, shortened
from conf.guides import guide_text
from conf.json_schemas import prepared
from models.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Limits on the work of a user's grammar. llguidance counts operations, so every machine refuses the same grammars.
# llguidance's own limits for a mask, about 15 ms, also apply.
MAX_GRAMMAR_SIZE = 10_000  # symbols; quadratic time: 6 s for 3,000 optional properties of an object, 0.2 s for 500
MAX_LEXER_FUEL = 500_000  # operations that build the lexer, 50,000 per millisecond
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
# Allowed between the parts of a JSON text: a space, or a line break and an indent. Without a bound small models write
# endless spaces.
WHITESPACE = r" |\r?\n[ \t]{0,32}"
NUM_KEPT = 64  # cached guides, compiled or refused
# Disables llguidance's forced tokens. If the grammar allows only one text, any tokens may spell the text, and the
# allowed tokens do not depend on the text's length.
OPTIONS = '%llguidance {"no_forcing": true}'  # llguidance uses the last %llguidance line of a grammar


class Guide:
    """The state of one output in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> "Guide":
        return Guide(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> bytes:
        """Return the bitmask of allowed tokens, lowest id first, padded to int32. Raises UserError as `accept` does."""
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask[: 4 * -(-self._vocab_size // 32)]  # llguidance's mask can be longer than the vocabulary

    def accept(self, token_id: int) -> None:
        """Advance by an allowed token. Raises UserError if the text exceeds llguidance's work limits."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the text may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error())
            raise UserError(f"decode.guide takes too much work for this text ({reason}): give a simpler guide")


class Guides:
    """Compiles guides for one vocabulary, and caches the last used guides. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size`: the model's, which sizes the masks. Ids that the tokenizer lacks are never allowed."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(id for id in eos_token_ids if id < vocab_size)
        self._compiled = functools.lru_cache(maxsize=NUM_KEPT)(self._compile_or_error)

    def begin(self, guide: dict[str, Any]) -> Guide:
        """Return a guide's state at the start of a text.

        Raises UserError if the guide cannot be compiled or is too large.
        """
        compiled = self._compiled(guide_text(guide))
        if isinstance(compiled, UserError):
            raise UserError(str(compiled))
        return compiled.copy()

    def _compile_or_error(self, text: str) -> Guide | UserError:
        """Return the compiled guide or its error. Errors are cached too: a slow guide costs its time only once."""
        try:
            return self._compile(text)
        except UserError as error:
            return error.with_traceback(None)

    def _compile(self, text: str) -> Guide:
        ((kind, value),) = json.loads(text).items()
        vocabulary = self._vocabulary
        from llguidance import LLMatcher  # an optional package; _vocabulary reports it if it is missing

        grammar = {"grammars": [{"lark_grammar": f"{_lark(kind, value)}\n{OPTIONS}"}]}
        matcher = LLMatcher(vocabulary, json.dumps(grammar), log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the lexer's first states, which copies share
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        if matcher.is_stopped():
            raise UserError(f"decode.guide.{kind} allows only the empty text: give a guide that allows a longer text")
        return Guide(matcher, self._vocab_size)

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """The tokens' bytes as a trie. It takes about a second to build for 128,000 tokens."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise UserError("decode.guide needs the package llguidance: pip install 'quintet[guide]'") from error
        if self._tokenizer is None:
            raise UserError("decode.guide needs a tokenizer: give model.tokenizer=PATH")
        if not self._eos_token_ids:
            raise UserError("decode.guide needs an EOS token, and the model has none: leave decode.guide out")
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_token_ids)


class _Vocabulary:
    """The vocabulary in the interface that TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: list[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(id) for id in range(size)]
        # Lark grammars may name special tokens; ordinary text never produces them. An id without a name, for example an
        # id that only the model has, is not a special token: an empty name would be a prefix of every other name.
        self.special_token_ids = []
        for id, token in enumerate(self.tokens):
            name = tokenizer.decode([id], skip_special_tokens=False) if token is None and id < tokenizer.size else ""
            self.tokens[id] = name.encode() if token is None else token
            if name or id in eos_token_ids:
                self.special_token_ids.append(id)

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("only forced tokens are tokenised, and there are none")


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SIZE,
        initial_lexer_fuel=MAX_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def _lark(kind: str, value: Any) -> str:
    from llguidance import regex_to_lark

    match kind:
        case "json_schema":
            return f"start: %json {json.dumps({**prepared(value), 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"
        case "json_object":
            return _lark("json_schema", {"type": "object"})
        case "regex":
            return f"start: /{regex_to_lark(value, use_ascii='')}/"
        case "choice":
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    return str(value)


def _refused(kind: str, error: str) -> UserError:
    reason = _one_line(error)
    if "oneOf constraints" in reason:
        remedy = "its alternatives do not exclude each other by type, const or a required property: give anyOf"
        return UserError(f"decode.guide.{kind} has a oneOf that is not supported: {remedy}")
    if match := re.search(r"Unimplemented keys: \[(.*)\]", reason):
        return UserError(f"decode.guide.{kind} has keywords that are not supported: {match[1]}: leave them out")
    return UserError(f"decode.guide.{kind} cannot be used: {reason}: correct or simplify it")


def _one_line(error: str) -> str:
    """Return llguidance's error message without the grammar that it quotes."""
    message = re.split(r"\n\s*\d+ \| |\n<non-verbose/>", error)[0]
    return shortened(" ".join(re.sub(r"^at \d+\(\d+\): ", "", message).split()))
