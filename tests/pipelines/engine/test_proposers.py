"""Proposers that copy texts, with hand-written tables."""

from typing import Any

from conf.decoding import DecodeConfig
from conf.speculation import Acceptance, DraftOrder, Speculate, SpeculationConfig
from pipelines.engine.proposers.draft import Draft
from pipelines.engine.proposers.ngram import NgramPositions, NgramProposer, paddle_draft
from pipelines.engine.proposers.shared_table import MAX_TABLES, NUM_BEFORE, SharedTables
from pipelines.engine.request import Sequence
from tests.helpers.cases import each
from tests.helpers.scheduling import factory_of

FACTORY = factory_of()


def sequence(
    prompt: list[int], said: list[int], prediction: list[int] | None = None, salt: str | None = None, **speculation: Any
) -> Sequence:
    settings = SpeculationConfig(**{"shared": False, **speculation})
    decode = DecodeConfig(max_new_tokens=100, speculate=Speculate.ngram, speculation=settings, cache_salt=salt)
    made = Sequence.begin(FACTORY.make(0, prompt, decode, prediction_token_ids=prediction))
    made.token_ids += said
    return made


def draft(row: Sequence, most: int = 3, proposer: NgramProposer | None = None) -> list[int]:
    (tokens,) = (proposer or NgramProposer()).propose([(row, most)])
    return tokens


@each(
    "prompt, said, settings, expected",
    [
        ([1, 2, 3, 4, 5, 1], [2], {}, [3, 4, 5]),  # the tokens after 1 2
        ([1, 2, 3, 4, 1, 2, 6, 7, 9, 1], [2], {}, [6, 7, 9]),  # the latest position
        # the longest n-gram has precedence over the latest position
        ([3, 1, 2, 5, 5, 4, 1, 2, 6, 6, 3, 1], [2], {}, [5, 5, 4]),
        ([3, 1, 2, 5, 5, 4, 1, 2, 6, 6, 3, 1], [2], {"max_ngram": 2}, [6, 6, 3]),
        ([1, 9, 8, 1], [1], {}, []),  # one token is too few
        ([1, 9, 8, 5], [1], {"min_ngram": 1}, [9, 8, 5]),
        ([7, 1], [2, 1, 2], {}, [1, 2, 1]),  # a text that repeats itself continues
        ([7, 8], [9], {"min_ngram": 1}, []),
    ],
)
def test_a_row_copies_from_itself(
    prompt: list[int], said: list[int], settings: dict[str, Any], expected: list[int]
) -> None:
    assert draft(sequence(prompt, said, **settings)) == expected


def test_an_index_grows_with_its_row() -> None:
    row, proposer = sequence([5, 6], [1, 2, 3]), NgramProposer()
    assert draft(row, proposer=proposer) == []
    for token, expected in ((1, []), (2, [3, 1, 2]), (3, [1, 2, 3]), (9, [])):
        row.token_ids.append(token)
        assert draft(row, proposer=proposer) == expected == draft(row)


def test_places_match_a_search() -> None:
    text = [i * i % 7 for i in range(60)]
    places = NgramPositions(1, 4)
    for end in range(1, 60):
        places.update(text[:end])
        size, last = 4, text[:end]
        position = None
        while size and position is None:
            hits = [p for p in range(size, end) if last[p - size : p] == last[-size:]] if size <= end else []
            position, size = (hits[-1] if hits else None), size - 1
        assert places.find(last) == position


@each(
    "said, expected",
    [
        ([4], [5, 6, 7]),  # the output begins with the prediction
        ([4, 5, 6], [7, 8]),
        ([9, 5, 6], [7, 8]),  # a position after the last tokens
        ([4, 5, 6, 7, 8], []),  # its end
        ([9, 9], [1, 9, 9]),  # else the row itself
    ],
)
def test_a_prediction_is_looked_at_first(said: list[int], expected: list[int]) -> None:
    assert draft(sequence([9, 9, 1], said, prediction=[4, 5, 6, 7, 8])) == expected


