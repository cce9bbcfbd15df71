"""The decode group: how tokens are chosen. It is a part of schema.py and imports only the standard library."""

import functools
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from conf.errors import UserError, check, list_known_names, shortened
from conf.guides import check_guide
from conf.speculation import Acceptance, Speculate, SpeculationConfig, speculate_named, speculation_of

log = logging.getLogger(__name__)


@dataclass
class DecodeConfig:
    """How tokens are chosen.

    Beam search if num_beams > 1, contrastive search if penalty_alpha > 0, sampling if temperature > 0, else greedy.
    Logits are processed in this order: biases, penalties, bans, forced tokens, guide, temperature, top_k, top_p, min_p.
    A null setting takes its value from the checkpoint's generation_config.json, else from NEUTRAL. A setting that
    another setting switches off (USED_WITH) causes a warning.
    """

    max_new_tokens: int | str | None = None
    """Most new tokens; auto: as many as fit into the context after each prompt.

    If `max_length` is also set, the smaller limit applies; if neither is set, 256 or the rest of the context.
    """
    min_new_tokens: int | None = None
    """Before this many new tokens, no stop token, eos or stop string ends a row."""
    max_length: int | None = None
    """Most prompt + new tokens."""
    min_length: int | None = None
    """Like min_new_tokens, for prompt + new tokens. min_new_tokens has priority."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 or -1: all. In contrastive search: the number of candidates."""
    top_p: float | None = None
    """Keep the most likely tokens up to and including the token whose cumulative probability reaches top_p."""
    min_p: float | None = None
    """Keep tokens whose probability is at least this share of the highest probability."""
    n: int = 1
    """Samples per prompt. The prompt is computed once."""
    num_beams: int | None = None
    length_penalty: float | None = None
    """Beam scores are divided by length ** length_penalty: above 0 favours long continuations, below 0 short ones."""
    early_stopping: bool | str | None = None
    """When beam search with num_beams finished beams ends.

    true: at once; false: when a better beam is unlikely; never: when a better beam is impossible.
    """
    num_return_sequences: int | None = None
    """Number of beams returned, best first."""
    penalty_alpha: float | None = None
    """Contrastive search: weight of the similarity to earlier tokens against the probability (arXiv 2202.06417)."""
    repetition_penalty: float | None = None
    """Divides positive logits of tokens in prompt or output, and multiplies negative logits (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    no_repeat_ngram_size: int | None = None
    """No sequence of this many tokens, at most 1024, occurs twice in prompt and output; 0: no limit."""
    logit_bias: Any = None
    """Added to the logits of these token ids: {ID: BIAS, ...}."""
    bad_words: list[str] = field(default_factory=list)
    """Texts whose token sequences are never generated. Each text is encoded with and without a leading space."""
    bad_words_ids: Any = None
    """Token id sequences that are never generated: [[ID, ...], ...]. A sequence of only the model's eos is ignored."""
    suppress_tokens: Any = None
    """Token ids that are never chosen."""
    sequence_bias: Any = None
    """Added to the logit of a sequence's last token after its other tokens: [[[ID, ...], BIAS], ...]."""
    forced_bos_token_id: Any = None
    """The first token after a prompt of one token; []: any."""
    forced_eos_token_id: Any = None
    """The token, or one of a list of tokens, that ends a text of the maximum length; []: any. Not with a guide."""
    allowed_token_ids: list[int] = field(default_factory=list)
    """The only tokens that may be chosen; empty: all."""
    guide: Any = None
    """The grammar that constrains the text. Not with beam or contrastive search.

    {json_schema: {...}}, {json_object: true}, {regex: TEXT}, {choice: [TEXT, ...]} or {lark: TEXT}.
    """
    stop: list[str] = field(default_factory=list)
    """Texts that end a row, at most 16384 characters in total; the text before is kept.

    In a shell a line break is $'decode.stop=["\\n"]'.
    """
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a row, in addition to the model's eos."""
    include_stop: bool = False
    """Keep the stop string, or the text of the token that ended the row."""
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of every row without its own seed; null: the run draws a seed. A row has the same tokens in any batch."""
    logprobs: int | None = None
    """Log probabilities of this many most likely tokens and of the chosen token, from the unmodified distribution."""
    prompt_logprobs: int | None = None
    """Log probabilities, as for logprobs, of every prompt token except the first, which has none."""
    skip_special_tokens: bool = True
    prefix_cache: bool = True
    """Reuse the KV cache of earlier rows with the same prefix."""
    cache_salt: str | None = None
    """Share prefixes only with rows of the same salt, so that timing does not reveal the prompts of other users."""
    speculate: Speculate = Speculate.none
    """The proposer of draft tokens, several of which a step verifies: none, ngram, model or mtp.

    With acceptance=exact it changes no token on a CPU.
    """
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        for name, allowed, holds in _DECODE_CHECKS:
            value = getattr(self, name)
            shown = repr(value) if isinstance(value, str) else value
            check(value is None or holds(value), f"decode.{name}", shown, allowed)
        if self.top_k == -1:
            self.top_k = 0
        if isinstance(self.max_new_tokens, int) and self.min_new_tokens is not None:
            allowed = f"at most decode.max_new_tokens={self.max_new_tokens}"
            check(self.min_new_tokens <= self.max_new_tokens, "decode.min_new_tokens", self.min_new_tokens, allowed)
        if (self.num_beams or 1) > 1:
            self._check_search("num_beams", self.num_beams)
            allowed = f"at most decode.num_beams={self.num_beams}"
            check(
                (self.num_return_sequences or 1) <= (self.num_beams or 1),
                "decode.num_return_sequences",
                self.num_return_sequences,
                allowed,
            )
            check(
                not self.penalty_alpha,
                "decode.penalty_alpha",
                self.penalty_alpha,
                "0 with beams: contrastive search has none",
            )
            check(self.logprobs is None, "decode.logprobs", self.logprobs, "null with beams")
        elif self.penalty_alpha:
            self._check_search("penalty_alpha", self.penalty_alpha)
            if self.top_k is not None:
                allowed = f"2 to {MAX_SEQUENCES}, the number of candidates of contrastive search"
                check(2 <= self.top_k <= MAX_SEQUENCES, "decode.top_k", self.top_k, allowed)
        if self.guide is not None:
            self._check_guide()
        if self.n > 1 and self.temperature is not None:
            check(
                self.temperature > 0,
                "decode.n",
                self.n,
                "1 with decode.temperature=0, which gives the same text every time",
            )

    def _check_guide(self) -> None:
        check_guide(self.guide)
        lossy = self.speculate is not Speculate.none and self.speculation.acceptance is not Acceptance.exact
        for contradicts, setting in (
            ((self.num_beams or 1) > 1, f"num_beams={self.num_beams}, whose candidates compete"),
            (bool(self.penalty_alpha), f"penalty_alpha={self.penalty_alpha}, whose candidates compete"),
            (self.ignore_eos, "ignore_eos=true, with which no text ends"),
            (lossy, f"speculation.acceptance={self.speculation.acceptance.name}, whose drafts stay unseen by it"),
        ):
            check(not contradicts, "decode.guide", self.guide, f"null with decode.{setting}")

    def _check_search(self, name: str, value: object) -> None:
        allowed = f"0 with decode.{name}={value}, which does not sample"
        check(not self.temperature, "decode.temperature", self.temperature, allowed)
        check(self.n == 1, "decode.n", self.n, f"1 with decode.{name}={value}, which does not sample")

    def warn_of_escapes(self) -> None:
        """Log a warning for stop texts with a backslash and a letter, which Hydra's grammar does not unescape."""
        if escaped := next((text for text in self.stop if re.search(r"\\[nrt]", text)), None):
            remedy = "in a shell a line break is $'decode.stop=[\"\\n\"]'"
            log.warning("decode.stop has the characters %s, a backslash and a letter: %s", escaped, remedy)

    def check_unset(self, where: str, remedy: str) -> None:
        """Raises UserError for a setting that is neither the default nor NEUTRAL, because it would have no effect."""
        for name, default in vars(DecodeConfig()).items():
            if (value := getattr(self, name)) not in (default, NEUTRAL.get(name)):
                if isinstance(value, SpeculationConfig):
                    name, value = next((f"speculation.{name}", value) for name, value in value.changed().items())
                shown = value.name if isinstance(value, Enum) else value
                raise UserError(f"decode.{name}={shown} is not used {where}: {remedy}")

    def resolved(self, defaults: dict[str, Any]) -> "DecodeConfig":
        """Return a copy without open settings: null becomes the value in `defaults`, else in NEUTRAL.

        An unused null setting stays null. A setting that is given and not used stays, because a row may use it. It
        causes a warning and not an error, so that a comparison of temperatures, including 0, can leave top_p set.
        Raises UserError for num_return_sequences without beams.

        defaults: the checkpoint's suggestions. Its lengths apply only if neither length is set here.
        """
        values = {**NEUTRAL, **defaults}
        for lengths in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if any(getattr(self, name) is not None for name in lengths):
                values |= {name: NEUTRAL.get(name) for name in lengths}
        filled = {name: value for name, value in values.items() if getattr(self, name) is None}
        unused = unused_settings(vars(self) | filled)
        for name in sorted(unused - filled.keys()):
            off = " and ".join(f"decode.{user}={(vars(self) | filled)[user]}" for user in USED_WITH[name])
            text = f"decode.{name}={getattr(self, name)} is not used with {off}"
            if name == "num_return_sequences":  # fewer texts than requested
                raise UserError(f"{text}: leave it out, or give more num_beams, or decode.n samples")
            warn_once(text)
        resolved = replace(self, **filled | dict.fromkeys(unused & filled.keys()))
        resolved._warn_of_unused_drafts()
        return resolved

    def _warn_of_unused_drafts(self) -> None:
        searches = {name: getattr(self, name) for name in ("num_beams", "penalty_alpha")}
        for name, value in searches.items() if self.speculate is not Speculate.none else ():
            if value not in (None, NEUTRAL[name]):
                search = f"decode.{name}={value}, whose candidates compete"
                warn_once(f"decode.speculate={self.speculate.name} is not used with {search}")
        lossy = self.speculation.acceptance is Acceptance.top_p_window and self.speculate is not Speculate.none
        for name in ("top_k", "min_p") if lossy and self.temperature else ():
            if (value := getattr(self, name)) not in (None, NEUTRAL[name]):
                only = "is used for the first token alone with decode.speculation.acceptance=top_p_window"
                warn_once(f"decode.{name}={value} {only}: give decode.speculation.max_candidates for the others")
        for text in self.speculation.unused(self.speculate):
            warn_once(text)

    def replaced(self, values: dict[str, Any]) -> "DecodeConfig":
        """Return a copy with the values of a row or of a pipeline call.

        Raises UserError for unknown names and wrong types.
        """
        hints = get_type_hints(DecodeConfig)
        given = dict(values)
        for name, value in values.items():
            if name not in hints:
                raise UserError(f"decode.{shortened(name)} does not exist: {list_known_names(list(hints), name)}")
            if name in ("stop", "bad_words") and isinstance(value, str):
                given[name] = value = [value]
            if name == "logit_bias" and isinstance(value, dict):  # JSON keys are always strings
                given[name] = value = {_token_id(key): bias for key, bias in value.items()}
            if name == "speculate":
                given[name] = value = speculate_named(value)
            if name == "speculation":
                given[name] = value = speculation_of(self.speculation, value)
            if not _is_of(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name]) if not get_args(hints[name]) else hints[name]
                raise UserError(f"decode.{name}={shortened(repr(value))} is not of type {expected}")
        return replace(self, **given)


