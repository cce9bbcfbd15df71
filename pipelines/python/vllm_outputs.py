"""The results of `LLM`, with the names of vLLM."""

from dataclasses import dataclass

from models.tokenizers import Tokenizer
from pipelines.engine import Output
from pipelines.engine.request import TokenLogprobs
from pipelines.jobs.rows import RowRequest


@dataclass(frozen=True)
class Logprob:
    """A token's natural log probability, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the chosen tokens; None without `logprobs`."""
    logprobs: Logprobs | None
    finish_reason: str
    stop_reason: str | int | None
    """The stop string or the id of the stop token; None for the model's own eos."""
    lora_request: str | None = None

    def finished(self) -> bool:
        return True


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None
    """The model's input as text; None if token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """None for the first token, which has no prediction."""
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    lora_request: str | None = None
    metrics: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    """This field and the three fields before it are always None: the engine does not have these features."""


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt's vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


def request_output(
    row_request: RowRequest,
    output: Output,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    adapter: str | None,
) -> RequestOutput:
    """Return vLLM's form of a finished request. `tokenizer`: None: the texts are empty. `adapter`: the request's."""
    completions = []
    for index, completion in enumerate(output.completions):
        steps = completion.logprobs
        total = (
            None if steps is None else sum(s.logprobs[id] for s, id in zip(steps, completion.token_ids, strict=True))
        )
        reason = None if completion.stop_reason in eos_token_ids else completion.stop_reason
        logprobs = None if steps is None else [_named(step, tokenizer) for step in steps]
        text = "" if tokenizer is None else completion.text or ""
        completions.append(
            CompletionOutput(
                index,
                text,
                completion.token_ids,
                total,
                logprobs,
                completion.finish_reason.value,
                reason,
                lora_request=adapter,
            )
        )
    prompt_logprobs = output.prompt_logprobs
    named = None if prompt_logprobs is None else [None, *(_named(step, tokenizer) for step in prompt_logprobs)]
    return RequestOutput(
        str(output.request_id),
        row_request.prompt.text,
        row_request.request.prompt_token_ids,
        named,
        completions,
        output.num_cached_tokens,
        lora_request=adapter,
    )


def _named(step: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    return {
        id: Logprob(value, step.ranks[id], None if tokenizer is None else tokenizer.decode([id], False))
        for id, value in step.logprobs.items()
    }
