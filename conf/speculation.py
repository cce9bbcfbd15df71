"""Settings of speculative decoding: a part of the decode group. Imports only the standard library."""

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from conf.constraints import check_fields, option
from conf.errors import ErrorCode, UserError, check, list_known_names, shortened


class Speculate(Enum):
    """The proposer of draft tokens. A step verifies several draft tokens together and keeps the correct ones."""

    none = "none"
    ngram = "ngram"  # continuations of the last tokens earlier in the prompt, in the output, or in earlier rows
    model = "model"  # a smaller model with the same tokenizer
    mtp = "mtp"  # multi-token prediction layers of the checkpoint


class DraftOrder(Enum):
    longest = "longest"  # the longest n-gram, at its latest position
    paddle = "paddle"  # PaddleNLP's: the longest n-gram, at its first position in the prompt, else in the output


class Acceptance(Enum):
    exact = "exact"  # accept a draft token if it equals the token chosen without drafts
    top_p_window = "top_p_window"  # PaddleNLP's: also accept likely draft tokens, which changes the output


MAX_DRAFT_TOKENS = 15
BESIDE_AUTO = "with which bits depend on how many tokens are computed at once"
"""Why no drafts are verified with quant.activations=auto."""


@dataclass
class SpeculationConfig:
    """Settings of `decode.speculate`. With acceptance=exact no setting changes a token on a CPU."""

    num_tokens: int = option(7, minimum=1, maximum=MAX_DRAFT_TOKENS)
    """Most draft tokens of a row in a step."""
    min_ngram: int = option(2, minimum=1, maximum=16)
    """Fewest last tokens that the n-gram proposer matches."""
    max_ngram: int = option(5, minimum=1, maximum=16)
    """Most last tokens that the n-gram proposer matches."""
    order: DraftOrder = DraftOrder.longest
    shared: bool = True
    """The n-gram proposer also copies from finished rows of the same cache_salt."""
    adaptive: bool = True
    """Limit drafts to the number that pays off, by measured step times and acceptance rates."""
    acceptance: Acceptance = Acceptance.exact
    verify_window: int = option(2, minimum=1, maximum=16)
    """top_p_window: accept a second-best draft token if this many draft tokens after it are the most likely tokens."""
    max_candidates: int = option(5, minimum=1, maximum=64)
    """top_p_window: most candidates for a draft token."""
    model_path: str | None = None
    """speculate=model: folder, GGUF file or hub id (`org/name@REVISION`) of the draft model."""

    def __post_init__(self) -> None:
        check_fields(self, "decode.speculation")
        allowed = f"a number from decode.speculation.min_ngram={self.min_ngram} to 16"
        fits = self.min_ngram <= self.max_ngram
        check(fits, "decode.speculation.max_ngram", self.max_ngram, allowed, ErrorCode.out_of_range)

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, with enums by name."""
        pairs = ((name, value) for name, value in vars(self).items() if value != getattr(SpeculationConfig(), name))
        return {name: value.name if isinstance(value, Enum) else value for name, value in pairs}

    def unused(self, speculate: Speculate) -> list[str]:
        """Return a line per setting that differs from the default and has no effect."""
        by = {"speculate": speculate, "speculation.order": self.order, "speculation.acceptance": self.acceptance}
        lines = []
        for name, value in self.changed().items():
            off = [(by[user], user) for user, readers in _READ_WITH.get(name, {}).items() if by[user] not in readers]
            if speculate is Speculate.none:
                off = [(speculate, "speculate")]
            if off:
                lines.append(f"decode.speculation.{name}={value} is not used with decode.{off[0][1]}={off[0][0].name}")
        return lines


_NGRAM = (Speculate.ngram,)
_READ_WITH: dict[str, dict[str, tuple[Enum, ...]]] = {
    "min_ngram": {"speculate": _NGRAM, "speculation.order": (DraftOrder.longest,)},
    "max_ngram": {"speculate": _NGRAM},
    "order": {"speculate": _NGRAM},
    "shared": {
        "speculate": _NGRAM,
        "speculation.order": (DraftOrder.longest,),
        "speculation.acceptance": (Acceptance.exact,),
    },
    "verify_window": {"speculation.acceptance": (Acceptance.top_p_window,)},
    "max_candidates": {"speculation.acceptance": (Acceptance.top_p_window,)},
    "model_path": {"speculate": (Speculate.model,)},
}
"""Settings that are read only while each listed setting has one of these values."""


def speculate_named(value: object) -> Speculate:
    """Return the member for the `speculate` of a row or a caller. Raises UserError for another value."""
    member: Speculate = _member(Speculate, "decode.speculate", value)
    return member


def speculation_of(known: SpeculationConfig, value: object) -> SpeculationConfig:
    """Return the settings updated by the `speculation` of a row or a caller.

    Raises UserError for unknown names and wrong values.
    """
    if isinstance(value, SpeculationConfig):
        return value
    if not isinstance(value, dict):
        wrong = f"decode.speculation={shortened(repr(value))} is not allowed: give {{NAME: VALUE, ...}}"
        raise UserError(wrong, ErrorCode.wrong_type, "decode.speculation")
    kinds = {field.name: type(getattr(SpeculationConfig(), field.name)) for field in fields(SpeculationConfig)}
    settings: dict[str, Any] = {}
    for name, setting in value.items():
        dotted = f"decode.speculation.{shortened(str(name))}"
        if name not in kinds:
            problem = f"{dotted} does not exist: {list_known_names(list(kinds), str(name))}"
            raise UserError(problem, ErrorCode.unknown_name, dotted)
        if name in ("model_path", "acceptance"):
            raise UserError(f"{dotted} is not for a row: give it to the run", key=dotted)
        if issubclass(kinds[name], Enum):
            setting = _member(kinds[name], dotted, setting)
        if type(setting) is not kinds[name]:
            problem = f"{dotted}={shortened(repr(setting))} is not of type {kinds[name].__name__}"
            raise UserError(problem, ErrorCode.wrong_type, dotted)
        settings[name] = setting
    return replace(known, **settings)


def _member(options: type[Enum], dotted: str, value: object) -> Any:
    if isinstance(value, options):
        return value
    if value not in (names := [member.name for member in options]):
        problem = f"{dotted}={shortened(repr(value))} does not exist: there are {', '.join(names)}"
        raise UserError(problem, ErrorCode.unknown_value, dotted)
    return options[str(value)]
