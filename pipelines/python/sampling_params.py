"""vLLM's SamplingParams, and their conversion to our decode settings."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError, list_known_names

DEFAULT_MAX_TOKENS = 16
GUIDES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "json_object"}
"""vLLM's names of structured outputs, and our guide names."""
OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "give n: the best of several is not chosen"),
    "use_beam_search": ((False,), "pipeline('text_generation') has num_beams"),
    "length_penalty": ((1.0,), "it is of beams, which pipeline('text_generation') has"),
    "early_stopping": ((False,), "it is of beams, which pipeline('text_generation') has"),
    "spaces_between_special_tokens": ((True,), "the tokenizer's own rules say where spaces are"),
    "logits_processors": (
        (None, []),
        "no code of the caller runs in a step: see logit_bias, bad_words and allowed_token_ids",
    ),
    "extra_args": ((None, {}), "there are no plugins that read it"),
    "vllm_xargs": ((None, {}), "there are no plugins that read it"),
    "flat_logprobs": ((False,), "log probabilities are dictionaries"),
    "logprob_token_ids": ((None, []), "give logprobs, for the most likely tokens"),
    "prompt_logprob_token_ids": ((None,), "give prompt_logprobs, for the most likely tokens"),
    "prompt_logprob_start": ((None, 0), "give prompt_logprobs, which are of the whole prompt"),
    "repetition_detection": ((None,), "give repetition_penalty or max_tokens"),
    "routed_experts_prompt_start": ((0,), "outputs have no experts"),
    "trace_decode_token_ids": ((None, []), "tokens are the model's own"),
    "watermarking": ((None, False), "texts have no watermark"),
}
"""vLLM's other fields, up to version 0.33.

For each: the accepted values, which equal this engine's behaviour, and why all other values are refused.
"""
OF_ITSELF = ("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length")
"""Fields that vLLM's own LLM overwrites, or that do not change the output."""


@dataclass
class StructuredOutputsParams:
    """vLLM's class of structured outputs: one constraint of json, regex, choice, grammar (Lark) and json_object."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __init__(self, **settings: Any) -> None:
        """Raises UserError for a field of vLLM that is not supported."""
        names = [field.name for field in fields(self)]
        for name in names:
            setattr(self, name, settings.pop(name, None))
        for name, value in settings.items():
            if value:
                raise UserError(f"structured_outputs has no {name} here: {list_known_names(names, name)}")


@dataclass(init=False)
class SamplingParams:
    """How tokens are chosen, with vLLM's names and defaults. Raises UserError for an unsupported name."""

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
    detokenize: bool = True
    """False: texts are empty."""
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens from the end of a prompt; -1: as many as leave room for max_tokens."""
    skip_reading_prefix_cache: bool | None = None
    """True: compute the whole prompt."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    """Most tokens between <think> and </think>; None or -1: no limit."""

    def __init__(self, *unnamed: Any, **settings: Any) -> None:
        """`guided_decoding` is the name of structured_outputs in earlier versions."""
        names = [field.name for field in fields(self)]
        if unnamed:
            raise UserError("SamplingParams takes settings by their names alone, whose order depends on the version")
        if (guided := settings.pop("guided_decoding", None)) is not None:
            settings.setdefault("structured_outputs", guided)
        for field in fields(self):
            setattr(self, field.name, settings.pop(field.name, field.default))
        for name, value in settings.items():
            if name in OF_ITSELF:
                continue
            if name not in OTHERS:
                raise UserError(f"SamplingParams has no {name} here: {list_known_names(names, name)}")
            neutral_values, reason = OTHERS[name]
            if not any(value == neutral_value for neutral_value in neutral_values) and not (
                name == "best_of" and value == self.n
            ):
                raise UserError(f"SamplingParams: {name}={value!r} is not taken: leave it out; {reason}")
        self._check()

    def _check(self) -> None:
        """Raise UserError for settings that contradict each other, and for settings that DecodeConfig does not
        check.
        """
        if self.stop and not self.detokenize:
            raise UserError(
                "SamplingParams: stop is found in texts, which detokenize=False leaves out: give stop_token_ids"
            )
        most = self.truncate_prompt_tokens
        if not isinstance(self.detokenize, bool):
            raise UserError(f"detokenize={self.detokenize!r} is not allowed: give True or False")
        if most is not None and (type(most) is not int or (most < 1 and most != -1)):
            raise UserError(f"truncate_prompt_tokens={most!r} is not allowed: give a number above 0, or -1")

    def truncated(self, token_ids: list[int], context_length: int) -> list[int]:
        """Return the last `truncate_prompt_tokens` ids of a prompt."""
        most = self.truncate_prompt_tokens
        if most == -1:
            most = max(1, context_length - (self.max_tokens or 1))
        return token_ids if most is None else token_ids[-most:]

    def decode(self) -> DecodeConfig:
        """Return the same settings as a DecodeConfig that takes no default from the checkpoint.

        Raises UserError for invalid values.
        """
        values = dict(
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
            stop=_listed(self.stop),
            stop_token_ids=_listed(self.stop_token_ids),
            bad_words=_listed(self.bad_words),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            logit_bias=self.logit_bias,
            allowed_token_ids=_listed(self.allowed_token_ids),
            guide=self._guide(),
            thinking={"max_tokens": None if self.thinking_token_budget == -1 else self.thinking_token_budget},
            prefix_cache=not self.skip_reading_prefix_cache,
        )
        return DecodeConfig().replaced(values)

    def _sampling(self) -> dict[str, Any]:
        if self.temperature == 0:  # greedy: vLLM also resets top_k, top_p and min_p
            return {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        top_k = 0 if self.top_k == -1 else self.top_k
        return {"temperature": self.temperature, "top_k": top_k, "top_p": self.top_p, "min_p": self.min_p}

    def _guide(self) -> dict[str, Any] | None:
        outputs = self.structured_outputs
        if outputs is None:
            return None
        if isinstance(outputs, StructuredOutputsParams):
            outputs = {name: value for name, value in asdict(outputs).items() if value is not None}
        if not isinstance(outputs, dict) or len(outputs) != 1 or next(iter(outputs)) not in GUIDES:
            raise UserError(
                f"structured_outputs={outputs!r} is not allowed: give a dictionary with one of {', '.join(GUIDES)}"
            )
        ((name, value),) = outputs.items()
        return {GUIDES[name]: value}


def _listed(values: Any) -> Any:
    return list(values or ()) if isinstance(values, tuple | set | frozenset | None) else values
