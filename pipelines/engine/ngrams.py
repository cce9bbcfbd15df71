"""Finds the tokens that would repeat an n-gram of a sequence.

The cost per token does not depend on the sequence's length.
"""

MODULUS = 2**127 - 1  # a prime so large that two n-grams with equal hashes are not expected in any run
BASE = 0x9E3779B97F4A7C15F39CC0605CEDC834  # any number below MODULUS


class NgramIndex:
    """The tokens that followed each run of `size - 1` tokens in a growing sequence."""

    def __init__(self, size: int) -> None:
        self._num_before = size - 1
        self._first_weight = pow(BASE, size - 1, MODULUS)  # weight of the token that leaves the run
        self._num_known = 0
        self._run = 0  # hash of the last `num_before` tokens, or of all tokens if there are fewer
        self._followers: dict[int, tuple[int, ...]] = {}

    def copy(self) -> "NgramIndex":
        copy = NgramIndex.__new__(NgramIndex)
        vars(copy).update(vars(self), _followers=dict(self._followers))
        return copy

    def followers(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the tokens that followed earlier occurrences of the last `size - 1` tokens.

        `token_ids`: the tokens of the last call, extended by the new tokens.
        """
        for position in range(self._num_known, len(token_ids)):
            self._take(token_ids, position)
        self._num_known = len(token_ids)
        return self._followers.get(self._run, ()) if len(token_ids) >= self._num_before else ()

    def _take(self, token_ids: list[int], position: int) -> None:
        """Add the token at this position as a follower of the previous run, and as the last token of the next run."""
        token, before = token_ids[position], self._num_before
        run = self._run * BASE + token + 1  # + 1, so that runs of different lengths have different hashes
        if position >= before:
            known = self._followers.get(self._run, ())
            if token not in known:
                self._followers[self._run] = (*known, token)
            run -= (token_ids[position - before] + 1) * self._first_weight
        self._run = run % MODULUS
