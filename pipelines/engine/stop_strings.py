"""Finds the first of several strings in streamed text, with one lookup per character (Aho and Corasick 1975)."""

from collections import deque


class StopStrings:
    """An Aho-Corasick automaton. Its states are the prefixes of the strings; state 0 is the empty prefix.

    A text's state is the longest prefix that the text ends with.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.lengths = [0]
        """Length of each state's prefix: this many characters at the end of the text may belong to a string."""
        self._match_lengths = [0]  # length of the longest string that ends in the state; 0: none
        for string in strings:
            self._insert(string)
        # failure link of each state: the longest shorter prefix that its own prefix ends with
        self._shorter = [0] * len(self._next)
        self._link()

    def advance(self, state: int, character: str) -> tuple[int, int]:
        """Return the state after one more character, and the length of the longest string that ends there, or 0."""
        while character not in self._next[state] and state:
            state = self._shorter[state]
        state = self._next[state].get(character, 0)
        return state, self._match_lengths[state]

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.lengths.append(self.lengths[state] + 1)
                self._match_lengths.append(0)
            state = self._next[state][character]
        self._match_lengths[state] = len(string)

    def _link(self) -> None:
        """Compute the failure links (`_shorter`), shorter prefixes first: a link follows from the parent's link."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                self._shorter[child], length = self.advance(self._shorter[state], character)
                self._match_lengths[child] = self._match_lengths[child] or length
                waiting.append(child)
