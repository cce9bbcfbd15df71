"""The decode group: how tokens are chosen. It is a part of schema.py and imports only the standard library."""

import functools
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from conf.constraints import check_fields, is_set, neutral_values, one_of, option
from conf.errors import ErrorCode, UserError, check, list_known_names, shortened
from conf.guides import check_guide
from conf.quantization import Activations
from conf.speculation import BESIDE_AUTO, Acceptance, Speculate, SpeculationConfig, speculate_named, speculation_of
from conf.thinking import ThinkingConfig, thinking_of

log = logging.getLogger(__name__)

MAX_SEQUENCES = 256  # per request: samples, beams or candidates
MAX_LIST = 1024  # entries of a list in a request
MAX_STOP = 16384  # characters of all stop strings: each is a state of an automaton
MAX_NGRAM = 1024  # tokens: longer sequences do not repeat by chance
MAX_DIGITS = 20  # of a token id
MAX_BREAKERS, MAX_BREAKER = 64, 64  # each is compared with every token of the vocabulary


def _is_unicode(text: str) -> bool:
    """Whether a text has no unpaired surrogate, which tokenizers cannot encode."""
    return text == text.encode("utf-8", "ignore").decode()


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


def _are_texts(texts: list[str]) -> bool:
    return len(texts) <= MAX_LIST and all(text.strip() and _is_unicode(text) for text in texts)


def _are_stops(texts: list[str]) -> bool:
    short = len(texts) <= MAX_LIST and len("".join(texts)) <= MAX_STOP
    return short and all(text and _is_unicode(text) for text in texts)


