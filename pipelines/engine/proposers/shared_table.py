"""Tables of the tokens that followed n-grams in finished rows: fixed size, one table per cache_salt."""

from array import array

NUM_BEFORE = 3  # tokens of the n-gram before a follower
NUM_PLACES = 2**21  # entries of a table, of 8 bytes each: 16 MB, as llama.cpp's ngram-mod has
MAX_TABLES = 4  # least recently used salts are dropped
EMPTY = -1


class SharedTables:
    """One table per cache_salt. Rows with different salts share nothing, as in the prefix cache."""

    def __init__(self) -> None:
        # token ids by the hash of the n-gram; the last used table is last
        self._tables: dict[str | None, array[int]] = {}

    def propose(self, salt: str | None, last: list[int], most: int) -> list[int]:
        """Return the stored continuation of `last`, token by token, at most `most` tokens."""
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
        """Add all tokens of a row. A later follower replaces an earlier follower with the same hash."""
        table = self._tables.pop(salt, None)
        self._tables[salt] = table = table or array("q", [EMPTY]) * NUM_PLACES
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        for place in range(NUM_BEFORE, len(token_ids)):
            table[hash(tuple(token_ids[place - NUM_BEFORE : place])) % NUM_PLACES] = token_ids[place]
