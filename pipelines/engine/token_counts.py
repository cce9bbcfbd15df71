"""How often each token was generated, for penalties. A new token costs the same however long the text is."""

from array import array


class TokenCounts:
    """Tokens of a sequence that grows, each once, in the order in which they came first."""

    def __init__(self, num_prompt_tokens: int, with_prompt: bool) -> None:
        """`with_prompt`: list the prompt's tokens too, which count 0 until they are generated."""
        self.token_ids = array("q")
        self.counts = array("q")
        """How often each of `token_ids` was generated."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_known = 0 if with_prompt else num_prompt_tokens
        self._places: dict[int, int] = {}  # token id to its index in both arrays

    def copy(self) -> "TokenCounts":
        other = TokenCounts.__new__(TokenCounts)
        vars(other).update(vars(self), token_ids=self.token_ids[:], counts=self.counts[:], _places=dict(self._places))
        return other

    def update(self, token_ids: list[int]) -> None:
        """Count what is new. `token_ids` are the prompt and output: those of the last call and what came since."""
        for position in range(self._num_known, len(token_ids)):
            token = token_ids[position]
            place = self._places.setdefault(token, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token)
                self.counts.append(0)
            self.counts[place] += position >= self._num_prompt_tokens
        self._num_known = len(token_ids)
