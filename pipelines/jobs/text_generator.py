"""A text generator makes the engine request of a row, and the row's result from the engine's output."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from conf.decoding import DecodeConfig
from pipelines.engine import Completion, Engine, Output
from pipelines.engine.faults import belongs_to_request
from pipelines.engine.request import Sink, TokenLogprobs
from pipelines.engine.request_factory import too_many_new_tokens
from pipelines.jobs.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Row, RowRequest


@dataclass(frozen=True)
class TextGenerator:
    """Makes the engine request of a row, and the row's result from the engine's output."""

    engine: Engine
    encoder: PromptEncoder
    prefix: str | None = None
    """Name of the prefix for rows that do not set a prefix."""
    adapter: str | None = None
    """Name of the adapter for rows that do not set an adapter."""

    def request(
        self,
        row: PromptRow,
        decode: DecodeConfig,
        seed: int | None = None,
        sink: Sink | None = None,
        prompt: EncodedPrompt | None = None,
    ) -> RowRequest:
        """Return the request of a row. The row's settings override `decode`.

        `seed`: as for `decode_of_row`. `prompt`: the encoded row, if it was encoded already. Raises UserError for a row
        that cannot be run.
        """
        prompt = prompt or self.encoder.encode(row)
        row_decode = decode_of_row(decode, row.decode, seed)
        prefix = self.prefix if row.prefix is None else row.prefix
        adapter = self.adapter if row.adapter is None else row.adapter
        token_ids, prediction = prompt.token_ids, prompt.prediction_token_ids
        return RowRequest(
            self.engine.request(row.index, token_ids, row_decode, sink, prediction, prefix, adapter), prompt
        )

    def check_new_tokens(self, decode: DecodeConfig, rows: Iterable[PromptRow]) -> None:
        """Raise UserError if `max_new_tokens` does not fit after the prompt of any row.

        The error names the number that fits after the longest prompt. Prompts that are themselves too long do not count.
        """
        context, max_new_tokens = self.engine.config.context, decode.max_new_tokens
        most = context.num_tokens
        if decode.max_length is not None or not isinstance(max_new_tokens, int) or max_new_tokens < most:
            return
        lengths = []
        for row in rows:
            try:
                lengths.append(len(self.encoder.encode(row).token_ids))
            except BaseException as error:  # an invalid row has no length
                if not belongs_to_request(error):
                    raise
        longest = max((length for length in lengths if length < most), default=None)
        raise too_many_new_tokens(max_new_tokens, longest, context)

    @staticmethod
    def result(row_request: RowRequest, output: Output) -> Row:
        """Return the prompt, its continuations, and the numbers of tokens.

        The first continuation is part of the row. `completions` has all continuations if there are several.
        """
        params, prompt = row_request.request.params, row_request.prompt
        completions = [_completion(completion) for completion in output.completions]
        first = dict(completions[0])
        logprobs = {"logprobs": first.pop("logprobs")} if "logprobs" in first else {}
        return {
            "prompt": prompt.text,
            **first,
            "num_prompt_tokens": output.num_prompt_tokens,
            **({"num_truncated_tokens": prompt.num_truncated} if prompt.num_truncated else {}),
            "num_generated_tokens": sum(len(completion.token_ids) for completion in output.completions),
            **({"seed": params.seed} if params.samples else {}),
            **logprobs,
            **({"completions": completions} if len(completions) > 1 else {}),
            **({} if output.prompt_logprobs is None else {"prompt_logprobs": _logprobs(output.prompt_logprobs)}),
        }


def decode_of_row(decode: DecodeConfig, settings: dict[str, Any], seed: int | None) -> DecodeConfig:
    """Return `decode` with a row's own settings. `seed`: used if neither of them sets a seed.

    Raises UserError as `replaced` does.
    """
    decode = decode.replaced(settings) if settings else decode
    return replace(decode, seed=seed) if decode.seed is None else decode


def whole_texts(result: Row) -> dict[str, list[str]]:
    """Return the prompt with each of its continuations, in the form of text_generation_result.txt."""
    prompt, completions = result["prompt"] or "", result.get("completions", [result])
    return {"text_generation_text": [prompt + (completion["text"] or "") for completion in completions]}


def _completion(completion: Completion) -> Row:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason.value,
        **({} if completion.score is None else {"score": completion.score}),
        **({} if completion.logprobs is None else {"logprobs": _logprobs(completion.logprobs)}),
    }


def _logprobs(steps: list[TokenLogprobs]) -> list[dict[int, dict[str, float]]]:
    return [
        {token: {"logprob": logprob, "rank": step.ranks[token]} for token, logprob in step.logprobs.items()}
        for step in steps
    ]
