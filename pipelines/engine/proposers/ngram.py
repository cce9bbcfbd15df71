"""N-gram drafts: copies of the tokens that followed an earlier occurrence of the last tokens.

The earlier occurrence is in the row's prediction, in the row itself or in a finished row.

The method is prompt lookup (Saxena 2023) and llama.cpp's lookup decoding. The cost per token does not depend on the
text's length.
"""

from weakref import WeakKeyDictionary

from conf.speculation import Acceptance, DraftOrder, SpeculationConfig
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.shared_table import SharedTables
from pipelines.engine.request import Sequence


class NgramPositions:
    """The latest position after each n-gram of a growing list of tokens, for n from `fewest` to `most`."""

    def __init__(self, fewest: int, most: int) -> None:
        self._sizes = range(most, fewest - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}
        self._num_known = 0

    def update(self, token_ids: list[int]) -> None:
        """Add the tokens since the last call. The n-grams at the very end have no follower yet and are not added."""
        for end in range(max(1, self._num_known), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._places[tuple(token_ids[end - size : end])] = end
        self._num_known = len(token_ids)

    def find(self, last: list[int]) -> int | None:
        """Return the latest position after the longest n-gram that `last` ends with."""
        for size in self._sizes:
            if size <= len(last) and (place := self._places.get(tuple(last[-size:]))) is not None:
                return place
        return None


def copy_from(token_ids: list[int], place: int, most: int) -> list[int]:
    """Copy `most` tokens from a position; at the end of the text, continue with the copied text, as if it repeated."""
    draft = token_ids[place : place + most]
    while len(draft) < most:
        draft += draft[: most - len(draft)]
    return draft


class NgramProposer(Proposer):
    """Searches the row's prediction first, then its prompt and output, then finished rows with the same cache_salt."""

    def __init__(self) -> None:
        self._in_text: WeakKeyDictionary[Sequence, NgramPositions] = WeakKeyDictionary()
        self._in_prediction: WeakKeyDictionary[Sequence, NgramPositions] = WeakKeyDictionary()
        self._shared = SharedTables()

    def propose(self, limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft(sequence, most) for sequence, most in limits]

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        settings = sequence.params.speculation
        if settings.order is DraftOrder.paddle:
            return paddle_draft(sequence, settings.max_ngram, most)
        token_ids, last = sequence.token_ids, sequence.token_ids[-settings.max_ngram :]
        prediction = sequence.request.prediction_token_ids
        if prediction:
            draft = self._from_prediction(sequence, prediction, last, most)
            if draft:
                return draft
        places = self._places(self._in_text, sequence, settings)
        places.update(token_ids)
        place = places.find(last)
        if place is not None:
            return copy_from(token_ids, place, most)
        return self._shared.propose(sequence.params.cache_salt, last, most) if _shares(settings) else []

    def learn(self, sequence: Sequence) -> None:
        settings = sequence.params.speculation
        if _shares(settings):
            self._shared.learn(sequence.params.cache_salt, sequence.token_ids)

    def _from_prediction(self, sequence: Sequence, prediction: list[int], last: list[int], most: int) -> list[int]:
        """Return the continuation in the prediction.

        If the prediction starts with the output, it is the text after the output. Otherwise it is the text after the
        latest occurrence of the last tokens.
        """
        num_output_tokens = sequence.num_output_tokens
        if prediction[:num_output_tokens] == sequence.output_token_ids:
            return prediction[num_output_tokens : num_output_tokens + most]
        places = self._places(self._in_prediction, sequence, sequence.params.speculation)
        places.update(prediction)
        place = places.find(last)
        return [] if place is None else prediction[place : place + most]

    @staticmethod
    def _places(
        known: "WeakKeyDictionary[Sequence, NgramPositions]", sequence: Sequence, settings: SpeculationConfig
    ) -> NgramPositions:
        places = known.get(sequence)
        if places is None:
            places = known[sequence] = NgramPositions(settings.min_ngram, settings.max_ngram)
        return places


def _shares(settings: SpeculationConfig) -> bool:
    """Return whether a row may copy from other rows. It may not if its tokens would then depend on the other rows."""
    return settings.shared and settings.order is DraftOrder.longest and settings.acceptance is Acceptance.exact


def paddle_draft(sequence: Sequence, max_ngram: int, most: int) -> list[int]:
    """Return the draft of PaddleNLP's method (`ngram_match.cc` of inference_with_reference).

    For n from `max_ngram` down to 1: find the first occurrence of the output's last n tokens in the prompt, and copy
    the tokens after it, clipped at the prompt's end. If the prompt does not contain them, search the output in the same
    way. The searched output starts with the prompt's last token and does not include the last output token.
    """
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    output = sequence.token_ids[sequence.num_prompt_tokens - 1 :]
    for size in range(min(max_ngram, sequence.num_output_tokens), 0, -1):
        key = output[-size:]
        for text in (prompt, output[:-1]):
            for place in range(size, len(text)):
                if text[place - size : place] == key:
                    return text[place : place + most]
    return []
