"""Beam search as in transformers: length penalty, early stopping, one list of finished beams per prompt.

Dimensions: B = num_beams, S running beams, C candidates per step, V vocabulary entries. Scores are float32 sums of log
probabilities, added in transformers' order, so that ties and rounding are equal to transformers'.
"""

import torch
from torch import Tensor

from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.logits import process_logits
from pipelines.engine.request import Completion, Continuation, FinishReason, SamplingParams, Sequence, SequenceGroup
from pipelines.engine.stopping import completion_of, extend_text

EXCLUDED = -1e9  # transformers' penalty on the score of an excluded beam


class BeamSearch:
    """The beams of one request: the running beams with their scores, and the best finished beams."""

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer | None) -> None:
        self._params = params
        # So many that num_beams candidates continue even if every beam's end tokens are all among the candidates.
        self._num_candidates = max(2, 1 + len(params.end_token_ids)) * params.num_beams
        self._detokenizer = detokenizer if params.stop else None  # only needed to find stop strings
        self._begin()

    def _begin(self) -> None:
        self._scores = torch.zeros(1)  # [S]
        self._detokenizers = [self._detokenizer]  # of the running beams
        self._finished: list[list[int] | None] = [None] * self._params.num_beams  # output token ids, best first
        self._finished_scores = torch.full((self._params.num_beams,), EXCLUDED)  # [B]
        self._can_improve = True

    def observe(self, hidden: Tensor) -> None:
        """Do nothing: beam scores do not depend on hidden states."""

    def restart(self, group: SequenceGroup) -> Sequence:
        self._begin()
        return group.origin.fork()

    def recompute(self, group: SequenceGroup) -> None:
        """Do nothing: the scores of chosen tokens remain valid."""

    def advance(self, group: SequenceGroup, logits: Tensor) -> list[Continuation]:
        sequences, num_beams = group.sequences, self._params.num_beams
        logprobs = process_logits(logits.float().log_softmax(-1), sequences)
        total = (logprobs + self._scores.to(logprobs.device)[:, None]).flatten()  # [S * V]
        scores, index = (t.cpu() for t in total.topk(min(self._num_candidates, len(total))))  # [C]
        candidates = [(i // logits.shape[1], i % logits.shape[1]) for i in index.tolist()]
        length = sequences[0].num_output_tokens + 1
        detokenizers = [d.copy() if (d := self._detokenizers[parent]) else None for parent, _ in candidates]
        ends = torch.tensor(
            [self._ends(token, length, d) for (_, token), d in zip(candidates, detokenizers, strict=True)]
        )
        running, chosen = (scores + ends * EXCLUDED).topk(min(num_beams, len(candidates)))
        outputs = [[*sequences[parent].output_token_ids, token] for parent, token in candidates[:num_beams]]
        self._finish(outputs, scores[:num_beams], ends[:num_beams], length)
        self._scores = running
        self._detokenizers = [detokenizers[i] for i in chosen.tolist()]
        if self._is_finished(length, bool(ends.all())):
            group.completions = dict(enumerate(self._completions(group.origin)))
            return []
        return [Continuation(sequences[candidates[i][0]], candidates[i][1]) for i in chosen.tolist()]

    def _ends(self, token: int, length: int, detokenizer: Detokenizer | None) -> bool:
        params = self._params
        may_stop = length >= params.min_new_tokens
        if detokenizer and token not in params.stop_token_ids and detokenizer.add(token, may_stop)[1] is not None:
            return True
        return length == params.max_new_tokens or (may_stop and token in params.end_token_ids)

    def _finish(self, outputs: list[list[int]], scores: Tensor, ends: Tensor, length: int) -> None:
        """Merge the candidates that end in this step into the finished beams, and keep the best num_beams."""
        full = all(self._finished) and self._params.early_stopping is True
        scores = scores / length**self._params.length_penalty
        scores += (full + (not self._can_improve) + ~ends) * EXCLUDED
        merged = torch.cat([self._finished_scores, scores])
        beams = [
            *self._finished,
            *(output if end else None for output, end in zip(outputs, ends.tolist(), strict=True)),
        ]
        self._finished_scores, best = merged.topk(self._params.num_beams)
        self._finished = [beams[i] for i in best.tolist()]

    def _is_finished(self, length: int, all_end: bool) -> bool:
        params = self._params
        longest = params.early_stopping == "never" and params.length_penalty > 0
        possible = self._scores[0] / (params.max_new_tokens if longest else length) ** params.length_penalty
        worst = torch.where(
            torch.tensor([f is not None for f in self._finished]), self._finished_scores.min(), EXCLUDED
        )
        self._can_improve = self._can_improve and bool((possible > worst).any())
        hopeless = bool(self._scores[0] == -torch.inf)  # every token is banned
        return hopeless or not self._can_improve or all_end or (all(self._finished) and params.early_stopping is True)

    def _completions(self, origin: Sequence) -> list[Completion]:
        completions: list[Completion] = []
        for output, score in zip(self._finished, self._finished_scores.tolist(), strict=True):
            if output is not None and len(completions) < self._params.num_return_sequences:
                sequence, reason = origin.fork(), None
                for token in output:
                    sequence.token_ids.append(token)
                    reason = extend_text(sequence)
                assert reason is not None
                completions.append(completion_of(sequence, reason, score))
        return completions or [completion_of(origin.fork(), FinishReason.no_token)]