def _is_list_of(is_entry: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and len(value) <= MAX_LIST and all(map(is_entry, value))


def _are_breakers(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > MAX_BREAKERS:
        return False
    return all(isinstance(text, str) and 1 <= len(text) <= MAX_BREAKER and _is_unicode(text) for text in value)


def _are_few_ids(value: Any) -> bool:
    return value == [] or (_are_ids(value) and len(value) <= MAX_LIST)


IDS = (lambda ids: all(id >= 0 for id in ids), "ids from 0")
_SEARCHES = {name: is_set(reason="which does not sample") for name in ("num_beams", "penalty_alpha")}
_COMPETING = {name: is_set(reason="whose candidates compete") for name in ("num_beams", "penalty_alpha")}


@dataclass
class DecodeConfig:
    """How tokens are chosen.

    Beam search if num_beams > 1, contrastive search if penalty_alpha > 0, sampling if temperature > 0, else greedy.
    Logits are processed in this order: biases, penalties, DRY, bans, forced tokens, guide, temperature, top_n_sigma,
    top_k, typical_p, top_p, min_p, XTC.
    Tokens are forced by a limit on reasoning, forced_bos_token_id and forced_eos_token_id.
    A null setting takes its value from the checkpoint's generation_config.json, else from NEUTRAL. A setting that
    another setting switches off (USED_WITH) causes a warning.
    """

    max_new_tokens: int | str | None = option(None, minimum=1, choices=("auto",))
    """Most new tokens; auto: as many as fit into the context after each prompt.

    If `max_length` is also set, the smaller limit applies; if neither is set, 256 or the rest of the context.
    """
    min_new_tokens: int | None = option(None, minimum=0, neutral=0)
    """Before this many new tokens, no stop token, eos or stop string ends a row."""
    max_length: int | None = option(None, minimum=1)
    """Most prompt + new tokens."""
    min_length: int | None = option(None, minimum=0, neutral=0)
    """Like min_new_tokens, for prompt + new tokens. min_new_tokens has priority."""
    temperature: float | None = option(
        None, minimum=0, below=math.inf, note="0 is greedy", not_with=_SEARCHES, neutral=0.0
    )
    """0 is greedy."""
    top_k: int | None = option(None, minimum=-1, maximum=2**31 - 1, note="0 and -1 keep all tokens", neutral=0)
    """Keep the k most likely tokens; 0 or -1: all. In contrastive search: the number of candidates."""
    top_p: float | None = option(None, above=0, maximum=1, neutral=1.0)
    """Keep the most likely tokens up to and including the token whose cumulative probability reaches top_p."""
    min_p: float | None = option(None, minimum=0, maximum=1, neutral=0.0)
    """Keep tokens whose probability is at least this share of the highest probability."""
    typical_p: float | None = option(None, above=0, maximum=1, neutral=1.0)
    """Keep the tokens whose surprise is closest to the expected one, until their probabilities sum to typical_p."""
    top_n_sigma: float | None = option(None, minimum=-1, below=math.inf, note="0 and -1 keep all tokens", neutral=0.0)
    """Keep tokens whose logit is at most this many standard deviations below the highest; 0 or -1: all."""
    xtc_probability: float | None = option(None, minimum=0, maximum=1, neutral=0.0)
    """Probability of each token to be drawn without the most likely choices (XTC)."""
    xtc_threshold: float | None = option(None, minimum=0, maximum=1, neutral=0.1)
    """XTC drops all tokens of at least this probability but the least likely; above 0.5: none."""
    dynatemp_range: float | None = option(None, minimum=0, below=math.inf, neutral=0.0)
    """The temperature follows the entropy, from temperature - dynatemp_range (not below 0) to temperature + it."""
    dynatemp_exponent: float | None = option(None, above=0, below=math.inf, neutral=1.0)
    """Power of the entropy's share of its maximum."""
    n: int = option(
        1,
        minimum=1,
        maximum=MAX_SEQUENCES,
        not_with={**_SEARCHES, "temperature": one_of(0, reason="which gives the same text every time")},
    )
    """Samples per prompt. The prompt is computed once."""
    num_beams: int | None = option(None, minimum=1, maximum=MAX_SEQUENCES, neutral=1)
    length_penalty: float | None = option(None, minimum=-10, maximum=10, neutral=1.0)
    """Beam scores are divided by length ** length_penalty: above 0 favours long continuations, below 0 short ones."""
    early_stopping: bool | str | None = option(None, choices=(True, False, "never"), neutral=False)
    """When beam search with num_beams finished beams ends.

    true: at once; false: when a better beam is unlikely; never: when a better beam is impossible.
    """
    num_return_sequences: int | None = option(None, minimum=1, maximum=MAX_SEQUENCES, neutral=1)
    """Number of beams returned, best first."""
    penalty_alpha: float | None = option(
        None,
        minimum=0,
        maximum=1,
        not_with={"num_beams": is_set(reason="which excludes contrastive search")},
        neutral=0.0,
    )
    """Contrastive search: weight of the similarity to earlier tokens against the probability (arXiv 2202.06417)."""
    repetition_penalty: float | None = option(None, minimum=0.01, maximum=100, neutral=1.0)
    """Divides positive logits of tokens in prompt or output, and multiplies negative logits (arXiv 1909.05858)."""
    presence_penalty: float = option(0.0, minimum=-2, maximum=2)
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = option(0.0, minimum=-2, maximum=2)
    """Subtracted from a token's logit once per occurrence in the output."""
    dry_multiplier: float | None = option(None, minimum=0, below=math.inf, neutral=0.0)
    """DRY: subtract dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a token that would repeat
    a sequence of n + 1 tokens. 0: off."""
    dry_base: float | None = option(None, minimum=1, below=math.inf, neutral=1.75)
    dry_allowed_length: int | None = option(None, minimum=0, maximum=2**31 - 1, neutral=2)
    """Repetitions of up to this many tokens have no penalty."""
    dry_penalty_last_n: int | None = option(None, minimum=-1, maximum=2**31 - 1, neutral=-1)
    """DRY searches this many last tokens; -1: all."""
    dry_sequence_breakers: Any = option(
        None,
        form=(
            _are_breakers,
            f"at most {MAX_BREAKERS} texts of 1 to {MAX_BREAKER} characters, without half a surrogate pair",
        ),
        neutral=["\n", ":", '"', "*"],
    )
    """Texts that no repetition of DRY reaches past."""
    no_repeat_ngram_size: int | None = option(None, minimum=0, maximum=MAX_NGRAM, note="0: no limit", neutral=0)
    """No sequence of this many tokens, at most 1024, occurs twice in prompt and output; 0: no limit."""
    logit_bias: Any = option(
        None, form=(_is_bias, f"at most {MAX_LIST} numbers from -100 to 100 by token id: {{ID: BIAS}}")
    )
    """Added to the logits of these token ids: {ID: BIAS, ...}."""
    bad_words: list[str] = option(
        factory=list,
        form=(_are_texts, f"at most {MAX_LIST} texts that are not empty, without half a surrogate pair"),
    )
    """Texts whose token sequences are never generated. Each text is encoded with and without a leading space."""
    bad_words_ids: Any = option(
        None, form=(_is_list_of(_are_ids), f"at most {MAX_LIST} lists of token ids: [[ID, ...], ...]"), neutral=[]
    )
    """Token id sequences that are never generated: [[ID, ...], ...]. A sequence of only the model's eos is ignored."""
    suppress_tokens: Any = option(None, form=(_are_few_ids, f"at most {MAX_LIST} token ids"), neutral=[])
    """Token ids that are never chosen."""
    sequence_bias: Any = option(
        None,
        form=(
            _is_list_of(_is_biased_sequence),
            f"at most {MAX_LIST} pairs of token ids and a finite number: [[[ID, ...], BIAS], ...]",
        ),
        neutral=[],
    )
    """Added to the logit of a sequence's last token after its other tokens: [[[ID, ...], BIAS], ...]."""
    forced_bos_token_id: Any = option(
        None, form=(lambda id: id == [] or _are_ids([id]), "a token id, [] or null"), neutral=[]
    )
    """The first token after a prompt of one token; []: any."""
    forced_eos_token_id: Any = option(
        None,
        form=(
            lambda ids: ids == [] or _are_ids(ids if isinstance(ids, list) else [ids]),
            "a token id, a list of them, or null",
        ),
        neutral=[],
    )
    """The token, or one of a list of tokens, that ends a text of the maximum length; []: any. Not with a guide."""
    allowed_token_ids: list[int] = option(factory=list, form=IDS)
    """The only tokens that may be chosen; empty: all."""
    guide: Any = option(None, not_with={**_COMPETING, "ignore_eos": is_set(reason="with which no text ends")})
    """The grammar that constrains the text. Not with beam or contrastive search.

    {json_schema: {...}}, {json_object: true}, {regex: TEXT}, {choice: [TEXT, ...]} or {lark: TEXT}.
    """
    thinking: ThinkingConfig = option(factory=ThinkingConfig, not_with=_COMPETING)
    """The limit on the tokens of reasoning. Not with beam or contrastive search."""
    stop: list[str] = option(
        factory=list,
        form=(
            _are_stops,
            f"at most {MAX_LIST} texts that are not empty, {MAX_STOP} characters in all, without half a surrogate pair",
        ),
    )
    """Texts that end a row, at most 16384 characters in total; the text before is kept.

    In a shell a line break is $'decode.stop=["\\n"]'.
    """
    stop_token_ids: list[int] = option(factory=list, form=IDS)
    """Tokens that end a row, in addition to the model's eos."""
    include_stop: bool = False
    """Keep the stop string, or the text of the token that ended the row."""
    ignore_eos: bool = False
    seed: int | None = option(None, minimum=0, maximum=2**64 - 1)
    """Seed of every row without its own seed; null: the run draws a seed. A row has the same tokens in any batch."""
    logprobs: int | None = option(None, minimum=0, maximum=100, not_with={"num_beams": is_set()})
    """Log probabilities of this many most likely tokens and of the chosen token, from the unmodified distribution."""
    prompt_logprobs: int | None = option(None, minimum=0, maximum=100)
    """Log probabilities, as for logprobs, of every prompt token except the first, which has none."""
    skip_special_tokens: bool = True
    prefix_cache: bool = True
    """Reuse the KV cache of earlier rows with the same prefix."""
    cache_salt: str | None = None
    """Share prefixes only with rows of the same salt, so that timing does not reveal the prompts of other users."""
    speculate: Speculate = option(
        Speculate.none, not_with={"quant.activations": one_of(Activations.auto, reason=BESIDE_AUTO)}
    )
    """The proposer of draft tokens, several of which a step verifies: none, ngram, model or mtp.

    With acceptance=exact it changes no token on a CPU.
    """
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        check_fields(self, "decode")
        if self.top_k == -1:
            self.top_k = 0
        if isinstance(self.max_new_tokens, int) and self.min_new_tokens is not None:
            allowed = f"at most decode.max_new_tokens={self.max_new_tokens}"
            fits = self.min_new_tokens <= self.max_new_tokens
            check(fits, "decode.min_new_tokens", self.min_new_tokens, allowed, ErrorCode.out_of_range)
        if (self.num_beams or 1) > 1:
            allowed = f"at most decode.num_beams={self.num_beams}"
            fits = (self.num_return_sequences or 1) <= (self.num_beams or 1)
            check(fits, "decode.num_return_sequences", self.num_return_sequences, allowed, ErrorCode.out_of_range)
        elif self.penalty_alpha and self.top_k is not None:
            allowed = f"2 to {MAX_SEQUENCES}, the number of candidates of contrastive search"
            check(2 <= self.top_k <= MAX_SEQUENCES, "decode.top_k", self.top_k, allowed, ErrorCode.out_of_range)
        if self.guide is not None:
            check_guide(self.guide)
            lossy = self.speculate is not Speculate.none and self.speculation.acceptance is not Acceptance.exact
            kind = self.speculation.acceptance.name
            allowed = f"null with decode.speculation.acceptance={kind}, whose drafts stay unseen by it"
            check(not lossy, "decode.guide", self.guide, allowed, ErrorCode.excludes)

    def warn_of_escapes(self) -> None:
        """Log a warning for texts with a backslash and a letter, which Hydra's grammar does not unescape."""
        closing = [self.thinking.closing or ""]
        for name, texts, typed in (("stop", self.stop, r'["\n"]'), ("thinking.closing", closing, r'"\n</think>"')):
            if escaped := next((text for text in texts if re.search(r"\\[nrt]", text)), None):
                remedy = f"in a shell a line break is $'decode.{name}={typed}'"
                log.warning("decode.%s has the characters %s, a backslash and a letter: %s", name, escaped, remedy)

    def check_unset(self, where: str, remedy: str) -> None:
        """Raises UserError for a setting that is neither the default nor NEUTRAL, because it would have no effect."""
        for name, default in vars(DecodeConfig()).items():
            if (value := getattr(self, name)) not in (default, NEUTRAL.get(name)):
                if is_dataclass(value):
                    name, value = next(
                        (f"{name}.{inner}", setting)
                        for inner, setting in vars(value).items()
                        if setting != getattr(default, inner)
                    )
                shown_value = value.name if isinstance(value, Enum) else value
                problem = f"decode.{name}={shown_value} is not used {where}: {remedy}"
                raise UserError(problem, ErrorCode.needs_other, f"decode.{name}")

    def resolved(self, defaults: dict[str, Any]) -> "DecodeConfig":
        """Return a copy in which null settings have the value in `defaults`, else in NEUTRAL.

        An unused null setting stays null. An unused setting with a value stays, because a row may use it. The result is
        a warning and not an error, so that a comparison of temperatures, including 0, can leave top_p set.
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
                remedy = "leave it out, or give more num_beams, or decode.n samples"
                raise UserError(f"{text}: {remedy}", ErrorCode.needs_other, f"decode.{name}")
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
        for name in ("top_k", "min_p", *FURTHER) if lossy and self.temperature else ():
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
        settings = dict(values)
        for name, value in values.items():
            if name not in hints:
                problem = f"decode.{shortened(name)} does not exist: {list_known_names(list(hints), name)}"
                raise UserError(problem, ErrorCode.unknown_name, f"decode.{shortened(name)}")
            if name in ("stop", "bad_words") and isinstance(value, str):
                settings[name] = value = [value]
            if name == "logit_bias" and isinstance(value, dict):  # JSON keys are always strings
                settings[name] = value = {_token_id(key): bias for key, bias in value.items()}
            if name == "speculate":
                settings[name] = value = speculate_named(value)
            if name == "speculation":
                settings[name] = value = speculation_of(self.speculation, value)
            if name == "thinking":
                settings[name] = value = thinking_of(self.thinking, value)
            if not _is_of(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name]) if not get_args(hints[name]) else hints[name]
                problem = f"decode.{name}={shortened(repr(value))} is not of type {expected}"
                raise UserError(problem, ErrorCode.wrong_type, f"decode.{name}")
        return replace(self, **settings)


def _token_id(key: object) -> object:
    """Return a JSON key as a token id. Longer keys are invalid ids, and Python refuses to parse 4,300 digits."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= MAX_DIGITS else key


# Bounded, because rows contain arbitrary values.
@functools.lru_cache(1024)
def warn_once(text: str) -> None:
    """Log a warning once per text, and not for each row."""
    log.warning(text)


def unused_settings(values: dict[str, Any]) -> set[str]:
    """Return the settings in `values` that have no effect, because all settings in their USED_WITH are neutral.

    A null setting does not count as neutral, because the checkpoint may still set it.
    """
    return {
        name
        for name, users in USED_WITH.items()
        if values[name] not in (None, NEUTRAL[name]) and all(values[user] == NEUTRAL[user] for user in users)
    }


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


FURTHER = ("typical_p", "top_n_sigma", "xtc_probability", "dynatemp_range")
OF_LLAMA_CPP = (
    *(*FURTHER, "xtc_threshold", "dynatemp_exponent", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
"""Settings with the names of llama.cpp's server, in requests too."""
NEUTRAL = neutral_values(DecodeConfig)
"""The neutral values of settings that may be null."""

USED_WITH = {
    "top_k": ("temperature", "penalty_alpha"),
    "top_p": ("temperature",),
    **dict.fromkeys(("min_p", "typical_p", "top_n_sigma", "xtc_probability", "dynatemp_range"), ("temperature",)),
    "xtc_threshold": ("xtc_probability",),
    "dynatemp_exponent": ("dynatemp_range",),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ("dry_multiplier",)
    ),
    "length_penalty": ("num_beams",),
    "early_stopping": ("num_beams",),
    "num_return_sequences": ("num_beams",),
}
"""Settings that have no effect while all of the listed settings are neutral."""