@each(
    "prompt, said, max_ngram, most, expected",
    [
        ([1, 2, 3, 1, 2, 4], [1, 2], 3, 3, [3, 1, 2]),  # the first position in the prompt, not the latest
        ([1, 2, 3, 9, 2, 4], [9, 2], 3, 3, [4]),  # clipped at the prompt's end
        ([5, 2, 6], [1, 2], 3, 3, [6]),  # one token is enough
        ([5, 6], [1, 2, 3, 1, 2], 3, 2, [3, 1]),  # then the output
        ([5, 6], [1, 2, 3, 1, 2], 3, 9, [3, 1]),  # up to its last token, which is excluded
        ([5, 6], [7, 6], 3, 3, [7]),  # the prompt's last token is the output's first
        ([5, 2], [2], 3, 3, []),  # only the excluded last token follows
        ([5, 2], [2, 3, 2], 3, 3, [2, 3]),  # the first position
        ([2, 5, 1, 2, 9, 1], [2], 3, 2, [5, 1]),  # one token was generated, so one is searched
        ([3, 6, 2, 3, 8, 1, 2, 3, 9, 1], [2, 3], 3, 2, [8, 1]),
        ([5, 6], [7], 3, 3, []),
        ([8, 1, 2, 7, 1, 2], [1, 2], 1, 2, [7, 1]),
    ],
)
def test_paddles_order(prompt: list[int], said: list[int], max_ngram: int, most: int, expected: list[int]) -> None:
    row = sequence(prompt, said, min_ngram=1, max_ngram=max_ngram, order=DraftOrder.paddle)
    assert paddle_draft(row, max_ngram, most) == expected == draft(row, most)


@each("tokens, wanted", [([4, 5, 6], [True, True, False]), ([4, 7], [True, False]), ([None], [False])])
def test_a_draft_of_weights_ends_where_the_text_does(tokens: list[int | None], wanted: list[bool]) -> None:
    """It ends at its length, at a stop token, and if all tokens are banned."""
    decode = DecodeConfig(max_new_tokens=9, stop_token_ids=[7])
    draft = Draft(Sequence.begin(FACTORY.make(0, [1, 2], decode)), most=3)
    assert [draft.add(token) for token in tokens] == wanted
    assert draft.token_ids == [token for token in tokens if token is not None]


def test_rows_of_one_salt_learn_from_each_other() -> None:
    proposer = NgramProposer()
    text = [11, 12, 13, 14, 15, 16]
    for salt in ("a", None):
        proposer.learn(sequence(text[:2], text[2:], salt=salt, shared=True))
        assert draft(sequence([50, 11, 12], [13], salt=salt, shared=True), proposer=proposer) == [14, 15, 16]
    assert draft(sequence([50, 11, 12], [13], salt="b", shared=True), proposer=proposer) == []
    assert draft(sequence([50, 11, 12], [13], salt="a", shared=False), proposer=proposer) == []


@each("settings", [{"shared": False}, {"order": DraftOrder.paddle}, {"acceptance": Acceptance.top_p_window}])
def test_rows_that_do_not_share_teach_and_learn_nothing(settings: dict[str, Any]) -> None:
    proposer, text = NgramProposer(), [11, 12, 13, 14, 15, 16]
    proposer.learn(sequence(text[:2], text[2:], **{"shared": True, **settings}))
    assert draft(sequence([50, 11, 12], [13], shared=True), proposer=proposer) == []
    proposer.learn(sequence(text[:2], text[2:], shared=True))
    assert draft(sequence([50, 11, 12], [13], **{"shared": True, **settings}), proposer=proposer) == []


def test_the_table_that_learned_first_goes_when_there_are_too_many_salts() -> None:
    tables, text = SharedTables(), list(range(NUM_BEFORE + 2))
    for i in (*range(MAX_TABLES), 0, MAX_TABLES):  # the first one learns again
        tables.learn(str(i), text)
    last = text[:NUM_BEFORE]
    known = [bool(tables.propose(str(i), last, 1)) for i in range(MAX_TABLES + 1)]
    assert known == [i != 1 for i in range(MAX_TABLES + 1)]
    assert tables.propose("2", last, 5) == text[NUM_BEFORE:]
    assert tables.propose("2", last[:2], 5) == []
