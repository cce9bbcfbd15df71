"""Counts of generated tokens, for penalties. The cost per token does not depend on the text's length."""

from array import array


class TokenCounts:
    """The distinct tokens of a growing sequence, in order of first occurrence, with their counts."""

    def __init__(self, num_prompt_tokens: int, with_prompt: bool) -> None:
        """`with_prompt`: also list the prompt's tokens, with count 0 until they are generated."""
        self.token_ids = array("q")
        self.counts = array("q")
        """How often each token of `token_ids` was generated."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_known = 0 if with_prompt else num_prompt_tokens
        self._places: dict[int, int] = {}  # token id to index in both arrays

    def copy(self) -> "TokenCounts":
        copy = TokenCounts.__new__(TokenCounts)
        vars(copy).update(vars(self), token_ids=self.token_ids[:], counts=self.counts[:], _places=dict(self._places))
        return copy

    def update(self, token_ids: list[int]) -> None:
        """Count the new tokens. `token_ids`: prompt and output; the tokens of the last call, extended."""
        for position in range(self._num_known, len(token_ids)):
            token = token_ids[position]
            place = self._places.setdefault(token, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token)
                self.counts.append(0)
            self.counts[place] += position >= self._num_prompt_tokens
        self._num_known = len(token_ids)
