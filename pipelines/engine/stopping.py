"""When a sequence ends, and what is left of it then."""

from pipelines.engine.request import Completion, FinishReason, Sequence


def extend_text(sequence: Sequence) -> FinishReason | None:
    """Turn the sequence's new last token into text, which is `unsent` then, and say whether the sequence ends here."""
    params, token = sequence.request.params, sequence.token_ids[-1]
    may_stop = sequence.num_output_tokens >= params.min_new_tokens
    piece, stopped = "", False
    # The text of a stop token, like that of a stop string, is left out unless it is asked for.
    if sequence.detokenizer and (params.include_stop or token not in params.stop_token_ids):
        piece, stopped = sequence.detokenizer.add(token, may_stop)
    reason = None
    if stopped or (may_stop and token in params.end_token_ids):
        reason = FinishReason.stop
    elif sequence.num_output_tokens == params.max_new_tokens:
        reason = FinishReason.length
    if reason and sequence.detokenizer and not stopped:
        piece += sequence.detokenizer.flush()
    sequence.unsent += piece
    return reason


def send_text(sequence: Sequence) -> None:
    """Hand the text that is `unsent` to the request's sink. Raises whatever the sink raises."""
    piece, sequence.unsent = sequence.unsent, ""
    if piece and sequence.request.sink:
        sequence.request.sink(piece)


def completion_of(sequence: Sequence, reason: FinishReason, score: float | None = None) -> Completion:
    return Completion(
        token_ids=sequence.output_token_ids,
        text=sequence.detokenizer.text if sequence.detokenizer else None,
        finish_reason=reason,
        logprobs=sequence.logprobs if sequence.request.params.logprobs is not None else None,
        score=score,
    )