def _token_id(key: object) -> object:
    """Return a JSON key as a token id. Longer keys are invalid ids, and Python refuses to parse 4,300 digits."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= MAX_DIGITS else key


def _is_unicode(text: str) -> bool:
    """Whether a text has no unpaired surrogate, which tokenizers cannot encode."""
    return text == text.encode("utf-8", "ignore").decode()


# Bounded, because rows contain arbitrary values.
@functools.lru_cache(1024)
def warn_once(text: str) -> None:
    """Log a warning once per text, and not for each row."""
    log.warning(text)


def unused_settings(values: dict[str, Any]) -> set[str]:
    """Return the settings in `values` without effect, because all their users are neutral.

    The checkpoint may still set a user that is null.
    """
    return {
        name
        for name, users in USED_WITH.items()
        if values[name] not in (None, NEUTRAL[name]) and all(values[user] == NEUTRAL[user] for user in users)
    }


def _is_bias(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_LIST
        and all(type(token) is int and token >= 0 for token in value)
        and all(_is_of(bias, float) and -100 <= bias <= 100 for bias in value.values())
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int and id >= 0 for id in value)


def _is_biased_sequence(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return _are_ids(value[0]) and _is_of(value[1], float) and math.isfinite(value[1])


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(item, get_args(hint)[0]) for item in value)
    if hint is Any:  # checked elsewhere
        return True
    if get_args(hint):  # X | None
        return any(_is_of(value, option) for option in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:  # an integer is accepted if a float holds it exactly
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)
    return isinstance(value, hint)


NEUTRAL: dict[str, Any] = {
    "min_new_tokens": 0,
    "min_length": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "sequence_bias": [],
    "forced_bos_token_id": [],
    "forced_eos_token_id": [],
}
"""The neutral values of settings that may be null."""

USED_WITH = {
    "top_k": ("temperature", "penalty_alpha"),
    "top_p": ("temperature",),
    "min_p": ("temperature",),
    "length_penalty": ("num_beams",),
    "early_stopping": ("num_beams",),
    "num_return_sequences": ("num_beams",),
}
"""Settings that have no effect while all of the listed settings are neutral."""

MAX_SEQUENCES = 256  # per request: samples, beams or candidates
MAX_LIST = 1024  # entries of a list in a request
MAX_STOP = 16384  # characters of all stop strings: each is a state of an automaton
MAX_NGRAM = 1024  # tokens: longer sequences do not repeat by chance
MAX_DIGITS = 20  # of a token id

_DECODE_CHECKS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("max_new_tokens", "a number above 0, or null, or auto", lambda v: v == "auto" or (isinstance(v, int) and v > 0)),
    ("min_new_tokens", "a number from 0", lambda v: v >= 0),
    ("max_length", "a number above 0, or null", lambda v: v > 0),
    ("min_length", "a number from 0", lambda v: v >= 0),
    ("temperature", "a finite number from 0 (0 is greedy)", lambda v: 0 <= v < math.inf),
    ("top_k", "a number from 0 (0 and -1 keep all tokens)", lambda v: -1 <= v < 2**31),
    ("top_p", "a number above 0 and up to 1", lambda v: 0 < v <= 1),
    ("min_p", "a number from 0 to 1", lambda v: 0 <= v <= 1),
    ("n", f"a number from 1 to {MAX_SEQUENCES}", lambda v: 1 <= v <= MAX_SEQUENCES),
    ("num_beams", f"a number from 1 to {MAX_SEQUENCES}", lambda v: 1 <= v <= MAX_SEQUENCES),
    ("length_penalty", "a number from -10 to 10", lambda v: -10 <= v <= 10),
    ("early_stopping", "true, false or never", lambda v: v in (True, False, "never")),
    ("num_return_sequences", f"a number from 1 to {MAX_SEQUENCES}", lambda v: 1 <= v <= MAX_SEQUENCES),
    ("penalty_alpha", "a number from 0 to 1", lambda v: 0 <= v <= 1),
    ("repetition_penalty", "a number from 0.01 to 100", lambda v: 0.01 <= v <= 100),
    ("presence_penalty", "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("frequency_penalty", "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("no_repeat_ngram_size", f"a number from 0 (0: no limit) to {MAX_NGRAM}", lambda v: 0 <= v <= MAX_NGRAM),
    ("logit_bias", f"at most {MAX_LIST} numbers from -100 to 100 by token id: {{ID: BIAS}}", _is_bias),
    (
        "bad_words",
        f"at most {MAX_LIST} texts that are not empty, without half a surrogate pair",
        lambda v: len(v) <= MAX_LIST and all(w.strip() and _is_unicode(w) for w in v),
    ),
    (
        "bad_words_ids",
        f"at most {MAX_LIST} lists of token ids: [[ID, ...], ...]",
        lambda v: isinstance(v, list) and len(v) <= MAX_LIST and all(map(_are_ids, v)),
    ),
    ("suppress_tokens", f"at most {MAX_LIST} token ids", lambda v: v == [] or (_are_ids(v) and len(v) <= MAX_LIST)),
    (
        "sequence_bias",
        f"at most {MAX_LIST} pairs of token ids and a finite number: [[[ID, ...], BIAS], ...]",
        lambda v: isinstance(v, list) and len(v) <= MAX_LIST and all(map(_is_biased_sequence, v)),
    ),
    ("forced_bos_token_id", "a token id, [] or null", lambda v: v == [] or _are_ids([v])),
    (
        "forced_eos_token_id",
        "a token id, a list of them, or null",
        lambda v: v == [] or _are_ids(v if isinstance(v, list) else [v]),
    ),
    ("allowed_token_ids", "ids from 0", lambda v: all(id >= 0 for id in v)),
    (
        "stop",
        f"at most {MAX_LIST} texts that are not empty, {MAX_STOP} characters in all, without half a surrogate pair",
        lambda v: len(v) <= MAX_LIST and len("".join(v)) <= MAX_STOP and all(s and _is_unicode(s) for s in v),
    ),
    ("stop_token_ids", "ids from 0", lambda v: all(id >= 0 for id in v)),
    ("seed", "a number from 0 to 2**64 - 1, or null", lambda v: 0 <= v < 2**64),
    ("logprobs", "a number from 0 to 100, or null", lambda v: 0 <= v <= 100),
    ("prompt_logprobs", "a number from 0 to 100, or null", lambda v: 0 <= v <= 100),
)
