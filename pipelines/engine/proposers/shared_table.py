"""What followed the last tokens in rows that have finished: tables of fixed size, one for each cache_salt."""

from array import array

NUM_BEFORE = 3  # tokens by which a follower is found
NUM_PLACES = 2**21  # of a table, of 8 bytes: 16 MB, as llama.cpp's ngram-mod has
MAX_TABLES = 4  # of as many salts, the last used ones
EMPTY = -1


class SharedTables:
    """Two rows of different salts share nothing, as in the prefix cache."""

    def __init__(self) -> None:
        # token ids, by the hash of the tokens before; the last used table last
        self._tables: dict[str | None, array[int]] = {}

    def propose(self, salt: str | None, last: list[int], most: int) -> list[int]:
        """Return what followed the last tokens, one token after the other, as far as it is known."""
        table = self._tables.get(salt)
        draft: list[int] = []
        if table is None or len(last) < NUM_BEFORE:
            return draft
        before = tuple(last[-NUM_BEFORE:])
        while len(draft) < most and (token := table[hash(before) % NUM_PLACES]) != EMPTY:
            draft.append(token)
            before = (*before[1:], token)
        return draft

    def learn(self, salt: str | None, token_ids: list[int]) -> None:
        """Take all tokens of a row. A later follower of the same tokens, or of others with their hash, takes an earlier one's place."""
        table = self._tables.pop(salt, None)
        self._tables[salt] = table = table or array("q", [EMPTY]) * NUM_PLACES
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        for place in range(NUM_BEFORE, len(token_ids)):
            table[hash(tuple(token_ids[place - NUM_BEFORE : place])) % NUM_PLACES] = token_ids[place]
