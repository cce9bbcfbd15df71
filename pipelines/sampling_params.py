"""vLLM's SamplingParams, and what they are as our settings."""

from dataclasses import dataclass, fields
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError, there_are

DEFAULT_MAX_TOKENS = 16
GUIDES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "json_object"}
"""vLLM's names of structured outputs, and ours."""
ONLY = {"detokenize": True, "spaces_between_special_tokens": True}
"""vLLM's fields of which this engine does one value: that one is taken."""


@dataclass(init=False)
class SamplingParams:
    """How tokens are chosen, by vLLM's names and defaults. Raises UserError for a name that is not here."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """None: as many as fit into the context."""
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    """One of json (a schema), regex, choice, grammar (Lark) and json_object."""

    def __init__(self, **settings: Any) -> None:
        names = [each.name for each in fields(self)]
        for each in fields(self):
            setattr(self, each.name, settings.pop(each.name, each.default))
        for name, value in settings.items():
            if name not in ONLY:
                raise UserError(f"SamplingParams has no {name} here: {there_are(names, name)}")
            if value != ONLY[name]:
                raise UserError(f"SamplingParams: {name}={value!r} is not taken: leave it out")

    def decode(self) -> DecodeConfig:
        """Return the same as our settings, none of which is left to the checkpoint. Raises UserError for values that are not allowed."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        return DecodeConfig(
            max_new_tokens="auto" if self.max_tokens is None else self.max_tokens,
            min_new_tokens=self.min_tokens,
            min_length=0,
            bad_words_ids=[],
            suppress_tokens=[],
            sequence_bias=[],
            forced_bos_token_id=[],
            forced_eos_token_id=[],
            n=self.n,
            num_beams=1,
            penalty_alpha=0.0,
            no_repeat_ngram_size=0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            **self._sampling(),
            seed=self.seed,
            stop=stop,
            stop_token_ids=list(self.stop_token_ids or []),
            bad_words=list(self.bad_words or []),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            logit_bias=self.logit_bias,
            allowed_token_ids=list(self.allowed_token_ids or []),
            guide=self._guide(),
        )

    def _sampling(self) -> dict[str, Any]:
        if self.temperature == 0:  # greedy, as vLLM resets the others
            return {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        top_k = max(0, self.top_k)
        return {"temperature": self.temperature, "top_k": top_k, "top_p": self.top_p, "min_p": self.min_p}

    def _guide(self) -> dict[str, Any] | None:
        outputs = self.structured_outputs
        if outputs is None:
            return None
        if not isinstance(outputs, dict) or len(outputs) != 1 or next(iter(outputs)) not in GUIDES:
            raise UserError(
                f"structured_outputs={outputs!r} is not allowed: give a dictionary with one of {', '.join(GUIDES)}"
            )
        ((name, value),) = outputs.items()
        return {GUIDES[name]: value}
