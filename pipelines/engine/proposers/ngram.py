"""Drafts copied from where the last tokens stood before: in the row itself, in its prediction, in rows that have finished.

Prompt lookup (Saxena 2023) and llama.cpp's lookup decoding are this. A token costs the same however long the text is.
"""

from weakref import WeakKeyDictionary

from conf.speculation import Acceptance, DraftOrder, SpeculationConfig
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.shared_table import SharedTables
from pipelines.engine.request import Sequence


class Places:
    """The latest place after each n-gram of a growing list of tokens, for n from `fewest` to `most`."""

    def __init__(self, fewest: int, most: int) -> None:
        self._sizes = range(most, fewest - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}
        self._num_known = 0

    def update(self, token_ids: list[int]) -> None:
        """Take the tokens that came since the last call. The n-grams at the very end have nothing after them yet."""
        for end in range(max(1, self._num_known), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._places[tuple(token_ids[end - size : end])] = end
        self._num_known = len(token_ids)

    def find(self, last: list[int]) -> int | None:
        """Return the latest place after the longest n-gram that the last tokens end with."""
        for size in self._sizes:
            if size <= len(last) and (place := self._places.get(tuple(last[-size:]))) is not None:
                return place
        return None


def copied(token_ids: list[int], place: int, most: int) -> list[int]:
    """Return the tokens from a place on; after the last one comes again what was copied, as in a text that repeats itself."""
    draft = token_ids[place : place + most]
    while len(draft) < most:
        draft += draft[: most - len(draft)]
    return draft


class NgramProposer(Proposer):
    """Looks first in the row's prediction, then in its prompt and output, then in finished rows of its cache_salt."""

    def __init__(self) -> None:
        self._own: WeakKeyDictionary[Sequence, Places] = WeakKeyDictionary()
        self._predicted: WeakKeyDictionary[Sequence, Places] = WeakKeyDictionary()
        self._shared = SharedTables()

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most so many tokens that may follow each sequence."""
        return [self._draft(sequence, most) for sequence, most in wanted]

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
        places = self._places(self._own, sequence, settings)
        places.update(token_ids)
        place = places.find(last)
        if place is not None:
            return copied(token_ids, place, most)
        return self._shared.propose(sequence.params.cache_salt, last, most) if _shares(settings) else []

    def learn(self, sequence: Sequence) -> None:
        """Let later rows copy from a sequence that has finished."""
        settings = sequence.params.speculation
        if _shares(settings):
            self._shared.learn(sequence.params.cache_salt, sequence.token_ids)

    def _from_prediction(self, sequence: Sequence, prediction: list[int], last: list[int], most: int) -> list[int]:
        """Return what follows in the prediction: after the output where it begins so, else after the last tokens."""
        num_said = sequence.num_output_tokens
        if prediction[:num_said] == sequence.output_token_ids:
            return prediction[num_said : num_said + most]
        places = self._places(self._predicted, sequence, sequence.params.speculation)
        places.update(prediction)
        place = places.find(last)
        return [] if place is None else prediction[place : place + most]

    @staticmethod
    def _places(
        known: "WeakKeyDictionary[Sequence, Places]", sequence: Sequence, settings: SpeculationConfig
    ) -> Places:
        places = known.get(sequence)
        if places is None:
            places = known[sequence] = Places(settings.min_ngram, settings.max_ngram)
        return places


def _shares(settings: SpeculationConfig) -> bool:
    """Return whether a row copies from others: not where its tokens would depend on them."""
    return settings.shared and settings.order is DraftOrder.longest and settings.acceptance is Acceptance.exact


def paddle_draft(sequence: Sequence, max_ngram: int, most: int) -> list[int]:
    """Return PaddleNLP's draft (`ngram_match.cc` of inference_with_reference).

    For n from `max_ngram` down to 1: what follows the first place of the output's last n tokens in the prompt, clipped at the prompt's end;
    else in the output, which begins with the prompt's last token and of which the last token is not copied.
    """
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    said = sequence.token_ids[sequence.num_prompt_tokens - 1 :]
    for size in range(min(max_ngram, sequence.num_output_tokens), 0, -1):
        key = said[-size:]
        for text in (prompt, said[:-1]):
            for place in range(size, len(text)):
                if text[place - size : place] == key:
                    return text[place : place + most]
    return []
