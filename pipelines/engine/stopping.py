"""Decides when a sequence ends, and builds its completion."""

from typing import NamedTuple

from pipelines.engine.request import Completion, FinishReason, Sequence, SequenceGroup, Sink, TokenLogprobs


def extend_text(sequence: Sequence) -> FinishReason | None:
    """Detokenise the sequence's last token into `unsent`. Returns why the sequence ends here, if it does."""
    params, token = sequence.params, sequence.token_ids[-1]
    may_stop = sequence.num_output_tokens >= params.min_new_tokens
    piece, stop = "", None
    if sequence.guide:
        sequence.guide.accept(token)
    if sequence.thinking:
        sequence.thinking = sequence.thinking.after(token)
    # The text of a stop token or stop string is omitted unless the request includes it.
    if sequence.detokenizer and (params.include_stop or token not in params.stop_token_ids):
        piece, stop = sequence.detokenizer.add(token, may_stop)
    reason = None
    if stop is not None or (may_stop and token in params.end_token_ids):
        reason = FinishReason.stop
        sequence.stop_reason = token if stop is None else stop
    elif sequence.guide and sequence.guide.is_complete:  # also before min_new_tokens, because nothing can follow
        reason = FinishReason.stop
    elif sequence.num_output_tokens == params.max_new_tokens:
        reason = FinishReason.length
    if reason and sequence.detokenizer and stop is None:
        piece += sequence.detokenizer.flush()
    if piece:
        sequence.texts.append(piece)
    sequence.unsent = piece
    return reason


def append_token(sequence: Sequence, token: int | None, logprobs: list[TokenLogprobs]) -> FinishReason | None:
    """Append the token (None: all were banned) and call `extend_text`. Returns why the sequence ends, if it does."""
    if token is None:
        return FinishReason.no_token
    sequence.token_ids.append(token)
    sequence.logprobs += logprobs
    return extend_text(sequence)


class Piece(NamedTuple):
    """A new token in the form that a sink receives: the arguments of `Sink`."""

    sample: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]


def take_piece(group: SequenceGroup, sequence: Sequence) -> list[tuple[Sink, Piece]]:
    """Return the last token and its text with the request's sink, if the sink has not received them."""
    text, sequence.unsent = sequence.unsent, None
    sink = group.request.sink
    # Samples that restart after a preemption generate the same tokens again.
    if text is None or sink is None or sequence.num_output_tokens <= group.num_sent[sequence.sample]:
        return []
    group.num_sent[sequence.sample] = sequence.num_output_tokens
    return [(sink, Piece(sequence.sample, sequence.token_ids[-1:], text, sequence.logprobs[-1:]))]


def completion_of(sequence: Sequence, reason: FinishReason, score: float | None = None) -> Completion:
    return Completion(
        token_ids=sequence.output_token_ids,
        text="".join(sequence.texts) if sequence.detokenizer else None,
        finish_reason=reason,
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        score=score,
        stop_reason=sequence.stop_reason,
    )
