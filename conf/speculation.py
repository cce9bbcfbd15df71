"""How tokens are drafted: a part of the decode group, and like it of the standard library alone."""

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from conf.errors import UserError, check, list_known_names, shortened


class Speculate(Enum):
    """Who guesses the next tokens, which a step then computes together and keeps as far as they are right."""

    none = "none"
    ngram = "ngram"  # what followed the last tokens before, in the row, in its prediction, or in earlier rows
    model = "model"  # a smaller model with the same tokenizer
    mtp = "mtp"  # the checkpoint's own layers for it


class DraftOrder(Enum):
    longest = "longest"  # the longest n-gram, its latest place
    paddle = "paddle"  # PaddleNLP's: the longest n-gram, its first place in the prompt, then in the output


class Acceptance(Enum):
    exact = "exact"  # a draft stays if it is the token that is chosen without drafts
    top_p_window = "top_p_window"  # PaddleNLP's: a draft may stay that is likely enough, which changes tokens


MAX_DRAFT_TOKENS = 15
BESIDE_AUTO = (
    "contradicts quant.activations=auto, with which bits depend on how many tokens are computed at once: "
    "leave one of them out"
)


@dataclass
class SpeculationConfig:
    """Settings of `decode.speculate`. With acceptance=exact none of them changes a token on a CPU."""

    num_tokens: int = 7
    """Most tokens drafted for a row in a step."""
    min_ngram: int = 2
    """Fewest last tokens by which ngram looks for a place to copy from."""
    max_ngram: int = 5
    """Most of them."""
    order: DraftOrder = DraftOrder.longest
    shared: bool = True
    """Let ngram copy from finished rows of the same cache_salt, too."""
    adaptive: bool = True
    """Draft no more than pays, by the measured time of steps and the share of drafts that stayed."""
    acceptance: Acceptance = Acceptance.exact
    verify_window: int = 2
    """top_p_window: a second-best draft stays if so many drafts after it are the most likely tokens."""
    max_candidates: int = 5
    """top_p_window: the most candidates for a draft."""
    model_path: str | None = None
    """speculate=model: the drafting model's folder, GGUF file or hub id."""

    def __post_init__(self) -> None:
        name = "decode.speculation"
        allowed = f"a number from 1 to {MAX_DRAFT_TOKENS}"
        check(1 <= self.num_tokens <= MAX_DRAFT_TOKENS, f"{name}.num_tokens", self.num_tokens, allowed)
        check(1 <= self.min_ngram <= 16, f"{name}.min_ngram", self.min_ngram, "a number from 1 to 16")
        allowed = f"a number from {name}.min_ngram={self.min_ngram} to 16"
        check(self.min_ngram <= self.max_ngram <= 16, f"{name}.max_ngram", self.max_ngram, allowed)
        check(1 <= self.verify_window <= 16, f"{name}.verify_window", self.verify_window, "a number from 1 to 16")
        check(1 <= self.max_candidates <= 64, f"{name}.max_candidates", self.max_candidates, "a number from 1 to 64")

    def changed(self) -> dict[str, Any]:
        """Return the settings that are not the defaults, choices by their names."""
        pairs = ((name, value) for name, value in vars(self).items() if value != getattr(SpeculationConfig(), name))
        return {name: value.name if isinstance(value, Enum) else value for name, value in pairs}

    def unused(self, speculate: Speculate) -> list[str]:
        """Return a line for each setting that is not the default, and that nothing reads."""
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
"""Settings that are read only where each of these others is one of these."""


def speculate_named(value: object) -> Speculate:
    """Return the member of a row's or a caller's `speculate`. Raises UserError for another value."""
    member: Speculate = _member(Speculate, "decode.speculate", value)
    return member


def speculation_of(known: SpeculationConfig, value: object) -> SpeculationConfig:
    """Return the settings with those of a row's or a caller's `speculation`. Raises UserError for unknown names and wrong values."""
    if isinstance(value, SpeculationConfig):
        return value
    if not isinstance(value, dict):
        raise UserError(f"decode.speculation={shortened(repr(value))} is not allowed: give {{NAME: VALUE, ...}}")
    kinds = {field.name: type(getattr(SpeculationConfig(), field.name)) for field in fields(SpeculationConfig)}
    given: dict[str, Any] = {}
    for name, setting in value.items():
        dotted = f"decode.speculation.{shortened(str(name))}"
        if name not in kinds:
            raise UserError(f"{dotted} does not exist: {list_known_names(list(kinds), str(name))}")
        if name in ("model_path", "acceptance"):
            raise UserError(f"{dotted} is not for a row: give it to the run")
        if issubclass(kinds[name], Enum):
            setting = _member(kinds[name], dotted, setting)
        if type(setting) is not kinds[name]:
            raise UserError(f"{dotted}={shortened(repr(setting))} is not of type {kinds[name].__name__}")
        given[name] = setting
    return replace(known, **given)


def _member(options: type[Enum], dotted: str, value: object) -> Any:
    if isinstance(value, options):
        return value
    if value not in (names := [member.name for member in options]):
        raise UserError(f"{dotted}={shortened(repr(value))} does not exist: there are {', '.join(names)}")
    return options[str(value)]
